"""A step on a TPU that is not here, as a trace: its program played through by its compiler's clock.

What `read_trace` reads of a real run, `estimated_run` makes of a compiled program: the same
records, and so the same drawings and tables. They are an estimate: by how much it is off where real
times have been published stands in `results/clock.json`.
"""

import collections
import re
from collections.abc import Iterable, Mapping
from typing import Any

from meshbook.hlo import schedule
from meshbook.profiling.traces import Record, Trace


BETWEEN = re.compile(r"^jit\(\w+\)/|(?<=/)(shard_map|body|closed_call)/")


class EstimatedRun(Trace):
    """One run of a program on one device by its compiler's clock, as step 0 of device 0.

    played: the Spans of `meshbook.hlo.schedule.play`; device: the TPU. Times are ms.
    """

    def __init__(self, played: Iterable[schedule.Span], device: Any):
        self.played, self.device = list(played), device
        super().__init__(map(_record, self.played))
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
        """{operation: bytes} of what has no estimate; its time is what these bytes need."""
        return {each.operation: each.cost.moved for each in self.work if each.cost.estimate is None}

    def by_exchange(self):
        """{kind of collective: (ms on the links, ms of them in which nothing else runs)}."""
        found = {}
        for kind in dict.fromkeys(each.exchange for each in self.played if each.exchange):
            own = [each for each in self.played if each.exchange in (None, kind)]
            busy = sum(each.end - each.start for each in own if each.exchange)
            found[kind] = 1e3 * busy, sum(Trace(map(_record, own)).exposed().values())
        return found

    def by_source(self, top: int | None = None):
        """Operations by what they were made of, their paths in the Python program, longest first.

        What JAX puts between the program's own names is left out. Operations without a path stand
        under their own names.
        """
        source = lambda each: BETWEEN.sub("", each.op_name) or each.operation
        return Trace(_record(each)._replace(operation=source(each))
                     for each in self.played).operations(top)

    def utilisation(self, flops: int | float):
        """So many FLOPs of a device, of what it could do in the time of the run.

        Of the useful ones it is the model FLOPs utilisation (MFU); of all that the device executes,
        those that it computes again among them, the hardware's (HFU).
        """
        return flops / (self.step / 1e3 * self.device.flops)


def _record(span):
    return Record(0, span.operation, span.kind, 1e3 * span.start, 1e3 * (span.end - span.start), 0)


def estimated_run(compiled: Any, mesh: Any, device: Any, ring: bool = True,
                  taken: Mapping | None = None):
    """An EstimatedRun of a program that was compiled for a TPU.

    compiled: `jax.stages.Compiled`, or HLO text; mesh: the one that it was compiled for, or None;
    device: of `meshbook.costs.devices`; ring: whether each mesh axis is a ring of chips, or a
    line; taken: which branches of conditionals, as of `play`. Raises what `play` raises.
    """
    return EstimatedRun(schedule.play(compiled, mesh, device, ring, taken), device)
