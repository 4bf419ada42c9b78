"""What one device must hold at each instruction of a compiled program: live bytes.

The text of a compiled program is its schedule. An array lives from the instruction that writes it
to the last one that reads it, an argument from start to end unless it is donated, an output until
the end. A loop holds its state, and while it runs the most that its body holds besides. What an
instruction can do in place, it does: a result takes the buffer of an operand that nothing reads
any more, and that of the operand that a kernel writes into (`output_to_operand_aliasing`).

Source: openxla/xla, `xla/service/buffer_assignment.cc` and `xla/service/hlo_dataflow_analysis.cc`,
which decide who may share a buffer with whom.
"""

import collections
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from meshbook.hlo import memory, module
from meshbook.text import sized_bytes

ROLES = ("argument", "output", "temporary")
NO_BUFFER = ("constant", "after-all", "partition-id", "replica-id")
THROUGH = ("bitcast", "while", "opt-barrier", "optimization-barrier")
UPDATES = ("dynamic-update-slice", "scatter")
ELEMENTWISE = {
    *("abs", "add", "and", "atan2", "cbrt", "ceil", "clamp", "compare", "convert", "cosine"),
    *("divide", "erf", "exponential", "exponential-minus-one", "floor", "is-finite", "log"),
    *("log-plus-one", "logistic", "maximum", "minimum", "multiply", "negate", "not", "or"),
    *("power", "remainder", "round-nearest-afz", "round-nearest-even", "rsqrt", "select"),
    *("shift-left", "shift-right-arithmetic", "shift-right-logical", "sign", "sine", "sqrt"),
    *("subtract", "tan", "tanh", "xor"),
}
# {1}: (0, {}) of output_to_operand_aliasing: output 1 lies where operand 0 does
ALIASED = re.compile(r"\{([\d, ]*)\}: ?\((\d+), ?\{([\d, ]*)\}")
INSIDE = ELEMENTWISE | {"parameter", "constant", "broadcast", "bitcast", "iota"}


class Buffer(NamedTuple):
    """An array in memory: its role (argument, output, temporary), and from when to when it lives.

    `name` is the instruction that writes it first, `source` what that is in the Python program,
    `first` and `last` are places in the schedule.
    """

    name: str
    role: str
    shape: module.Shape
    first: int
    last: int
    source: str

    @property
    def bytes(self):
        """What it takes of the device's memory: tiles filled up, 0 where it lies elsewhere."""
        return memory.of_device(self.shape, self.shape)


class Liveness:
    """The buffers of a program over its schedule; prints as one line about the fullest moment.

    `schedule` has the names of the instructions, `bytes` what is live at each of them, `peak` the
    largest of these, `at` its place. `values` says in which buffers the result of each instruction
    lies, by number, or None for an array without one; `donated` which argument each output may take
    the place of, {number of the output: that of the argument, as the program writes it}.
    """

    def __init__(
        self, schedule: Sequence[str], buffers: Sequence[Buffer],
        values: Mapping[str, Sequence[int | None]] | None = None,
        donated: Mapping[int, str] | None = None,
    ):
        self.schedule, self.buffers = schedule, buffers
        self.values, self.donated = values or {}, donated or {}
        self.bytes = [sum(live) for live in zip(*self.by_role().values(), strict=True)]
        self.peak = max(self.bytes)
        self.at = self.bytes.index(self.peak)

    def by_role(self):
        """{"argument", "output" or "temporary": the bytes live at each instruction}."""
        change = {role: collections.Counter() for role in ROLES}
        for each in self.buffers:
            change[each.role][each.first] += each.bytes
            change[each.role][each.last + 1] -= each.bytes
        return {role: list(itertools.accumulate(own[at] for at in range(len(self.schedule))))
                for role, own in change.items()}

    def largest(self):
        """The buffers that are live at the peak, largest first."""
        live = [each for each in self.buffers if each.first <= self.at <= each.last]
        return sorted(live, key=lambda each: -each.bytes)

    def __repr__(self):
        return (f"at most {sized_bytes(self.peak)} live on a device, at instruction {self.at + 1} "
                f"of {len(self.schedule)}, %{self.schedule[self.at]}")


