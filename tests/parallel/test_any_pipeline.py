"""Pipelines of any stages, microbatches, chunks and order of tasks, of losses that are weighted.

Schedules are the package's, and others that are drawn task by task.
"""
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from properties import examples
from tiny_pipeline import Stack

from meshbook.parallel import schedules
from meshbook.parallel.pipeline import circular, gpipe, one_f_one_b
from meshbook.parallel.schedule_execution import execute
from meshbook.parallel.schedules import Task
from meshbook.parallel.slots import by_table, table_of
from meshbook.parallel.stage_programs import compile_stages, stage_meshes
from meshbook.sharding import make_mesh, place

D = 3
LOOPS = {"gpipe": gpipe, "checkpointed": functools.partial(gpipe, recompute=True),
         "lockstep": one_f_one_b}
TABLES = {"1F1B": schedules.one_f_one_b, "ZB-H1": schedules.zero_bubble,
          "all forward": schedules.gpipe}


@dataclass(frozen=True)
class Weighted(Stack):
    """A Stack whose layers differ by microbatch, and whose loss is sum(counts * sin(y * head)).

    head: trained as the scale is; factors (m, L): of each layer; shifts (m,): what layers share.
    """

    head: jax.Array
    counts_mBD: jax.Array
    factors_mL: jax.Array
    shifts_m: jax.Array

    def layer(self, w, x_BD, each, shared):
        return self.each(w, x_BD, each, shared)

    def own(self, i):
        s, p = self.place
        factors_L = self.factors_mL[i]
        each = len(factors_L) // p
        return jax.lax.dynamic_slice_in_dim(factors_L, s * each, each), self.shifts_m[i]

    def entered(self, dx_BD, i):
        return {"scale": super().entered(dx_BD, i), "head": 0 * self.head}

    def leave(self, y_BD, i):
        s, p = self.place
        loss, back = jax.vjp(
            lambda y, head: (self.counts_mBD[i] * jnp.sin(y * head)).sum(), y_BD, self.head)
        dy_BD, dhead = back(jnp.ones_like(loss))
        loss, dhead = (jnp.where(s == p - 1, x, 0) for x in (loss, dhead))
        return loss, dy_BD, {"scale": 0 * y_BD.sum(), "head": dhead}


def one_layer(w, x_BD, factor, shift):
    return x_BD + factor * jnp.tanh(x_BD @ w["in"] + shift) @ w["out"]


def one_device(params, x_mBD, counts_mBD, of_layer, shifts_m):
    """The loss of all microbatches: of_layer(i, at) is the factor of a layer."""
    total = 0
    for i, x_BD in enumerate(x_mBD):
        x_BD = params["scale"] * x_BD
        for at in range(len(params["layers"]["in"])):
            w = jax.tree.map(lambda w: w[at], params["layers"])
            x_BD = one_layer(w, x_BD, of_layer(i, at), shifts_m[i])
        total += (counts_mBD[i] * jnp.sin(x_BD * params["head"])).sum()
    return total


