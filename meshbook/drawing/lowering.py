"""What becomes of a function on its way to the devices: jaxpr, StableHLO, optimised HLO.

`operations` lists what each stage is made of, `listing` is its text without what only tools read,
`sources` leads from the operations of the last stage, or of a trace, back to Python, and
`draw_stages` draws the whole way. Any jitted function is welcome.

Source: the StableHLO specification, and the printer of openxla/xla,
`xla/hlo/ir/hlo_instruction.cc`.
"""

import math
import re
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh
from jax.stages import Compiled, Lowered

from meshbook.drawing import svg
from meshbook.hlo import module
from meshbook.hlo.opcodes import COLLECTIVE
from meshbook.hlo.replica_groups import replica_groups

KINDS = {"matmul": svg.KINDS[0], "other computing": svg.SERIES[4],
         "shape or sharding": svg.KINDS[2], "collective": svg.KINDS[1]}
MATMULS = {"dot_general", "dot", "conv_general_dilated", "convolution"}
MOVES = {each.replace("-", "_") for each in COLLECTIVE} | {
    "psum", "psum_invariant", "pmax", "pmin", "ppermute", "all_gather_invariant"}
RESHAPING = {"sharding_constraint", "reshard", "reshape", "transpose", "broadcast_in_dim",
           "broadcast", "copy", "squeeze", "expand_dims", "pvary", "pcast"}
WIDE = 400.0
NOTHING = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}
STATEMENT = re.compile(r'\s*(?:%[^=]*= )?"?(?:stablehlo|chlo|sdy)\.(\w+)')
TOOLS = (" metadata=", " backend_config=", " frontend_attributes=")


class Operation(NamedTuple):
    """One operation of a stage: its name, a key of KINDS, the dims of its result, its source.

    label is what kind of operation it is, such as "dot" or "fusion of 9"; source the path in the
    Python program that it comes from, which only optimised HLO tells.
    """

    name: str
    label: str
    kind: str
    dims: tuple
    source: str = ""


def operations(stage: Any):
    """List what a program is made of at one stage, in order: Operations.

    stage: what `jax.make_jaxpr` returns (calls are looked into), what `lower` returns (constants
    are left out), or what `compile` returns (ENTRY, without what costs nothing to run). Raises
    TypeError for anything else.
    """
    if hasattr(stage, "jaxpr"):
        return _of_jaxpr(stage.jaxpr)
    if hasattr(stage, "compile"):
        return [each for line in stage.as_text().splitlines() for each in _of_statement(line)]
    if hasattr(stage, "as_text"):
        program = module.parse(stage)
        entry = program.computations[program.entry].instructions.values()
        return [_of_instruction(program, each) for each in entry
                if each.opcode not in NOTHING and not each.opcode.endswith("-done")]
    raise TypeError("expected a jaxpr, a lowered program or a compiled one, found "
                    f"{type(stage).__name__}")


def _of_jaxpr(jaxpr):
    found = []
    for equation in jaxpr.eqns:
        name, inner = equation.primitive.name, _inner(equation)
        if inner:
            found += [each for body in inner for each in _of_jaxpr(body)]
        else:
            found.append(Operation(name, name, _kind(name), equation.outvars[0].aval.shape))
    return found


def _inner(equation):
    """The jaxprs that an equation calls."""
    bodies = [getattr(value, "jaxpr", value) for value in equation.params.values()]
    return [body for body in bodies if hasattr(body, "eqns")]


def _of_statement(line):
    """The operation that a line of StableHLO states, or nothing."""
    found, shapes = STATEMENT.match(line), re.findall(r"tensor<((?:\d+x)*)\w+>", line)
    if not found or not shapes or found[1] in ("constant", "return"):
        return []
    dims = tuple(int(size) for size in shapes[-1].split("x") if size)
    return [Operation(found[1], found[1], _kind(found[1]), dims)]


def _of_instruction(program, instruction):
    shape = instruction.shape[0] if isinstance(instruction.shape, tuple) else instruction.shape
    label = instruction.opcode.removesuffix("-start")
    if called := instruction.called("calls", *["to_apply"] * (label == "call")):
        inside = [each.opcode for name in called
                  for each in program.computations[name].instructions.values()
                  if each.opcode not in NOTHING and _kind(each.opcode) != "shape or sharding"]
        matmuls = [opcode for opcode in inside if opcode in MATMULS]
        label = matmuls[0] if matmuls else f"{label} of {len(inside)}"
    return Operation(instruction.name, label, _kind(label), shape.dims, instruction.op_name)


def _kind(label):
    """The key of KINDS for an operation's label in any of the three languages."""
    label = label.replace("-", "_")
    for kind, labels in (("matmul", MATMULS), ("collective", MOVES),
                         ("shape or sharding", RESHAPING)):
        if label in labels:
            return kind
    return "other computing"