def live_bytes(compiled: Any):
    """Find what one device holds at each instruction of a compiled program: a Liveness.

    compiled: `jax.stages.Compiled`, or HLO text. Bytes are those of the device's memory, on a TPU
    with the tiles of an array filled up and without what lies beside its core. The gaps between
    arrays are the allocator's and do not count, nor do constants, which belong to the program's
    code. Raises ValueError where the program has no schedule.

    >>> live_bytes(train_step.lower(state, batch).compile()).largest()[:5]
    """
    program = module.parse(compiled)
    header = program.header
    if "is_scheduled=true" not in header:
        raise ValueError("expected a compiled program with a schedule (is_scheduled=true), found "
                         f"{header[:60]!r}")
    entry = program.computations[program.entry]
    given = donated_arguments(program)
    kept = {each.name for each in entry.instructions.values()
            if each.opcode == "parameter" and int(each.literal) not in given.values()}
    buffers, values = _lives(program, entry, kept)
    returned, end = set(_leaves(values[entry.root])), len(entry.instructions) - 1
    lives = [
        each._replace(first=0 if each.role == "argument" else each.first,
                      last=end if at in returned or each.name in kept else each.last,
                      role="output" if at in returned and each.role != "argument" else each.role)
        for at, each in enumerate(buffers)]
    return Liveness(list(entry.instructions), lives,
                    {name: _flat(value) for name, value in values.items()},
                    {output: str(argument) for output, argument in given.items()})


def donated_arguments(program: module.Module):
    """Which argument each output may take the place of: {number of the output: of the argument}."""
    # input_output_alias={ {0}: (3, {}, may-alias) }: output 0 may lie where parameter 3 was.
    pairs = re.findall(r"\{(\d*)\}: \((\d+), \{[\d, ]*\}, (?:may|must)-alias\)", program.header)
    return {int(output or 0): int(argument) for output, argument in pairs}


def _lives(program, computation, kept=()):
    """(buffers with their lives, {instruction: the numbers of its buffers}) of a computation.

    kept: the names of parameters that no result may take the place of.
    """
    # Who reads what last is found without sharing; then results take the place of what dies.
    _, values = _buffers(program, computation, {})
    last = _last_reads(computation, values)
    dying = {name: max((last.get(leaf, -1) for leaf in _leaves(value)), default=-1)
             for name, value in values.items() if name not in kept}
    buffers, values = _buffers(program, computation, dying)
    last = _last_reads(computation, values)
    buffers = [each._replace(last=last.get(at, each.first)) for at, each in enumerate(buffers)]
    for place, instruction in enumerate(computation.instructions.values()):
        if inside := _inside(program, instruction):
            shape = module.Shape("u8", (inside,))
            source = f"{instruction.op_name or instruction.name}, inside"
            buffers.append(Buffer(instruction.name, "temporary", shape, place, place, source))
    return buffers, values


def _last_reads(computation, values):
    """{buffer: the place of the last instruction that reads it}.

    What takes one array out of a tuple reads that one, however late it stands in the schedule.
    """
    read = {}
    for place, instruction in enumerate(computation.instructions.values()):
        if instruction.opcode == "get-tuple-element":
            leaves = _leaves(values[instruction.name])
        else:
            leaves = [leaf for name in instruction.operands for leaf in _leaves(values.get(name))]
        read.update(dict.fromkeys(leaves, place))
    return read


def _leaves(value):
    return [leaf for leaf in _flat(value) if leaf is not None]


def _flat(value):
    return [leaf for each in value for leaf in _flat(each)] if isinstance(value, tuple) else [value]


def _inside(program, instruction):
    """The most bytes that what an instruction calls holds, besides what it is given."""
    keys = ("condition", "branch_computations", "true_computation", "false_computation")
    called = instruction.called(*keys, *(["to_apply"] if instruction.opcode == "call" else []))
    held = [_held(program, program.computations[name]) for name in called]
    held += [_held(program, program.computations[name], loop=True)
             for name in instruction.called("body")]
    return max(held, default=0)


