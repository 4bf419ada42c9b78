"""Pipelines in one program: every device runs the same loop, and a permute moves its result on.

A stage is a run of layers, and each device along a mesh axis has one. The functions here stand in a
shard_map that is manual over that axis: weights and x are a device's own. A loop turns in ticks; in
a tick a device works on one microbatch, another one than its neighbours do.

Sources: Huang et al. 2019, "GPipe"; Narayanan et al. 2021 (1F1B, circular stages).
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from meshbook.parallel.schedules import Event, Task
from meshbook.sharding import varies, varying

Activation = Shaped[Array, "..."]


@dataclass(frozen=True)
class Pipeline:
    """What the devices along a mesh axis do with microbatch i, an integer: to be made a class of.

    layer(weights, x, each, shared) -> y is one layer. own(i) -> (each, shared) is what this
    device's layers are given besides: for every layer its own, such as a key, and what they share.
    Microbatch -1 is one of which nobody will use the result.
    Before the first stage and behind the last one all devices work together: enter(i) -> x, what
    the first stage is given; leave(y, i) -> (sums, dy, gradients), of what the last stage found;
    entered(dx, i) -> gradients of what enter made. Gradients and sums are a device's own share, of
    all parameters outside of the layers.

    axis: the mesh axis of the stages; rows: those that split the rows of a batch.
    """
    axis: str
    rows: tuple

    def stage(self, weights: Any, x: Activation, i: Any):
        """The layers of this device, one after the other: weights are stacked, of so many."""
        each, shared = self.own(i)
        turn = lambda x, layer: (self.layer(layer[0], x, layer[1], shared), None)
        return jax.lax.scan(turn, x, (weights, each))[0]

    @property
    def place(self):
        """Which stage this device has, and how many there are."""
        return jax.lax.axis_index(self.axis), jax.lax.axis_size(self.axis)

    def up(self, y: Activation):
        """y of the stage before; the first one gets that of the last."""
        p = jax.lax.axis_size(self.axis)
        return jax.lax.ppermute(y, self.axis, [(s, (s + 1) % p) for s in range(p)])

    def down(self, dx: Activation):
        """dx of the stage behind."""
        p = jax.lax.axis_size(self.axis)
        return jax.lax.ppermute(dx, self.axis, [((s + 1) % p, s) for s in range(p)])

    def from_stage(self, s: int, x: Activation):
        """x of stage s, on all devices: an all-reduce of zeros and of that."""
        x = jnp.where(jax.lax.axis_index(self.axis) == s, x, 0)
        return self.own_part(jax.lax.psum(x, self.axis))

    def behind(self, y: Activation, i: Any):
        """leave, of what the last stage found, on all devices."""
        return self.leave(self.from_stage(jax.lax.axis_size(self.axis) - 1, y), i)

    def before(self, dx: Activation, i: Any):
        """entered, of what the first stage found, on all devices."""
        return self.entered(self.from_stage(0, dx), i)

    def added_behind(self, y: Activation, i: Any):
        """behind, for `adding`: ((sums, gradients), dy)."""
        sums, dy, grads = self.behind(y, i)
        return (sums, grads), dy

    def added_before(self, dx: Activation, i: Any):
        """before, for `adding`: (gradients, nothing)."""
        return self.before(dx, i), ()

    def own_part(self, tree: Any):
        """Arrays typed as other ones on each device: gradients are summed after the loop, not in
        it.

        Of an array that is the same on all devices, every use would sum the gradient at once.
        """
        return jax.tree.map(lambda x: varying(x, (self.axis, *self.rows)), tree)

    def zeros(self, like: Any, *more: int):
        """Zeros like these arrays or shapes, with so many more dimensions before."""
        def zero(x):
            x = varying(jnp.zeros((*more, *x.shape), x.dtype), varies(x))
            return self.own_part(x)

        return jax.tree.map(zero, like)

    def outside(self):
        """The shapes of (sums, gradients) that leave returns."""
        x = self.own_part(self.enter(0))
        sums, _, grads = self.leave(x, 0)
        return sums, grads


def added(total: Any, more: Any):
    """Two trees of arrays, added up."""
    return jax.tree.map(jnp.add, total, more)


def conveyed(pipeline: Pipeline, weights: Any, x_mBTD: Activation, recompute: bool):
    """What the last stage makes of all microbatches (m, B, T, D), at the ticks when they leave it.

    weights: (v, ...), of v runs of layers, between which a microbatch goes around the ring once
    more. Returns (v·m + p - 1, B, T, D), zeros in the other ticks and on the other devices: see
    `leaving`. The gradient keeps the residuals of every tick or, to recompute them, its input
    alone.
    """
    (s, p), m = pipeline.place, len(x_mBTD)
    v = len(jax.tree.leaves(weights)[0])

    def run(weights, chunk, x, i):
        return pipeline.stage(jax.tree.map(lambda w: w[chunk], weights), x, i)

    if recompute:  # with the choice of the chunk: chosen outside, its weights would be a residual
        run = jax.checkpoint(run, prevent_cse=False)

    def tick(arrived, t):
        turn = jnp.clip(t - s, 0, v * m - 1)
        # rounds of p microbatches; each of them passes all chunks before the next round begins
        i, chunk = turn // (v * p) * p + turn % p, turn // p % v
        i = jnp.where(turn == t - s, i, -1)  # a tick for nothing
        x = jnp.where((s == 0) & (chunk == 0), x_mBTD[i], arrived)
        y = run(weights, chunk if v > 1 else 0, x, i)
        done = (s == p - 1) & (chunk == v - 1) & (i >= 0)
        return pipeline.up(y), jnp.where(done, y, 0)

    # ticks for nothing work on a real microbatch: zeros may have no gradient, and 0 · NaN is NaN
    start = jax.lax.stop_gradient(x_mBTD[0])
    return jax.lax.scan(tick, start, jnp.arange(v * m + p - 1))[1]


def leaving(i: Any, chunks: int, stages: int):
    """The tick of `conveyed` in which microbatch i leaves the last chunk of the last stage."""
    v, p = chunks, stages
    return i // p * (v * p) + (v - 1) * p + i % p + p - 1


def gpipe(pipeline: Pipeline, weights: Any, microbatches: int, recompute: bool = False):
    """All microbatches forward, and back by JAX's own gradient of that loop.

    weights: of this device's layers, stacked. Returns (sums, gradients of weights, gradients of
    what is outside of the layers), each of this device alone. Work is (m + p - 1) / m of the useful
    one, and the residuals of every tick are kept until the way back. With recompute only its input
    is, and the stage runs forward once more: 4/3 of that work.
    """
    around = jax.tree.map(lambda w: w[None], weights)
    sums, dweights, outside = there_and_back(pipeline, around, microbatches, recompute)
    return sums, jax.tree.map(lambda w: w[0], dweights), outside


def circular(pipeline: Pipeline, weights: Any, microbatches: int):
    """As gpipe with recompute, for weights (v, layers, ...) of v shorter stages on each device.

    Device s of p has the stages s, p + s, 2p + s, ...: a microbatch goes around v times. Work is
    4/3 · (v·m + p - 1) / (v·m) of the useful one. Raises ValueError where m does not divide by p,
    unless v is 1.
    """
    p, v = pipeline.place[1], len(jax.tree.leaves(weights)[0])
    if v > 1 and microbatches % p:
        raise ValueError(f"a circular pipeline needs microbatches in rounds of {p}, one for each "
                         f"stage; found {microbatches}")
    return there_and_back(pipeline, weights, microbatches, recompute=True)


def there_and_back(pipeline: Pipeline, weights: Any, microbatches: int, recompute: bool):
    """What gpipe and circular return, of weights (v, layers, ...): see `conveyed`."""
    (s, p), every = pipeline.place, jnp.arange(microbatches)
    left = leaving(every, len(jax.tree.leaves(weights)[0]), p)
    x_mBTD = pipeline.own_part(jax.lax.map(pipeline.enter, every))
    y_tBTD, back = jax.vjp(partial(conveyed, pipeline, recompute=recompute), weights, x_mBTD)

    def behind(carry, i):  # each gradient in the place of its result, which nothing reads again
        total, y_tBTD = carry
        sums, dy, grads = pipeline.behind(y_tBTD[left[i]], i)
        y_tBTD = y_tBTD.at[left[i]].set(jnp.where(s == p - 1, dy, 0))
        return (added(total, (sums, grads)), y_tBTD), None

    start = pipeline.zeros(jax.eval_shape(pipeline.outside))
    ((sums, outside), dy_tBTD), _ = jax.lax.scan(behind, (start, y_tBTD), every)
    dweights, dx_mBTD = back(dy_tBTD)

    def before(total, i):
        return added(total, pipeline.before(dx_mBTD[i], i)), None

    return sums, dweights, jax.lax.scan(before, outside, every)[0]


def one_f_one_b(pipeline: Pipeline, weights: Any, microbatches: int):
    """One microbatch forward and one back in every tick, of m + 2(p - 1): arguments as of gpipe.

    Stage s takes microbatch i forward in tick i + s and back in tick i + 2(p - 1) - s. Of each one
    that is on its way it keeps what went in, 2(p - 1 - s) + 1 at a time at most, and makes the rest
    again: work is 4/3. What is kept does not grow with m.
    """
    (s, p), m = pipeline.place, microbatches
    held = 2 * p - 1

    def tick(carry, t):
        arrived, returned, kept, total = carry
        i, j, last, first = t - s, t - 2 * (p - 1) + s, t - (p - 1), t - 2 * (p - 1)
        x = jnp.where(s == 0, when(pipeline, "enter", t < m, pipeline.enter, t), arrived)
        y = when(pipeline, "forward", (i >= 0) & (i < m), forward, x, i)
        kept = jax.lax.dynamic_update_index_in_dim(kept, x, i % held, 0)

        sums, dweights, grads = total
        there = (last >= 0) & (last < m)
        (sums, grads), dy = adding(pipeline, "leave", there, (sums, grads), behind, y, last)
        dy = jnp.where(s == p - 1, dy, returned)
        dweights, dx = adding(pipeline, "back", (j >= 0) & (j < m), dweights, back,
                              kept[j % held], dy, j)
        grads, _ = adding(pipeline, "returned", first >= 0, grads, before, dx, first)
        total = sums, dweights, grads
        return (pipeline.up(y), pipeline.down(dx), kept, total), None

    forward = partial(pipeline.stage, weights)
    behind, before = pipeline.added_behind, pipeline.added_before

    def back(x, dy, j):
        return jax.vjp(lambda weights, x: pipeline.stage(weights, x, j), weights, x)[1](dy)

    zeros, (sums, grads) = pipeline.zeros, jax.eval_shape(pipeline.outside)
    x = jax.eval_shape(pipeline.enter, 0)
    start = zeros(x), zeros(x), zeros(x, held), zeros((sums, weights, grads))
    carry, _ = jax.lax.scan(tick, start, jnp.arange(m + 2 * (p - 1)))
    return carry[-1]


def by_tick(stages: int, microbatches: int):
    """Which branches of one_f_one_b some device takes in each tick: {scope: a set for each tick}.

    For `meshbook.hlo.schedule.play`; branch 1 is that in which something is done.
    """
    p, m = stages, microbatches
    ticks = range(m + 2 * (p - 1))
    busy = lambda *starts: [{int(start <= t < start + m) for start in starts} for t in ticks]
    return {"enter": busy(0), "forward": busy(*range(p)), "leave": busy(p - 1),
            "back": busy(*range(p - 1, 2 * p - 1)), "returned": busy(2 * (p - 1))}


def lockstep_events(stages: int, microbatches: int):
    """[Event] of one_f_one_b, for drawing: a forward pass takes one unit, a backward pass three.

    These are forward once more, B and W. Permutes make all devices wait for the end of a tick,
    which takes as long as the longest of what some device does in it: 4(m + p - 1) units in all.
    """
    (p, m), start, events = (stages, microbatches), 0, []
    branches = by_tick(p, m)
    for t, (forward, back) in enumerate(zip(branches["forward"], branches["back"], strict=True)):
        middle = start + (1 in forward)
        end = middle + 3 * (1 in back)
        going = [(s, "F", t - s, start, middle) for s in range(p)]
        coming = [(s, "BW", t - 2 * (p - 1) + s, middle, end) for s in range(p)]
        events += [Event(s, Task(kind, i), since, until)
                   for s, kind, i, since, until in going + coming if 0 <= i < m]
        start = end
    return events


def when(pipeline: Pipeline, name: str, true: Any, function: Callable, *args: Any):
    """function(*args) where true, else zeros: nothing is computed there. name: of its scope."""
    run = lambda *args: pipeline.own_part(function(*args))
    skip = lambda *args: pipeline.zeros(jax.eval_shape(run, *args))
    with jax.named_scope(name):
        return jax.lax.cond(true, run, skip, *args)


def adding(pipeline: Pipeline, name: str, true: Any, total: Any, function: Callable, *args: Any):
    """(total + more, found) of function(*args) -> (more, found) where true, else (total, zeros).

    The sum is inside of the conditional: outside of it, zeros of the size of `more` would be made
    and added in every turn. name: of its scope.
    """
    run = lambda *args: pipeline.own_part(function(*args))

    def add(total, *args):
        more, found = run(*args)
        return added(total, more), found

    skip = lambda total, *args: (total, pipeline.zeros(jax.eval_shape(run, *args)[1]))
    with jax.named_scope(name):
        return jax.lax.cond(true, add, skip, total, *args)