def sources(compiled: Compiled | str):
    """{operation: its path in the Python program}, such as `jit(step)/block_0/mul`.

    compiled: `jax.stages.Compiled`, or HLO text. Operations have the names that a trace gives
    them. The names in a path are those of functions, of `jax.named_scope` and of JAX's primitives;
    it is "" for what the compiler added.
    """
    computations = module.parse(compiled).computations.values()
    return {name: instruction.op_name for computation in computations
            for name, instruction in computation.instructions.items()}


def listing(stage: ClosedJaxpr | Lowered | Compiled):
    """The text of a stage, without tables and attributes that are for tools only.

    Of optimised HLO only ENTRY and what it computes with are left: no file names, no metadata, no
    settings of the backend.
    """
    if hasattr(stage, "jaxpr"):
        return stage.pretty_print(use_color=False)
    text = stage.as_text()
    if hasattr(stage, "compile"):
        return text.rstrip()
    blocks = re.findall(r"^(?:ENTRY )?%.*? \{\n.*?^\}", text, re.M | re.S)
    return "\n\n".join("\n".join(map(_without_tools, block.splitlines())) for block in blocks)


def _without_tools(line):
    """A line of HLO without the attributes that say where it came from and how to run it."""
    return ",".join(part for part in module.split(line, ",") if not part.startswith(TOOLS))


def draw_stages(jaxpr: ClosedJaxpr, lowered: Lowered, compiled: Compiled, mesh: Mesh):
    """Draw what becomes of a function: the operations of each stage as boxes, and the devices.

    jaxpr, lowered, compiled: the three stages of one function; mesh: the devices that run it. A box
    is an operation in the colour of its kind; devices of one group of the collective are joined.
    """
    rows = (("jaxpr", "what JAX records", "whole arrays", jaxpr),
            ("StableHLO", "what the compiler is given", "whole arrays", lowered),
            ("optimised HLO", "what one device runs", "its pieces", compiled))
    verbs = ("lower: translate it for a compiler",
             "compile: split arrays, insert collectives, fuse", "run")
    body, y = svg.key(KINDS, WIDE)
    said = []
    for (name, words, whose, stage), verb in zip(rows, verbs, strict=True):
        listed = operations(stage)
        largest = max((each.dims for each in listed), key=math.prod, default=())
        count = f"{len(listed)} operations on {whose}, up to {' × '.join(map(str, largest))}"
        body += [svg.text(0, y + 13, name, 13, "start", font_weight="600"),
                 svg.text(WIDE, y + 13, words, 12, "end"), *_strip(listed, y + 20),
                 svg.text(0, y + 61, count, 12, "start"), *_down(y + 68, verb)]
        said.append(f"{name}, {words}: {count} ({_counted(listed)})")
        y += 96.0
    body += _devices(compiled, mesh, y)
    alt = f"{'; '.join(said)}; the same program on each of {mesh.size} devices"
    return svg.picture("".join(body), WIDE, y + 72, alt, shown=520)


def _counted(listed):
    kinds = [each.kind for each in listed]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in KINDS if kind in kinds)


def _strip(listed, y):
    """Boxes side by side, with their labels where there is room for all of them."""
    wide = min(WIDE / max(len(listed), 1), 100.0)
    roomy = all(svg.text_width(each.label, 12) < wide - 4 for each in listed)
    body = []
    for at, each in enumerate(listed):
        fill, x = KINDS[each.kind], at * wide
        body.append(svg.rectangle(x, y, wide - 2, 26, fill=fill, rx=2, data_kind=each.kind))
        if roomy:
            middle = x + wide / 2 - 1
            body.append(svg.text(middle, y + 17, each.label, 12, fill=svg.ink(fill)))
    return body


def _down(y, verb):
    words = svg.text(20, y + 15, verb, 12, "start", font_style="italic")
    return [svg.arrow(8, y, 8, y + 22), words]


def _devices(compiled, mesh, y):
    """The devices in a row, joined where they meet in the program's last collective."""
    ids, pitch = [device.id for device in mesh.devices.flat], WIDE / mesh.size
    at = [pitch * (place + 0.5) for place in range(mesh.size)]
    instructions = [each for computation in module.parse(compiled).computations.values()
                    for each in computation.instructions.values()]
    groups = [each.attributes["replica_groups"] for each in instructions
              if "replica_groups" in each.attributes]
    body = [svg.text(0, y + 13, f"{mesh.size} devices", 13, "start", font_weight="600"),
            svg.text(WIDE, y + 13, "each with its own pieces", 12, "end")]
    for group in replica_groups(groups[-1]) if groups else ():
        for one, other in zip(group, group[1:]):
            path = f"M{svg.number(at[one])} {y + 48}q{svg.number((at[other] - at[one]) / 2)} 26 " \
                   f"{svg.number(at[other] - at[one])} 0"
            body.append(svg.element("path", d=path, fill="none", stroke=KINDS["collective"],
                                    stroke_width=3.0))
    for x, device in zip(at, ids, strict=True):
        colour = svg.device_colour(device)
        body.append(svg.rectangle(x - 15, y + 22, 30, 30, fill=colour, rx=4))
        body.append(svg.text(x, y + 42, str(device), 13, fill=svg.ink(colour)))
    return body
