"""What fills the memory of a training step over its schedule: parameters, activations, and so on.

A buffer has one kind after another: a gradient may lie where an activation was. So kinds are those
of values, each of which is in its buffer from the instruction that writes it to the next that
writes there. They are read from the compiled program, by the rules of `kinds_over_time`.
"""

import collections
import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from meshbook.hlo import liveness, memory, module

KINDS = ("parameters", "moments", "gathered weights", "weight gradients", "activations",
         "activation gradients", "logits and loss", "other")
SMALL = 1024  # bytes
LOSS = {"head", "logits", "loss"}  # scopes whose results are logits, or what becomes of them
PASSED_ON = ("tuple", "get-tuple-element", "bitcast", "while", "opt-barrier",
             "optimization-barrier")  # what gives its operands' buffers on as they are
MOVES = {  # what moves, converts or adds up an array, so that it remains of the same kind
    "all-gather", "all-reduce", "bitcast", "concatenate", "constant", "convert", "copy",
    "dynamic-slice", "get-tuple-element", "pad", "parameter", "reduce-scatter", "reshape", "slice",
    "transpose", "tuple"}


class StepMemory(NamedTuple):
    """The bytes of each kind on one device at each instruction of a training step.

    kinds: {kind: [bytes]}; turn: the place in the schedule where the backward pass begins; busy:
    the places of the instructions that write a kilobyte or more.
    """

    kinds: Mapping[str, Sequence[int]]
    turn: int
    busy: Sequence[int]

    @property
    def total(self):
        """The bytes that are live at each instruction."""
        return [sum(parts) for parts in zip(*self.kinds.values(), strict=True)]

    def at_peak(self):
        """{kind: its bytes where most is live}."""
        total = self.total
        at = total.index(max(total))
        return {kind: sizes[at] for kind, sizes in self.kinds.items()}


@dataclasses.dataclass(eq=False)
class _Value:
    """What an instruction writes into a buffer, from its first place in the schedule to its last.

    number: of the buffer; given: the values that its writer reads; readers: instructions.
    """

    number: int
    writer: str
    given: list
    first: int
    last: int
    readers: list = dataclasses.field(default_factory=list)


def kinds_over_time(compiled: Any):
    """Find what fills a device's memory at each instruction of a training step: a StepMemory.

    compiled: `jax.stages.Compiled`, or HLO text, of a step whose arguments have the parameters in a
    path with `params` and the optimizer's state in one with `opt_state`. A value is

    - of the parameters or moments, if it is such an argument, or a result that takes its place;
    - a gathered weight, if an all-gather made it of parameters, or it is a copy of such a value;
    - a weight gradient, if it was written in the backward pass and reaches the update (a
      scope of that name, or what writes the new state) moved or added up at most;
    - logits or loss, if it was written in a scope called head, logits or loss;
    - an activation, if it was written in the forward pass and is there in the backward pass, or if
      `jax.checkpoint` computed it again;
    - an activation gradient, if an operation of the backward pass wrote it otherwise;
    - other, if it is none of these: the inputs, and what the forward pass and the update work with.

    The turn to the backward pass is the place that best separates the operations whose names say
    that they are of one or of the other. Raises ValueError for a program that has no schedule, or
    no operation of a backward pass.
    """
    live, step = liveness.live_bytes(compiled), _Step(compiled)
    changes = {kind: [0] * (len(live.schedule) + 1) for kind in KINDS}
    values = list(_values(step, live))
    kinds = _kinds(step, live, values)
    known = {value.number for value in values}
    held = [(kind, live.buffers[value.number].bytes, value.first, value.last)
            for value, kind in zip(values, kinds, strict=True)]
    held += [("other", each.bytes, each.first, each.last)  # what a loop holds inside
             for number, each in enumerate(live.buffers) if number not in known]
    for kind, size, first, last in held:
        changes[kind][first] += size
        changes[kind][last + 1] -= size
    written = collections.Counter()
    for value in values:
        written[value.writer] += live.buffers[value.number].bytes
    busy = [place for place, name in enumerate(live.schedule)
            if written[name] >= SMALL and step[name].opcode not in memory.FREE]
    return StepMemory({kind: list(itertools.accumulate(own[:-1])) for kind, own in changes.items()},
                      step.turn, busy)


