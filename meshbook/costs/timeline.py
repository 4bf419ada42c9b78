"""What one device holds in a step with Adam, from moment to moment, and at the most.

What layers keep for the backward pass is a stack, there whole from a loop's first turn to its last,
and so are the gradients of layers that are one array. Layers that are no loop make and free theirs
one by one.
"""
from __future__ import annotations

from functools import partial
from typing import NamedTuple

from meshbook.costs.memory import layers_of, loops, size_of, step_memory
from meshbook.costs.step import Step
from meshbook.models.losses import CHUNK

KINDS = ("parameters", "moments", "inputs", "gathered", "gradients", "activations", "logits")


class Moment(NamedTuple):
    """One moment of a step: its phase, its block from 1 where it is in one, and bytes by KINDS.

    phase: "forward", "loss", "backward" or "update". Block 0 is what comes before the layers. In
    the forward pass this is what is held at the end of that part, in the backward pass and in the
    update what is held when it begins, but for block 0, where it is what is held at its end.
    """

    phase: str
    block: int | None
    held: dict

    @property
    def total(self):
        """All bytes of this moment."""
        return sum(self.held.values())


def step_timeline(step: Step, tiles: bool = True, chunk: int = CHUNK):
    """The Moments of a step, in order."""
    found = step_memory(step, tiles, chunk)
    return (_of_a_loop if step.table.stacked else _block_by_block)(step, found)


def step_peak(step: Step, tiles: bool = True, chunk: int = CHUNK):
    """The most bytes that one device holds at once."""
    return max(each.total for each in step_timeline(step, tiles, chunk))


def _moment(always, phase, block=None, **more):
    return Moment(phase, block, {kind: (always | more).get(kind, 0) for kind in KINDS})


def _of_a_loop(step, found):
    always = {name: getattr(found, name) for name in ("parameters", "moments", "inputs")}
    if loops(step.plan):
        always["gradients"] = found.gradients
    moment = partial(_moment, always)
    stacks = {"gathered": found.gathered, "activations": found.activations}
    gradients = {"gradients": found.gradients}
    work = stacks | gradients | {"activations": found.activations + found.layer}
    L = sum(layers_of(step).values())
    return [moment("forward", 0), *(moment("forward", i, **stacks) for i in range(1, L + 1)),
            moment("loss", logits=found.logits, **stacks),
            *(moment("backward", i, **work) for i in range(L, 0, -1)),
            moment("backward", 0, **gradients), moment("update", **gradients)]


def _block_by_block(step, found):
    sums = found.gradients // 2 if loops(step.plan) else 0  # of all microbatches
    moment = partial(_moment, {"gradients": sums} | {
        name: getattr(found, name) for name in ("parameters", "moments", "inputs")})
    L, number, head = step.config.layers, size_of(step, True).number, len(step.table.last)
    parts = {"first": step.placed[:len(step.table.first)], "last": step.placed[-head:],
             "block": [each for each in step.placed if each.in_layers]}
    gathered = {name: number * sum(each.used for each in those if each.used != each.stored)
                for name, those in parts.items()}
    gradients = {name: 4 * sum(each.gradients for each in those) for name, those in parts.items()}
    kept = found.activations // L
    forward = [moment("forward", i, activations=i * kept,
                      gathered=gathered["first"] + i * gathered["block"] // L)
               for i in range(L + 1)]
    loss = moment("loss", gathered=found.gathered, activations=L * kept, logits=found.logits)
    backward = [moment("backward", i, gathered=found.gathered, activations=i * kept + found.layer,
                       gradients=sums + gradients["last"] + (L - i) * gradients["block"] // L)
                for i in range(L, 0, -1)]
    backward.append(moment("backward", 0, gathered=found.gathered, gradients=found.gradients))
    return [*forward, loss, *backward, moment("update", gradients=sums or found.gradients)]
