"""FLOPs of a step: useful, executed by a device, and what its matrix units could have done."""
from __future__ import annotations

from typing import NamedTuple

from meshbook.costs.step import Step, check_slots
from meshbook.costs.turns import passes_of

SIDE = 128  # of a matrix unit: a product with a smaller side takes as long as with this one


class Work(NamedTuple):
    """FLOPs of one device: `useful`, its share of what must be done; `done`, what it executes;
    `spent`, what its matrix units could do in that time.
    """

    useful: float
    done: float
    spent: float

    @property
    def factor(self):
        """What the device does, as a multiple of what is useful."""
        return self.done / self.useful


def step_work(step: Step):
    """The Work of a Step. Raises ValueError for experts without a capacity."""
    check_slots(step)
    useful = done = spent = 0.0
    for each, passes in _passes(step):
        narrow = "U" in each.row.letters  # between the queries and keys of one head
        part = unmasked(step) if narrow and "skipped" in each.flags else 1
        useful += each.useful * (1 + each.row.gradients)
        done += each.flops * passes * part
        spent += each.flops * passes * part * (max(1, SIDE / step.sizes["K"]) if narrow else 1)
    return Work(useful, done, spent)


def _passes(step):
    """(Placed, how often a device computes its product) of all products, per pass of all rows."""
    forward, redone, backward = passes_of(step.plan)
    for each in step.placed:
        row, passes = each.row, 1 + each.row.gradients
        if each.in_layers:
            passes = forward + redone * row.again.split().count(step.remat) + (
                row.gradients * backward)
        yield each, passes


def unmasked(step: Step):
    """The share of pairs of tokens that attention needs: of text, what a causal mask leaves."""
    T = step.sizes["T"]
    return (T + 1) / (2 * T) if "V" in step.sizes else 1.0


def least_work(step: Step):
    """FLOPs that one device executes in a step, of attention those of unmasked pairs of tokens."""
    return sum(each.flops * passes * (unmasked(step) if "U" in each.row.letters else 1)
               for each, passes in _passes(step))


def extend_flops(step: Step, tokens: int):
    """FLOPs of the products with which one device reads so many new tokens of each of its rows,
    with a cache of the keys and values of all others.

    All new tokens go through the layers, where they meet all columns of the cache, also the empty
    and the masked ones; only the last one's logits are computed, padding included. A prefill has
    the tokens of the prompt, a decode step has one.
    """
    layers = sum(each.flops for each in step.placed if each.in_layers)
    head = sum(each.flops for each in step.placed if "V" in each.row.made)
    return (tokens * layers + head) / step.sizes["T"]


def causal_work(step: Step):
    """Useful FLOPs of one device, of attention those of unmasked pairs of tokens."""
    return sum(each.useful * (1 + each.row.gradients)
               * (unmasked(step) if "U" in each.row.letters else 1) for each in step.placed)
