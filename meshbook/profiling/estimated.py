"""A step on a TPU that is not here, as a trace: its program played through by its compiler's clock.

What `read_trace` reads of a real run, `estimate` makes of a compiled program: the same records, and
so the same drawings and tables. They are an estimate: by how much it is off where real times have
been published stands in `results/clock.json`.
"""

import collections
from collections.abc import Iterable
from typing import Any

from meshbook.hlo import schedule
from meshbook.profiling.traces import Record, Trace


class Estimate(Trace):
    """One run of a program on one device by its compiler's clock, as step 0 of device 0.

    played: the Spans of `meshbook.hlo.schedule.play`; device: the TPU. Times are ms.
    """

    def __init__(self, played: Iterable[schedule.Span], device: Any):
        self.played, self.device = list(played), device
        super().__init__(Record(0, each.operation, each.kind, 1e3 * each.start,
                                1e3 * (each.end - each.start), 0) for each in self.played)
        self.work = [each for each in self.played if each.cost is not None]

    @property
    def step(self):
        """How long the run takes."""
        return 1e3 * max((each.end for each in self.played), default=0.0)

    @property
    def raw(self):
        """The sum of the compiler's estimates as they are, loops multiplied."""
        return 1e3 * sum(each.cost.estimate or 0.0 for each in self.work)

    def by_basis(self):
        """{"estimate", "scaled" or "memory": its part of the core's time, from 0 to 1}."""
        total = collections.Counter()
        for each in self.work:
            total[each.cost.basis] += each.end - each.start
        return {basis: part / total.total() for basis, part in total.most_common()}

    @property
    def unestimated(self):
        """{operation: bytes} of what the compiler has no estimate for, and the memory's floor holds."""
        return {each.operation: each.cost.moved for each in self.work if each.cost.estimate is None}

    def utilisation(self, flops: int | float):
        """So many FLOPs of a device, of what it could do in the time of the run.

        Of the useful ones it is the model FLOPs utilisation (MFU); of all that the device executes,
        those that it computes again among them, the hardware's (HFU).
        """
        return flops / (self.step / 1e3 * self.device.flops)


def estimate(compiled: Any, mesh: Any, device: Any, ring: bool = True):
    """What a program that was compiled for a TPU takes there by its compiler's clock: an Estimate.

    compiled: `jax.stages.Compiled`, or HLO text; mesh: the one that it was compiled for, or None;
    device: of `meshbook.planning.devices`; ring: whether each mesh axis is a ring of chips, or a
    line. Raises what `play` raises.
    """
    return Estimate(schedule.play(compiled, mesh, device, ring), device)
