"""Read the text of a compiled program: its computations and their instructions.

XLA prints a compiled program as HLO: named computations, each a list of
instructions, of which one is ENTRY. `read` makes objects of that text. Nothing
here knows of JAX: any HLO text is welcome.

Source: the printer of openxla/xla, `xla/hlo/ir/hlo_instruction.cc`.
"""

import dataclasses
import functools
import math
import re
from typing import Any

BITS = {"pred": 8, "c64": 64, "c128": 128, "token": 0, "opaque": 0}
# Strings come first, so that brackets and comments in them are left alone.
TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[()\[\]{},\n]')
STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.S)
COMMENT = re.compile(r'("(?:[^"\\]|\\.)*(?:"|$))|/\*.*?\*/|//[^\n]*', re.S)
HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+)(?: \(.*)? \{\s*")
NAME = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = ")
ARRAY = re.compile(r"(\w+)\[([^\]]*)\](?:\{([^}]*)\})?")
# What the partitioner reads, of both kinds: shardings, and where a shard_map begins and ends.
UNDIVIDED = re.compile(r'xla\.sdy\.\w+|sharding=\{[^"\n]*?devices=\[|"SPMD\w+Shape"')
TILE = re.compile(r"T\(([\d,]+)\)")


@dataclasses.dataclass(frozen=True)
class Shape:
    """One array of a program: the type of its elements and its extents on one device.

    layout: as the compiler writes it, such as "1,0:T(8,128)S(1)": the dimensions from the one whose
    elements are neighbours outwards, the tiles, the memory. Shapes that differ in it are equal.
    """

    dtype: str
    dims: tuple
    layout: str = dataclasses.field(default="", compare=False)

    @property
    def size(self):
        """How many elements it has."""
        return math.prod(self.dims)

    @property
    def bytes(self):
        """How many bytes its elements fill, without padding."""
        return (self.size * self._bits + 7) // 8

    @property
    def _bits(self):
        digits = re.search(r"\d+", self.dtype)  # the first number: f8e4m3fn has 8 bits
        return BITS.get(self.dtype, int(digits.group()) if digits else 0)

    @property
    def space(self):
        """The memory that it lies in: 0 is the device's own; on a TPU 1 is that beside its core."""
        found = re.search(r"S\((\d+)\)", self.layout)
        return int(found[1]) if found else 0

    @property
    def tiled_bytes(self):
        """How many bytes it takes in memory: a TPU fills the last tile of a dimension up."""
        tile = TILE.search(self.layout)
        if not tile:
            return self.bytes
        order = [int(at) for at in self.layout.partition(":")[0].split(",") if at]
        dims = [self.dims[at] for at in order] or [1]  # the innermost first
        for at, size in enumerate(reversed(tile[1].split(","))):
            dims[at] = -(-dims[at] // int(size)) * int(size)
        return (math.prod(dims) * self._bits + 7) // 8


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation; `shape` is a Shape, or a tuple of them.

    text: what stands behind the opcode, from its opening bracket. It is read when somebody asks
    for what is in it: a program has thousands of lines, and most are asked for their opcode alone.
    """

    name: str
    shape: object
    opcode: str
    text: str

    @functools.cached_property
    def _closes(self):
        return _closing(self.text)

    @property
    def literal(self):
        """What its brackets hold, as it is written: operands, a constant's value, a number."""
        return self.text[1:self._closes]

    @functools.cached_property
    def operands(self):
        """The names of its operands, in order."""
        return tuple(_last_name(part) for part in split(self.literal, ",") if part.strip())

    @functools.cached_property
    def attributes(self):
        """What stands behind its brackets, {key: value} as it is written."""
        known = {}
        for attribute in split(self.text[self._closes + 1:], ","):
            key, _, value = attribute.strip().partition("=")
            if key == "device_ids":  # the second half of replica_groups=mesh[...], device_ids=(...)
                key, value = "replica_groups", known["replica_groups"] + value
            known[key] = value
        return known

    @property
    def op_name(self):
        """Its path in the Python program, such as jit(step)/block_0/dot_general, or ""."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes.get("metadata", ""))
        return found[1] if found else ""

    @property
    def primitive(self):
        """The JAX primitive that it was made of: the last part of its path, or ""."""
        return self.op_name.rpartition("/")[2]

    def called(self, *keys: str):
        """Names of the computations that stand in these attributes, in order."""
        found = [re.findall(r"%?([\w.\-]+)", self.attributes.get(key, "")) for key in keys]
        return [name for names in found for name in names]


def shape_bytes(shape: Shape | tuple):
    """The bytes of a Shape, or of all in a (nested) tuple of them."""
    return shape.bytes if isinstance(shape, Shape) else sum(map(shape_bytes, shape))


@dataclasses.dataclass(frozen=True)
class Computation:
    """A named list of instructions; `root` is the name of the one that it returns."""

    name: str
    instructions: dict
    root: str

    def __getitem__(self, name):
        return self.instructions[name]


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program: computations by name, the name of ENTRY, and how many devices run it.

    header: the line that begins with HloModule, or "".
    """

    computations: dict
    entry: str
    replicas: int
    partitions: int
    header: str


def parse(text: Any):
    """Make a Module of HLO text, or of anything with `as_text`, such as `jax.stages.Compiled`.

    Raises ValueError where the text has no ENTRY computation, and where it is that of a program
    before its division over devices (a lowered program as HLO): its shapes are whole, and its
    collectives are not there yet. Raises TypeError for other objects.
    """
    if hasattr(text, "as_text"):
        text = text.as_text()
    if not isinstance(text, str):
        raise TypeError(f"expected a compiled program or its HLO text, found {type(text).__name__}")
    return _parsed(text)


@functools.lru_cache(maxsize=1)  # several questions in a row are put to one program
def _parsed(text):
    computations, entry, first = {}, None, ""
    lines = iter(text.replace("\r\n", "\n").split("\n"))
    for line in lines:
        if line.startswith("HloModule"):
            first = line
        elif header := HEADER.fullmatch(line):
            computations[header[2]] = _computation(header[2], lines)
            entry = header[2] if header[1] else entry
    if entry is None:
        raise ValueError(
            "expected the text of a compiled program, with an ENTRY computation; found "
            f"{text[:60]!r}. Use lowered.compile(), not the lowered program."
        )
    if first and "is_scheduled=true" not in first and (mark := UNDIVIDED.search(text)):
        raise ValueError(
            "expected the text of a compiled program (is_scheduled=true); found a program that is "
            f"still to be divided over devices, with {mark[0]!r}. Use lowered.compile(), not "
            "lowered.as_text(dialect=\"hlo\").")
    return Module(computations, entry, _header_number(first, "replica_count"),
                  _header_number(first, "num_partitions"), first)


def _header_number(header, key):
    found = re.search(rf"\b{key}=(\d+)", header)
    return int(found[1]) if found else 1


def _computation(name, lines):
    instructions, root = {}, None
    for statement in _statements(lines):
        if start := NAME.match(statement):
            instructions[start[2]] = _instruction(start[2], statement[start.end():])
            root = start[2] if start[1] else root
    return Computation(name, instructions, root or next(reversed(instructions), None))


def _statements(lines):
    """A computation's lines without comments, joined where one ends within brackets or a string.

    Takes the lines up to the } that ends the computation: the first outside of both.
    """
    depth, held, started = 0, [], ""
    for line in lines:
        if not held and not started and line.startswith("}"):
            return
        line = started + line
        if "/*" in line or "//" in line:
            line = COMMENT.sub(lambda match: match[1] or "", line)
        bare = STRING.sub("", line) if '"' in line else line
        if '"' in bare:  # a string goes on in the next line
            started = line + "\n"
            continue
        started = ""
        held.append(line)
        depth += sum(map(bare.count, "([{")) - sum(map(bare.count, ")]}"))
        if depth == 0:
            yield "\n".join(held)
            held = []
    if not held and not started:
        raise ValueError("expected a } that ends the computation, found the end of the HLO text: "
                         "it is cut off")
    raise ValueError(f"expected a closing bracket or quote in the HLO text, found none after "
                     f"{(held + [started])[0][:60]!r}")


def _instruction(name, text):
    shape, end = _shape(text, 0)
    opcode, bracket, rest = text[end:].strip().partition("(")
    return Instruction(name, shape, opcode, bracket + rest)


def _closing(text):
    """The position of the bracket that closes the one that a text begins with."""
    depth = 0
    for token in TOKEN.finditer(text):
        depth += (token[0] in "([{") - (token[0] in ")]}")
        if depth == 0:
            return token.start()
    raise ValueError(f"expected a closing bracket in the HLO text, found none after {text[:60]!r}")


def _last_name(part):
    words = part.split()
    return words[-1].lstrip("%") if words else ""


def _shape(text, at):
    """The shape that starts at a position, and the position behind it."""
    if text.startswith("(", at):
        parts, at = [], at + 1
        while not text.startswith(")", at):
            part, at = _shape(text, at)
            parts.append(part)
            at = re.compile(r"[,\s]*").match(text, at).end()
        return tuple(parts), at + 1
    if text.startswith("b(", at):  # a buffer, as the newest printers call it
        part, at = _shape(text, at + 2)
        return part, at + 1
    found = ARRAY.match(text, at)
    if not found:
        raise ValueError(f"expected a shape in the HLO text, found {text[at:at + 60]!r}")
    return _array(found[1], found[2], found[3] or ""), found.end()


@functools.lru_cache(maxsize=4096)  # a program has thousands of arrays of a few dozen shapes
def _array(dtype, extents, layout):
    # <=8: an extent that is known only when the program runs, by its bound
    dims = tuple(int(dim.strip("<=")) for dim in extents.split(",") if dim.strip())
    return Shape(dtype, dims, layout)


def split(text: str, separator: str):
    """Cut a text at the separators that stand outside all brackets and strings."""
    parts, depth, start = [], 0, 0
    for token in TOKEN.finditer(text):
        character = token[0]
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and character == separator:
            parts.append(text[start: token.start()])
            start = token.end()
    return parts + [text[start:]]