class _Step:
    """The instructions of a step by name, and what their names in the Python program say."""

    def __init__(self, compiled):
        self.program = module.parse(compiled)
        self.entry = self.program.computations[self.program.entry]
        self.paths = {name: self._paths(each) for name, each in self.entry.instructions.items()}
        self.turn = _turn(list(self.paths.values()))

    def __getitem__(self, name):
        return self.entry[name]

    def _inner(self, name):
        return [each for called in self[name].called("calls", "called_computations")
                for each in self.program.computations[called].instructions.values()]

    def _paths(self, instruction):
        """Its path in the Python program, or those of what is fused in it."""
        own = instruction.op_name
        return [own] if own else [each.op_name for each in self._inner(instruction.name)
                                  if each.op_name]

    def scopes(self, name):
        """The words in its paths, such as block_0."""
        return {word for path in self.paths[name] for word in re.findall(r"\w+", path)}

    def opcodes(self, name):
        """Its opcode, or those that are fused in it; the two halves of an operation are one."""
        found = [each.opcode for each in self._inner(name)] or [self[name].opcode]
        return {re.sub("-(start|done)$", "", opcode) for opcode in found}

    def moves(self, name):
        """Whether its result is its operands moved, converted or added up."""
        return self.opcodes(name) <= MOVES


def _turn(paths):
    """The place before which most of what there is has names of the forward pass."""
    backward = [sum("transpose(" in path for path in each) > len(each) / 2 for each in paths]
    forward = [not later and any("jvp(" in path for path in each)
               for each, later in zip(paths, backward, strict=True)]
    if not any(backward):
        raise ValueError("expected the program of a training step, with operations of a backward "
                         "pass; found none whose name has transpose( in it")
    right = itertools.accumulate((a - b for a, b in zip(forward, backward, strict=True)), initial=0)
    right = list(right)
    return right.index(max(right))


def _values(step, live):
    """The values of a program, in the order in which they are written."""
    there = {}  # {buffer: the value that is in it}
    for place, name in enumerate(live.schedule):
        instruction = step[name]
        given = {at for operand in instruction.operands for at in live.values.get(operand, ())}
        given = [there[at] for at in given if at in there]
        if instruction.opcode in PASSED_ON:
            continue
        for value in given:
            value.readers.append(name)
        halves = instruction.opcode.endswith(("-start", "-done"))
        for at in {at for at in live.values[name] if at is not None}:
            if halves and any(value.number == at for value in given):
                continue  # what is being moved stays where it is
            buffer = live.buffers[at]
            if at in there:
                there[at].last = place - 1
            first = buffer.first if instruction.opcode == "parameter" else place
            there[at] = _Value(at, name, given, first, buffer.last)
            yield there[at]


def _kinds(step, live, values):
    """The kind of each value."""
    state = _of_state(step, live, values)
    gathered, gradients = _gathered(step, values, state), _gradients(step, live, values, state)
    for value in values:
        argument = step[value.writer].opcode == "parameter"
        again = any("rematted_computation" in path for path in step.paths[value.writer])
        if value in state:
            yield state[value]
        elif value in gathered:
            yield "gathered weights"
        elif value in gradients:
            yield "weight gradients"
        elif step.scopes(value.writer) & LOSS:
            yield "logits and loss"
        elif again or value.first < step.turn <= value.last and not argument:
            yield "activations"
        elif any("transpose(" in path for path in step.paths[value.writer]):
            yield "activation gradients"
        else:
            yield "other"


def _of_state(step, live, values):
    """{value: "parameters" or "moments"}: arguments, and the results that take their places."""
    state, arguments = {}, {}
    for value in values:
        instruction = step[value.writer]
        words = re.findall(r"\w+", instruction.op_name)
        kind = ("moments" if "opt_state" in words else "parameters" if "params" in words else None)
        if instruction.opcode == "parameter" and kind:
            state[value] = arguments[instruction.literal] = kind
    final = {value.number: value for value in values}
    results = live.values[step.entry.root]
    for output, argument in live.donated.items():
        if argument in arguments and results[output] is not None:
            state[final[results[output]]] = arguments[argument]
    return state


def _gathered(step, values, state):
    """The values that an all-gather made of parameters, and copies of them."""
    weights, found = set(), set()
    for value in values:
        if step[value.writer].opcode == "parameter":
            weights |= {value} if state.get(value) == "parameters" else set()
        elif value.given and weights.issuperset(value.given) and step.moves(value.writer):
            weights.add(value)
            if "all-gather" in step.opcodes(value.writer) or found & set(value.given):
                found.add(value)
    return found - state.keys()


def _gradients(step, live, values, state):
    """The values of the backward pass that reach the update, moved or added up at most."""
    updates = {value.writer for value in state if step[value.writer].opcode != "parameter"}
    updates |= {name for name in live.schedule if "update" in step.scopes(name)}
    found, written = set(), {}
    for value in reversed(values):
        after = [each for name in value.readers for each in written.get(name, ()) if each in found]
        size = live.buffers[value.number].shape.size
        goes_on = any(step.moves(each.writer) or live.buffers[each.number].shape.size == size
                      for each in after)
        reaches = goes_on or any(name in updates for name in value.readers)
        if (value.first >= step.turn and reaches and value not in state
                and value.writer not in updates):
            found.add(value)
        written.setdefault(value.writer, []).append(value)
    return found
