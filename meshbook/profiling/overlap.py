"""Which communication of a step is hidden behind its work, and which could be.

A collective is hidden while the device does something else, and exposed while it waits. Both are
read from an `EstimatedRun`; what could be hidden follows from the program's dataflow: a collective
can start as soon as its operands are there, and nothing that needs its result can run beside it.
"""

from typing import Any, NamedTuple

from meshbook.hlo import clock, execution, flops, module, schedule
from meshbook.hlo.exchanges import Exchanges
from meshbook.hlo.wire import wire_seconds
from meshbook.profiling.estimated_runs import EstimatedRun


class Exchange(NamedTuple):
    """One collective on the links: when, from `start` to `end`; hidden: how much of it. In ms."""

    operation: str
    op_name: str
    start: float
    end: float
    hidden: float

    @property
    def exposed(self):
        """The ms in which nothing else runs on the device."""
        return self.end - self.start - self.hidden


def exchanges(run: EstimatedRun):
    """The collectives of a run as Exchanges, by their start."""
    others = [(1e3 * each.start, 1e3 * each.end) for each in run.played
              if each.where != schedule.LINKS]
    found = []
    for each in run.played:
        if each.where == schedule.LINKS:
            start, end = 1e3 * each.start, 1e3 * each.end
            found.append(Exchange(each.operation, each.op_name, start, end,
                                  _covered(others, start, end)))
    return found


def _covered(spans, start, end):
    """How much of the time from start to end is in one of the spans, which begin in order."""
    total, until = 0.0, start
    for low, high in spans:
        low, high = max(low, until), min(high, end)
        if low < high:
            total, until = total + high - low, high
    return total


class Part(NamedTuple):
    """One operand of a collective: its bytes; ms when it is ready, and when links could take it."""

    bytes: int
    ready: float
    start: float
    end: float


def sent_when_ready(run: EstimatedRun, compiled: Any, mesh: Any, operation: str):
    """What if every operand of a collective were sent alone, as soon as it is ready? Parts.

    run: of the program `compiled`, as `estimated_run` made it for this mesh, whose axes are rings
    of chips. The links send one Part after the other, and do nothing else. An operand is ready when
    the last matmul that it depends on has run: what follows, such as a transpose, takes
    microseconds, and the compiler may have put it off. Raises ValueError for what is no collective
    of the program's entry.
    """
    found = Exchanges(compiled, mesh)
    entry = found.program.computations[found.program.entry]
    instruction = entry.instructions.get(operation)
    exchange = instruction and found.find(entry, instruction)
    if not exchange:
        raise ValueError(f"expected a collective of the program's entry; found {operation!r}")
    ready, free, parts = _ready(run, found.program, flops.by_instruction(compiled)), 0.0, []
    sizes = [mesh.shape[axis] for axis in exchange.axes]
    for name in sorted(instruction.operands, key=ready.get):
        size = module.shape_bytes(entry[name].shape)
        start = max(ready[name], free)
        free = start + 1e3 * wire_seconds(exchange.kind, sizes, (1, size), run.device)
        parts.append(Part(size, ready[name], start, free))
    return parts


def _ready(run, program, done):
    """{operation of the entry: ms when the last matmul has run that it is or depends on}.

    done: of `flops.by_instruction`.
    """
    entry, end, found = program.computations[program.entry], {}, {}
    for each in run.work:
        end[each.operation] = 1e3 * each.end
    for name, each in entry.instructions.items():
        own = [end[part.name] for where, part in _run_by(program, entry, each)
               if part.name in end and _multiplies(program, where, part, done)]
        found[name] = max([*own, *(found[other] for other in each.operands if other in found)],
                          default=0.0)
    return found


def _multiplies(program, computation, instruction, done):
    return any((where.name, part.name) in done
               for where, part in clock.inside(program, computation, instruction))


def _run_by(program, computation, instruction):
    """(computation, instruction) of an operation and of all that a loop or conditional runs."""
    yield computation, instruction
    if instruction.opcode in ("while", "conditional", "call"):
        names = instruction.called("body", "condition", "to_apply")
        for name in [*names, *execution.branches_of(instruction)]:
            inner = program.computations[name]
            for each in inner.instructions.values():
                yield from _run_by(program, inner, each)


def depends(compiled: Any, later: str, earlier: str):
    """Whether an operation of a program's entry needs another one's result, directly or not.

    Raises ValueError for names that the entry has not.
    """
    program = module.parse(compiled)
    entry = program.computations[program.entry].instructions
    for name in (later, earlier):
        if name not in entry:
            raise ValueError(f"expected operations of the program's entry; found {name!r}")
    seen, waiting = {later}, [later]
    while waiting:
        new = {each for each in entry[waiting.pop()].operands if each in entry} - seen
        seen |= new
        waiting += new
    return earlier in seen - {later}