def check(schedule, p, m, layers, chunks=1, seed=0):
    """Loss and gradients of a schedule on p devices, of so many layers on each in each chunk."""
    random, L = np.random.default_rng(seed), p * layers * chunks
    normal = lambda *shape: random.normal(size=shape).astype(np.float32)
    x_mBD, counts_mBD = normal(m, 2, D), normal(m, 2, D)
    factors_mL, shifts_m = normal(m, L), normal(m)
    params = {"layers": {"in": normal(L, D, D) / 2, "out": normal(L, D, D) / 4},
              "scale": normal(), "head": normal(D)}
    around = schedule is circular
    if around:  # a device's layers of all chunks share the factors
        factors_mL = factors_mL[:, :p * layers]

    def local(layers, scale, head, *arrays):
        own = lambda x: jax.lax.pcast(x, ("stage",), to="varying")
        x_mBD, *others = map(own, arrays)
        stack = Weighted("stage", (), x_mBD, own(scale), one_layer, True, own(head), *others)
        weights = jax.tree.map(lambda w: w[:, 0] if around else w[0, 0], layers)
        loss, dlayers, outside = schedule(stack, stack.own_part(weights), m)
        dlayers = jax.tree.map(lambda w: w[:, None] if around else w[None, None], dlayers)
        return jax.tree.map(lambda x: jax.lax.psum(x, "stage"), (loss, outside)), dlayers

    split = P(None, "stage")
    with jax.set_mesh(make_mesh((p,), ("stage",))), jax.default_matmul_precision("highest"):
        cut = jax.tree.map(lambda w: w.reshape(chunks, p, layers, D, D), params["layers"])
        given = jax.device_put(
            (cut, params["scale"], params["head"], x_mBD, counts_mBD, factors_mL, shifts_m),
            (split, *[P()] * 6))
        (loss, outside), dlayers = jax.device_get(jax.jit(jax.shard_map(
            local, in_specs=(split, *[P()] * 6), out_specs=(P(), split)))(*given))

    def of_layer(i, at):
        return factors_mL[i, at // layers % p * layers + at % layers]

    with jax.enable_x64(True):
        wide = jax.tree.map(np.float64, params)
        expected, grads = jax.device_get(jax.jit(jax.value_and_grad(
            lambda params: one_device(params, x_mBD, counts_mBD, of_layer, shifts_m)))(wide))
    found = {"layers": jax.tree.map(lambda w: w.reshape(L, D, D), dlayers)} | outside
    np.testing.assert_allclose(loss, expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(grads), strict=True):
        assert np.linalg.norm(one - other) <= 2e-5 * max(1, np.linalg.norm(other))


STAGES, FEW = st.sampled_from([3, 5, 2, 6, 4, 7, 8, 1]), st.sampled_from([2, 1])
MICROBATCHES = st.sampled_from([4, 2, 7, 1, 5, 3, 9, 6, 8])


@examples(4)
@given(st.sampled_from(sorted(LOOPS)), STAGES, MICROBATCHES, FEW)
def test_loops_of_any_stages_and_microbatches_have_the_gradients_of_one_device(name, p, m, layers):
    check(LOOPS[name], p, m, layers)


@examples(3)
@given(STAGES, MICROBATCHES, st.sampled_from([2, 1, 3]), FEW)
def test_a_circular_pipeline_needs_rounds_and_has_the_gradients_of_one_device(p, m, v, layers):
    if v > 1 and m % p:
        with pytest.raises(ValueError, match=f"rounds of {p}, one for each stage; found {m}"):
            check(circular, p, m, layers, v)
        m = -(-m // p) * p if p < 5 else p
    check(circular, p, m, layers, v)


def in_table(schedule):
    """What runs a schedule as a table."""
    return lambda pipeline, weights, microbatches: by_table(pipeline, weights, table_of(schedule))


@examples(3)
@given(st.sampled_from(sorted(TABLES)), STAGES, MICROBATCHES, FEW)
def test_tables_of_any_stages_and_microbatches_have_the_gradients_of_one_device(name, p, m, layers):
    check(in_table(TABLES[name](p, m)), p, m, layers)


@st.composite
def any_order(draw, p, v=1, most=4):
    """A schedule in which each device next does any task that it can, F, B, W or BW."""
    m = draw(st.sampled_from(range(most, 0, -1)))
    last, done, out = p * v - 1, set(), [[] for _ in range(p)]

    def ready(kind, i, stage):
        before = {"F": [("F", i, stage - 1)] if stage else [], "W": [("B", i, stage)]}
        behind = [("B", i, stage + 1)] if stage < last else []
        return done.issuperset(before.get(kind, [("F", i, stage), *behind]))

    every = {(kind, i, stage) for kind in "FBW" for i in range(m) for stage in range(last + 1)}
    while len(done) < len(every):
        kind, i, stage = draw(st.sampled_from(sorted(
            each for each in every - done if ready(*each))))
        whole = kind == "B" and draw(st.booleans())
        done |= {(part, i, stage) for part in ("BW" if whole else kind)}
        out[stage % p].append(Task("BW" if whole else kind, i, stage // p))
    return out


LATE = [[Task(kind, i) for kind, i in (
    ("F", 0), ("F", 1), ("BW", 1), ("F", 2), ("BW", 2), ("BW", 0))]]


@examples(4)
@given(st.sampled_from([3, 2, 4, 1]).flatmap(any_order))
@example(LATE)
def test_a_table_may_have_tasks_in_any_order(schedule):
    m = 1 + max(task.microbatch for task in schedule[0])
    check(in_table(schedule), len(schedule), m, 1)


def middle(w, x_BD, batch):
    return x_BD + jnp.tanh(x_BD @ w["in"]) @ w["out"]


def last(w, x_BD, batch):
    return (batch["counts"] * jnp.sin(middle(w, x_BD, batch))).mean()


def batches(m):
    normal = np.random.default_rng(1).normal
    return [{name: normal(size=(2, D)).astype(np.float32) for name in ("inputs", "counts")}
            for _ in range(m)]


@functools.cache
def stages_of(p, v):
    """(weights of p * v stages, the stages compiled for p devices)."""
    normal, count = np.random.default_rng(0).normal, p * v
    weights = [{name: normal(size=(D, D)).astype(np.float32) for name in ("in", "out")}
               for _ in range(count)]
    meshes = stage_meshes(p)
    placed = [place(w, meshes[s % p], rows=()) for s, w in enumerate(weights)]
    with jax.default_matmul_precision("highest"):
        return weights, compile_stages(
            [middle] * (count - 1) + [last], placed, meshes, batches(1)[0])


@examples(5)
@given(st.sampled_from([(3, 1), (2, 2), (1, 3)]).flatmap(
    lambda sizes: st.tuples(st.just(sizes), any_order(*sizes))))
def test_a_controller_finds_the_losses_and_gradients_in_any_order_of_tasks(drawn):
    (p, v), schedule = drawn
    weights, stages = stages_of(p, v)
    given = batches(1 + max(task.microbatch for task in schedule[0]))
    found = execute(schedule, stages, given)

    def mean(weights):
        each = []
        for batch in given:
            x_BD = batch["inputs"]
            for w in weights:
                x_BD = x_BD + jnp.tanh(x_BD @ w["in"]) @ w["out"]
            each.append((batch["counts"] * jnp.sin(x_BD)).mean())
        return sum(each) / len(each), each

    with jax.enable_x64(True):
        gradients, each = jax.device_get(jax.grad(mean, has_aux=True)(
            jax.tree.map(np.float64, weights)))
    np.testing.assert_allclose(found.losses, each, rtol=1e-5, atol=1e-6)
    for one, other in zip(*map(jax.tree.leaves, (found.gradients, gradients)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
