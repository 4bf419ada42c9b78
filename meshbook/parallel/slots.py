"""Schedules of one stage per device in one program: a table of what each device does when.

The functions stand in a shard_map, as those of `pipeline` do. In every slot a device looks up in
the table whether it has a forward pass to do (F), the gradient of its stage's input (B), that of
its weights (W) or nothing, and of which microbatch. Permutes move results to both neighbours.

Source: Qi et al. 2023, "Zero bubble pipeline parallelism" (the schedule that this is made for).
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshbook.parallel.backward import Three, in_three
from meshbook.parallel.pipeline import Pipeline, added, adding, when
from meshbook.parallel.schedules import simulate
from meshbook.sharding import varies, varying

SLOT_PARTS = "-FBW"  # what a number of the table means


@dataclass(frozen=True)
class Slots:
    """A schedule as a table.

    part, microbatch: (slots, devices), part a place in SLOT_PARTS. held: of how many microbatches
    a device has places for what F left; waiting: of how many for what B left.
    """
    part: np.ndarray
    microbatch: np.ndarray
    held: int
    waiting: int

    @property
    def taken(self):
        """What share of the slots each branch has, by its scope: for `proofs.work`, and others."""
        count = len(self.part)
        share = lambda part, device: Fraction(int((self.part[:, device] == part).sum()), count)
        once = share(SLOT_PARTS.index("F"), 0)
        return {"part": [share(part, 0) for part in range(len(SLOT_PARTS))]} | {
            name: (1 - once, once) for name in ("enter", "leave", "returned")}

    @property
    def by_turn(self):
        """Which branches some device takes in each slot: for `meshbook.hlo.schedule.play`."""
        once = lambda device, part: [
            (int(each),) for each in self.part[:, device] == SLOT_PARTS.index(part)]
        return {"part": [tuple({*map(int, row)}) for row in self.part], "enter": once(0, "F"),
                "leave": once(-1, "F"), "returned": once(0, "B")}


def table_of(schedule: Sequence):
    """The Slots of a schedule of `meshbook.parallel.schedules` in which every part takes one.

    A task BW takes two, first B. Raises ValueError for chunks.
    """
    found = simulate(schedule)
    if any(event.task.chunk for event in found.events):
        raise ValueError("a table has one stage on each device; found a schedule with chunks")
    shape = int(found.makespan), len(schedule)
    part, microbatch = np.zeros(shape, int), np.zeros(shape, int)
    F, B, W = at = np.zeros((3, 1 + max(event.task.microbatch for event in found.events),
                             len(schedule)), int)
    for device, task, start, _ in found.events:
        for slot, kind in enumerate(task.kind, int(start)):
            part[slot, device] = SLOT_PARTS.index(kind)
            microbatch[slot, device] = task.microbatch
            at["FBW".index(kind), task.microbatch, device] = slot
    came, back = F[:, :-1] + 1, B[:, 1:] + 1  # when x and dy arrive from the devices beside
    held = places_for((F, W), (came, F[:, 1:]), (back, B[:, :-1]))
    return Slots(part, microbatch, held, places_for((B, W)))


def places_for(*kept: tuple):
    """The fewest places of a ring in which nothing is overwritten before it was read.

    kept: pairs of arrays (m, ...), from which slot to which one something of each microbatch is
    kept, on each device. Microbatch i has place i modulo their number: two that are kept at a time
    must not have the same.
    """
    meet = set()
    for since, until in kept:
        one, other, _ = np.nonzero((since[:, None] <= until) & (since <= until[:, None]))
        meet |= {*abs(one - other).tolist()}
    return next(places for places in count(1) if all(far % places for far in meet - {0}))


def in_slots(make: Callable):
    """A schedule for `pipelined`, such as in_slots(zero_bubble).

    make(stages, microbatches) -> a schedule of `meshbook.parallel.schedules`.
    """
    def run(pipeline: Pipeline, weights: Any, microbatches: int):
        table = table_of(make(jax.lax.axis_size(pipeline.axis), microbatches))
        return by_table(pipeline, weights, table)

    return run


def by_table(pipeline: Pipeline, weights: Any, table: Slots):
    """(sums, gradients of weights, gradients of what is outside of the layers), by a table.

    Of a microbatch a device keeps what its F left for B and W, and what its B left for W.
    """
    stage, zeros = StageParts.of(pipeline, weights), pipeline.zeros
    x, (kept, more) = stage.x, stage.left()
    sums, others = jax.eval_shape(pipeline.outside)
    start = Carry(sent=zeros((x, x)), arrived=zeros((x, x), table.held),
                  kept=rings(pipeline, kept, table.held),
                  more=rings(pipeline, more, table.waiting),
                  dweights=zeros(weights), outside=zeros((sums, others)))
    now = jnp.asarray(table.part), jnp.asarray(table.microbatch)
    before = [jnp.pad(each, ((1, 0), (0, 0)))[:-1] for each in now]
    carry, _ = jax.lax.scan(partial(slot, stage), start, (now, before))
    sums, others = carry.outside
    return sums, carry.dweights, others


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Carry:
    """What goes from slot to slot, rings with a place for each microbatch that is kept.

    sent: (y, dx) to both neighbours; arrived: rings of what stages were given, (x, dy); kept, more:
    rings of what F and B left; dweights, outside: sums so far.
    """
    sent: tuple
    arrived: tuple
    kept: list
    more: list
    dweights: Any
    outside: tuple


def slot(stage: StageParts, carry: Carry, row: tuple):
    """One slot: what arrived, what the table says, and what all devices do together."""
    pipeline, ((part, i), before) = stage.pipeline, row
    (s, p), (F, B) = pipeline.place, (SLOT_PARTS.index("F"), SLOT_PARTS.index("B"))
    x_ring, dy_ring = carry.arrived
    (did, which), up, down = before, (s - 1) % p, (s + 1) % p
    x_ring = received(x_ring, pipeline.up(carry.sent[0]), which[up], (did[up] == F) & (s > 0))
    dy_ring = received(dy_ring, pipeline.down(carry.sent[1]), which[down],
                       (did[down] == B) & (s < p - 1))
    x = when(pipeline, "enter", part[0] == F, pipeline.enter, i[0])
    x_ring = received(x_ring, x, i[0], (part[0] == F) & (s == 0))

    carry = replace(carry, arrived=(x_ring, dy_ring))
    branches = [stage.idle, stage.forward, stage.of_input, stage.of_weights]
    with jax.named_scope("part"):
        carry = jax.lax.switch(part[s], branches, carry, i[s])

    y, dx = carry.sent
    (sums, grads), dy = adding(pipeline, "leave", part[-1] == F, carry.outside,
                               pipeline.added_behind, y, i[-1])
    dy_ring = received(dy_ring, dy, i[-1], (part[-1] == F) & (s == p - 1))
    grads, _ = adding(pipeline, "returned", part[0] == B, grads, pipeline.added_before, dx, i[0])
    return replace(carry, arrived=(x_ring, dy_ring), outside=(sums, grads)), None


@dataclass(frozen=True)
class StageParts:
    """The layers of a device, and the three parts of each: branches of a slot."""
    pipeline: Pipeline
    weights: Any
    x: Any
    parts: Three

    @classmethod
    def of(cls, pipeline: Pipeline, weights: Any):
        """The stage of a pipeline with these weights."""
        each, shared = pipeline.own(pipeline.place[0])
        x = pipeline.own_part(pipeline.enter(0))
        first = jax.tree.map(lambda x: x[0], (weights, each))
        return cls(pipeline, weights, x, in_three(pipeline.layer, first[0], x, first[1], shared))

    def left(self):
        """Shapes of what F and B of all layers leave behind."""
        def both(dy):
            i = self.pipeline.place[0]  # as a microbatch's number, another one on each device
            _, kept = self.up_the_layers(dy, i)
            return kept, self.down_the_layers(kept, dy, i)[1]

        return jax.eval_shape(both, self.x)

    def idle(self, carry: Carry, i: Any):
        return carry

    def forward(self, carry: Carry, i: Any):
        y, kept = self.up_the_layers(read(carry.arrived[0], i), i)
        return replace(carry, sent=(y, carry.sent[1]), kept=written(carry.kept, kept, i))

    def of_input(self, carry: Carry, i: Any):
        left, kept = read_and_kept(carry.kept, i)
        dx, more = self.down_the_layers(left, read(carry.arrived[1], i), i)
        return replace(carry, sent=(carry.sent[0], dx), kept=kept,
                       more=written(carry.more, more, i))

    def of_weights(self, carry: Carry, i: Any):
        each, shared = self.pipeline.own(i)
        left, (kept, more) = read_and_kept((carry.kept, carry.more), i)

        def turn(_, layer):
            weights, each, kept, more = layer
            return None, self.parts.of_weights(weights, (each, shared), kept, more)

        _, dweights = jax.lax.scan(turn, None, (self.weights, each, *left))
        return replace(carry, dweights=added(carry.dweights, dweights), kept=kept, more=more)

    def up_the_layers(self, x: Any, i: Any):
        """(y, what each layer keeps)."""
        each, shared = self.pipeline.own(i)
        turn = lambda x, layer: self.parts.forward(layer[0], (layer[1], shared), x)
        return jax.lax.scan(turn, x, (self.weights, each))

    def down_the_layers(self, kept: list, dy: Any, i: Any):
        """(dx, what else each layer keeps), from the last layer to the first."""
        each, shared = self.pipeline.own(i)

        def turn(dy, layer):
            weights, each, kept = layer
            return self.parts.of_input(weights, (each, shared), kept, dy)

        return jax.lax.scan(turn, dy, (self.weights, each, kept), reverse=True)


def rings(pipeline: Pipeline, like: Any, places: int):
    """Empty rings for arrays like these, which may be the same on devices of one stage."""
    def ring(x):
        return varying(jnp.zeros((places, *x.shape), x.dtype), {*varies(x), pipeline.axis})

    return jax.tree.map(ring, like)


def read(rings: Any, i: Any):
    """What rings have of microbatch i."""
    return jax.tree.map(lambda ring: ring[i % len(ring)], rings)


def read_and_kept(rings: Any, i: Any):
    """(what rings have of microbatch i, the rings), for a branch that returns them as they are.

    The barrier says that the reading comes first. Otherwise XLA would copy all of them.
    """
    pairs = jax.tree.map(lambda ring: jax.lax.optimization_barrier((read(ring, i), ring)), rings)
    return jax.tree.transpose(jax.tree.structure(rings), jax.tree.structure((0, 0)), pairs)


def written(rings: Any, new: Any, i: Any):
    """Rings that have this of microbatch i."""
    put = lambda ring, x: jax.lax.dynamic_update_index_in_dim(ring, x, i % len(ring), 0)
    return jax.tree.map(put, rings, new)


def received(ring: Any, x: Any, i: Any, true: Any):
    """A ring that has x of microbatch i where that is true."""
    return jnp.where(true, written(ring, x, i), ring)
