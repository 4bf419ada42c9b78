"""What the operations of a step take, multiply and move: what XProf calls HLO op statistics.

They are made of an `EstimatedRun`: times, FLOPs and bytes of the operations of one device's core,
added up under names of the caller's choice.

Source of the roofline: Williams, Waterman and Patterson 2009, doi:10.1145/1498765.1498785.
"""

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

from meshbook.hlo import clock, flops, memory, module
from meshbook.profiling.estimated_runs import EstimatedRun
from meshbook.text import markdown_table, text_table


class Statistic(NamedTuple):
    """Operations of one name: ms, FLOPs of their matmuls, bytes they read and write, how many.

    at_peak: ms that the FLOPs need at the peak of the device; bound: "compute" where its FLOPs at
    peak take longer than its bytes at the bandwidth of the memory, else "memory".
    """

    name: str
    ms: float
    flops: int
    bytes: int
    count: int
    at_peak: float
    bound: str

    @property
    def intensity(self):
        """FLOPs per byte."""
        return self.flops / self.bytes if self.bytes else 0.0


class Statistics(list):
    """Statistic after Statistic, longest first; prints as an aligned table.

    step: ms of the run; waiting: ms of it in which the core runs nothing.
    """

    header = "operations", "ms", "share", "GFLOP", "MB", "FLOP/byte", "bound by"

    def __init__(self, found: list, step: float):
        super().__init__(found)
        self.step, self.waiting = step, step - sum(each.ms for each in found)

    def rows(self):
        """The table's cells."""
        return [*((each.name, f"{each.ms:.2f}", f"{each.ms / self.step:.1%}",
                   f"{each.flops / 1e9:,.1f}", f"{each.bytes / 1e6:,.0f}",
                   f"{each.intensity:,.0f}", each.bound) for each in self),
                ("waiting", f"{self.waiting:.2f}", f"{self.waiting / self.step:.1%}", *[""] * 4)]

    def __repr__(self):
        return text_table(self.header, self.rows(), numbers=6)

    def _repr_markdown_(self):
        return markdown_table(self.header, self.rows(), numbers=6)


def op_stats(run: EstimatedRun, compiled: Any, name: Callable):
    """The Statistics of a run's operations, added up by name(span).

    compiled: the program of the run, as HLO text or `jax.stages.Compiled`; name: what a Span of
    `meshbook.hlo.schedule` is added up under, such as a part of the model. A loop's operations
    count once for every turn, and bytes wherever they lie, also beside the core.
    Raises ValueError where the run is of another program, and what `work` raises.
    """
    program, done = module.parse(compiled), flops.by_instruction(compiled)
    places = {each.name: (computation, each) for computation in program.computations.values()
              for each in computation.instructions.values()}
    if strange := {each.operation for each in run.work} - places.keys():
        raise ValueError(f"expected the program of the run; found one without %{min(strange)}")
    total = collections.defaultdict(lambda: [0.0, 0, 0, 0])
    for each in run.work:
        place = program, *places[each.operation]
        own = total[name(each)]
        own[0] += 1e3 * (each.end - each.start)
        own[1] += sum(done.get((where.name, part.name), 0) for where, part in clock.inside(*place))
        own[2] += memory.moved(*place, memory.of_any)
        own[3] += 1
    found = [Statistic(key, *own, *_limits(run.device, *own[1:3])) for key, own in total.items()]
    return Statistics(sorted(found, key=lambda each: -each.ms), run.step)


def _limits(device, done, touched):
    at_peak = 1e3 * done / device.flops
    return at_peak, "compute" if at_peak > 1e3 * touched / device.bandwidth else "memory"
