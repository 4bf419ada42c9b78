"""Which matmuls run while something is on its way between devices, by the order of a program.

A compiled program is a schedule. What stands between the start of an asynchronous collective and
its end can run while it is under way. A collective without a start keeps its device waiting; of
that, the program's dataflow says what could have run meanwhile.
"""

from typing import Any, NamedTuple

from meshbook.hlo import clock, execution, flops, module, opcodes

START, DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"  # of fusions on a TPU


class InFlight(NamedTuple):
    """One collective of a schedule; what stands in a loop is here once.

    matmuls: names of the operations with a matmul between its start and its end; none where it is
    not asynchronous. could: those of the same computation that do not need its result, and whose
    result it does not need.
    """

    operation: str
    kind: str
    computation: str
    matmuls: tuple
    could: tuple


def in_flight(compiled: Any):
    """The collectives of a program as InFlight, in the order in which they start.

    compiled: `jax.stages.Compiled`, or HLO text. Where fusions carry a collective through several
    steps, it is under way from the first of them to the last.
    """
    program, done = module.parse(compiled), flops.by_instruction(compiled)
    found = []
    for computation in _scheduled(program, program.entry):
        names, each = list(computation.instructions), computation.instructions
        multiply = [name for name in names if _multiplies(program, computation, each[name], done)]
        for kind, start, end in _collectives(program, computation):
            between = names[names.index(start) + 1:names.index(end)]
            needed = _needed(computation, start)
            found.append(InFlight(
                start, kind, computation.name,
                tuple(name for name in multiply if name in between),
                tuple(name for name in multiply if name not in needed | {start, end}
                      and start not in _needed(computation, name))))
    return found


def _scheduled(program, name, seen=None):
    """The computations whose instructions are run in their order: the entry, and what it runs."""
    seen = set() if seen is None else seen
    if name in seen:
        return
    seen.add(name)
    yield program.computations[name]
    for each in program.computations[name].instructions.values():
        for inner in _runs(each):
            yield from _scheduled(program, inner, seen)


def _runs(instruction):
    """Names of the computations that a loop, a conditional or a call runs, or a reduction."""
    return [*instruction.called("body", "condition", "to_apply"),
            *execution.branches_of(instruction)]


def _multiplies(program, computation, instruction, done):
    """Whether there is a matmul in an instruction, or in what it calls or runs."""
    return any((where.name, each.name) in done
               for where, each in clock.inside(program, computation, instruction)) or any(
        _multiplies(program, program.computations[name], each, done)
        for name in _runs(instruction)
        for each in program.computations[name].instructions.values())


def _collectives(program, computation):
    """(kind, start, end) of each collective of a computation: end is start where it waits."""
    found, ends = {}, {}
    for name, each in computation.instructions.items():
        if each.opcode.endswith(("-done", "-update")):
            origin = ends.get(each.operands[0], each.operands[0])
            ends[name] = origin
            if origin in found:
                found[origin] = found[origin][0], name
            continue
        parts = [part for _, part in clock.inside(program, computation, each)]
        marks = {part.attributes.get("custom_call_target", "").strip('"') for part in parts}
        for part in parts:
            kind = part.opcode.removesuffix("-start")
            if kind not in opcodes.COLLECTIVE:
                continue
            chain = kind, part.attributes.get("channel_id"), \
                part.attributes.get("frontend_attributes")
            if START in marks:
                ends[chain] = name
            origin = ends.get(chain)
            if origin not in (None, name):  # a later step of the same one
                found[origin] = found[origin][0], name
                if DONE in marks:
                    del ends[chain]
            else:
                found[name] = _kind(each, kind), name
    return [(kind, start, end) for start, (kind, end) in found.items()]


def _kind(instruction, kind):
    """On a TPU a reduce-scatter is a fusion of an all-reduce and a slice."""
    names = instruction.called("calls") if instruction.opcode == "fusion" else ()
    return "reduce-scatter" if any(map(_scatters, names)) else kind


def _scatters(name):
    return name.startswith("all-reduce-scatter")


def _needed(computation, name):
    """Names of the instructions whose results one of them needs, directly or not."""
    found, waiting = set(), [name]
    while waiting:
        new = {each for each in computation[waiting.pop()].operands
               if each in computation.instructions} - found
        found |= new
        waiting += new
    return found