def _held(program, computation, loop=False):
    """The most bytes of a computation that are neither its parameters' nor its result's.

    A loop's next state goes where its state is: until that has been read, it is held besides.
    """
    buffers, values = _lives(program, computation)
    result = values[computation.root]
    until = {at: -1 for at in _leaves(result)}
    if loop:
        state = next(values[each.name] for each in computation.instructions.values()
                     if each.opcode == "parameter")
        until.update({after: buffers[before].last for before, after
                      in zip(_flat(state), _flat(result), strict=True) if after in until})
    own = [each._replace(last=until.get(at, each.last)) for at, each in enumerate(buffers)
           if each.role == "temporary" and until.get(at, each.last) >= each.first]
    return Liveness(list(computation.instructions), own).peak


def _buffers(program, computation, dying):
    """(buffers, {instruction: the numbers of its buffers, a tuple's as a tuple, or None}).

    dying: {instruction: the place where its result is read for the last time}.
    """
    buffers, values = [], {}
    for place, instruction in enumerate(computation.instructions.values()):
        role = "argument" if instruction.opcode == "parameter" else "temporary"

        def new(shape):
            if isinstance(shape, tuple):
                return tuple(map(new, shape))
            buffers.append(
                Buffer(instruction.name, role, shape, place, place, instruction.op_name))
            return len(buffers) - 1

        given = [values.get(name) for name in instruction.operands]
        free = [at for at, name in enumerate(instruction.operands) if dying.get(name) == place]
        values[instruction.name] = _value(program, computation, instruction, given, free, new)
    return buffers, values


def _value(program, computation, instruction, given, free, new):
    """The buffers that an instruction's result lies in: new ones, or those of its operands."""
    opcode, shape = instruction.opcode, instruction.shape
    if opcode in NO_BUFFER:
        return None
    if opcode == "tuple":
        return tuple(given)
    if opcode == "get-tuple-element":
        return given[0][int(instruction.attributes["index"])]
    if opcode.endswith("-done"):
        return given[0] if opcode == "all-reduce-done" else given[0][opcode != "copy-done"]
    if opcode == "copy-start":  # (the copy, what is copied, a handle)
        return new(shape[0]), given[0], new(shape[2])
    if opcode.endswith("-start") and opcode != "all-reduce-start":  # (operands, results, ...)
        operands = tuple(given) if isinstance(shape[0], tuple) else given[0]
        return operands, *(new(each) for each in shape[1:])
    shared = {_path(output): _at(given[int(number)], _path(within)) for output, number, within
              in ALIASED.findall(instruction.attributes.get("output_to_operand_aliasing", ""))}
    if shared:  # as a kernel or a library wants it, whoever else reads the operand
        return _with_shared(shape, shared, new)
    at = _in_place(program, computation, instruction, free)
    return new(shape) if at is None or given[at] is None else given[at]


def _path(text):
    return tuple(int(each) for each in text.split(",") if each.strip())


def _at(value, path):
    """What lies at a path into a value; a value without a buffer has none anywhere."""
    for at in path:
        value = None if value is None else value[at]
    return value


def _with_shared(shape, shared, new, path=()):
    """A result whose parts lie in the buffers {path: value} of operands, and else in new ones."""
    if shared.get(path) is not None:
        return shared[path]
    if not isinstance(shape, tuple):
        return new(shape)
    return tuple(_with_shared(each, shared, new, (*path, at)) for at, each in enumerate(shape))


def _in_place(program, computation, instruction, free):
    """The number of the operand whose buffer the result takes, None for a new one."""
    opcode, inner = instruction.opcode, None
    if opcode in (*THROUGH, *UPDATES):
        return 0
    if opcode == "fusion":
        inner = program.computations[instruction.called("calls")[0]]
        at = inner[inner.root]
        while at.opcode in ("bitcast", *UPDATES):
            at = inner[at.operands[0]]
        if at.opcode == "parameter" and inner[inner.root].opcode != "parameter":
            return int(at.literal)
    opcodes = {each.opcode for each in inner.instructions.values()} if inner else {opcode}
    if isinstance(instruction.shape, module.Shape) and opcodes <= INSIDE:
        alike = [at for at in free if computation[instruction.operands[at]].shape
                 == instruction.shape]
        return alike[0] if alike else None
    return None
