"""A training step of MiniGPT: the four proofs on every mesh, each byte by its formula."""
import functools

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from tiny_gpt import CONFIG, QUICKLY, mesh_of, tiny_state

from meshbook import costs, proofs
from meshbook.gpt import MiniGPTConfig
from meshbook.losses import language_loss
from meshbook.sharding import place
from meshbook.training import (
    evaluate, fit, language_recipe, loss_and_metrics, train_step, value_and_gradients)

B, L, KEY = 16, CONFIG.layers, jax.random.key(7)


def batch(seed):
    tokens = np.random.default_rng(seed).integers(0, 250, (B, 17)).astype(np.int32)
    return {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}


BATCHES = [batch(seed) for seed in range(10)]
CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.5))


@functools.cache
def compiled(row="none", shape=None, axis_types=AxisType.Explicit):
    mesh = mesh_of(shape, axis_types)
    state = tiny_state(row, mesh, CLIPPED)
    return state, train_step.lower(state, place(BATCHES[0], mesh), KEY).compile(QUICKLY)


def run(state, program):
    mesh = state.program.mesh
    return proofs.Run(lambda state, batch: program(state, place(batch, mesh), KEY), state,
                      params=lambda state: state.params)


@pytest.mark.parametrize("row, shape, axis_types", [
    ("tensor_parallel", (8, 1), AxisType.Explicit),
    ("tensor_parallel", (4, 2), AxisType.Explicit),
    ("tensor_parallel", (2, 4), AxisType.Explicit),
    ("tensor_parallel", (4, 2), AxisType.Auto),
    ("fully_sharded", (4, 2), AxisType.Explicit),
])
def test_four_proofs(row, shape, axis_types):
    state, program = compiled(row, shape, axis_types)
    mesh, ways = state.program.mesh, shape[1]
    proofs.assert_sharded((state.params, state.opt_state), state.program.specs, mesh)
    proofs.assert_divided(program, 8, *costs.gpt_step_flops(CONFIG, B), rtol=1e-9)
    sharded = row == "fully_sharded"
    held = [leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(state.params)]
    assert sum(held) == costs.gpt_parameters(CONFIG, ways, shape[0] if sharded else 1)
    traffic = costs.gpt_step_traffic(CONFIG, mesh, B, sharded=sharded)
    if sharded:
        traffic["batch"] += costs.step_gathers(costs.gpt_parameters, CONFIG, mesh)
    proofs.assert_communicates(program, mesh, traffic)
    proofs.assert_same_training(run(state, program), run(*compiled()), BATCHES)


def test_without_clipping_nothing_but_its_norms_is_missing():
    mesh = mesh_of((4, 2))
    whole, less = (costs.gpt_step_traffic(CONFIG, mesh, B, clipped) for clipped in (True, False))
    assert whole["batch"] == less["batch"]
    assert whole["model"] - less["model"] == 4 * (6 * L + 3)


def test_at_the_sources_size_the_work_is_known():
    config = MiniGPTConfig()
    useful, factor = costs.gpt_step_flops(config, 256)
    assert round(useful / (256 * 256) / 1e6, 2) == 89.78
    assert useful / 1e12 == pytest.approx(5.88, abs=0.005)
    assert 1 < factor < 1.001


def test_the_loss_in_chunks_is_the_plain_one_with_dropout_and_all():
    found = []
    for loss in language_loss, loss_and_metrics:
        state = tiny_state(loss=loss)
        run = jax.jit(value_and_gradients).lower(state, BATCHES[0], KEY).compile(QUICKLY)
        found.append(run(state, BATCHES[0], KEY))
    ((loss, metrics), grads), ((plain, _), plain_grads) = found
    assert set(metrics) == {"loss", "accuracy"}
    np.testing.assert_allclose(loss, plain, rtol=1e-5)
    norm = float(optax.tree.norm(plain_grads))
    apart = jax.tree.map(lambda x, y: float(optax.tree.norm(x - y)), grads, plain_grads)
    assert max(jax.tree.leaves(apart)) < 1e-5 * norm


def test_evaluation_counts_tokens():
    state, rows = tiny_state(), BATCHES[0]
    weight = np.random.default_rng(0).integers(0, 2, (B, 16)).astype(np.float32)
    labels = np.where(weight > 0, rows["labels"], -1).astype(np.int32)
    parts = evaluate(state, [{**rows, "labels": labels, "weight": weight},
                             {**rows, "labels": np.where(weight > 0, -1, rows["labels"]).astype(
                                 np.int32), "weight": 1 - weight}])
    assert parts == pytest.approx(evaluate(state, [rows]), rel=1e-5)


def test_the_recipe_learns_and_its_first_step_is_gentle():
    tokens = np.tile(np.arange(17, dtype=np.int32), (B, 1)) + np.arange(B, dtype=np.int32)[:, None]
    data = {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}
    state = tiny_state(optimizer=language_recipe(40, 1e-2))
    _, history = fit(state, [data] * 40, KEY)
    assert history[-1]["loss"] < 0.3 * history[0]["loss"]
