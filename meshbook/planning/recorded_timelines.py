"""The memory of a step over time, by formula and in the program that a TPU's compiler made of it.

The formula has its moments at the ends of a model's blocks. The program is a schedule of many small
operations, in which blocks run into one another; what marks a block there are its matmuls, each of
which carries the block's scope in its name.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from meshbook.costs.timeline import Moment, step_timeline
from meshbook.hlo import module
from meshbook.hlo.memory_kinds import StepMemory, kinds_over_time
from meshbook.planning.programs import recorded_program, step_of

SAME_KINDS = {  # of a program's kinds and of the formula's, where they mean the same
    "parameters, moments": ("parameters", "moments"),
    "activations": ("activations",),
    "everything else": ("gathered weights", "weight gradients", "activation gradients",
                        "logits and loss", "other", "inputs", "gathered", "gradients", "logits"),
}


class Comparison(NamedTuple):
    """One step twice: its Moments by formula, and what its program holds at each instruction.

    places: for each moment the place in the program's schedule that corresponds to it.
    """

    moments: Sequence[Moment]
    places: Sequence[int]
    step: StepMemory

    @property
    def found(self):
        """The bytes that the program holds at each of the moments."""
        total = self.step.total
        return [total[place] for place in self.places]

    def errors(self, *phases: str):
        """Formula minus program at the moments of these phases, as shares of the program's peak."""
        peak = max(self.step.total)
        return [(moment.total - found) / peak
                for moment, found in zip(self.moments, self.found, strict=True)
                if moment.phase in phases]

    def peak_moment(self):
        """The moment during which the program holds most: the last whose place is not later."""
        total = self.step.total
        at = total.index(max(total))
        return [moment for moment, place in zip(self.moments, self.places, strict=True)
                if place <= at][-1]


def compare_timelines(name: str):
    """The Comparison of a program that was kept, by its name in the record.

    name: such as "v5e-8 (8, 1) 1024 row=fully_sharded". Raises ValueError where none was kept.
    """
    text, mesh = recorded_program(name)
    planned, step = step_of(name, mesh.shape), kinds_over_time(text)
    places = _places(text, planned.config.layers, step.total)
    return Comparison(step_timeline(planned), places, step)


def _places(text, layers, total):
    """The place in the schedule of each moment: where a block ends, in the forward pass; in the
    backward pass where most is held while its matmuls run, those computed again among them.
    """
    forward, backward, last = _matmuls(text, layers)
    turn, starts = backward[-1], [*backward[::-1], last]
    fullest = lambda low, high: max(range(low, high), key=total.__getitem__)
    spans = zip(starts, starts[1:], strict=False)
    return [*forward, fullest(forward[-1], turn + 1), *(fullest(*span) for span in spans),
            last, len(total) - 1]


def _matmuls(text, layers):
    """(first forward matmul of each block and last of all, first backward one of each, last)."""
    program = module.parse(text)
    first, ends = {}, {"forward": 0, "backward": 0}
    for place, each in enumerate(program.computations[program.entry].instructions.values()):
        if "dot_general" not in each.op_name:
            continue
        later = "transpose(" in each.op_name or "rematted" in each.op_name
        phase, block = "backward" if later else "forward", re.search(r"block_(\d+)", each.op_name)
        if block:
            first.setdefault((phase, int(block[1])), place)
        if block or later:
            ends[phase] = place
    one, other = ([first[phase, i] for i in range(layers)] for phase in ("forward", "backward"))
    return [*one, ends["forward"]], other, ends["backward"]
