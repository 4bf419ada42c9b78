"""Attention row by row: the same numbers as all rows at once, and never the scores of all."""
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import on_one_device
from test_decoder import (
    CONFIGS, DOCUMENTS, TOKENS, assert_close, logits, loss_and_gradients,
    products_of_a_layer, state,
)

from meshbook.costs.plans import Plan
from meshbook.costs.step import describe
from meshbook.costs.work import step_work
from meshbook.hlo import module
from meshbook.models.row_attention import attend_by_rows
from meshbook.proofs import work
from meshbook.sharding import Sharding, make_mesh

RANDOM = np.random.default_rng(3)


def plainly(q, k, v, sees):
    """The sum as it is written: NumPy, in float64, one head of one token after the other."""
    B, T, H, K = q.shape
    y = np.zeros((B, T, H, v.shape[-1]))
    for b, t, h in np.ndindex(B, T, H):
        g = h // (H // k.shape[2])
        scores = k[b, :, g] @ q[b, t, h] / K ** 0.5
        weights = np.where(sees[b % len(sees), t], np.exp(scores - scores.max()), 0)
        y[b, t, h] = weights @ v[b, :, g] / weights.sum()
    return y


@pytest.mark.parametrize("shape, preset", [((1, 1), "none"), ((4, 2), "tensor_parallel")])
@pytest.mark.parametrize("rows", [1, 4])
def test_queries_find_what_the_sum_says(shape, preset, rows):
    sizes = {"q": (4, 6, 4, 10), "k": (4, 8, 2, 10), "v": (4, 8, 2, 3)}
    arrays = {name: RANDOM.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    sees = RANDOM.random((rows, 6, 8)) < 0.6
    sees[..., 0] = True
    rules, mesh = getattr(Sharding, preset)().also(G="model"), make_mesh(shape)
    rules = rules if preset != "none" else Sharding.none().also(G=None)
    with jax.set_mesh(mesh):
        where = jax.NamedSharding(mesh, rules.activation("BTHK"))
        placed = [jax.device_put(x, where) for x in arrays.values()]
        found = jax.jit(lambda q, k, v, sees: attend_by_rows(
            rules, (q, None), (k, None), v, sees))(*placed, jnp.asarray(sees))
    np.testing.assert_allclose(found, plainly(*arrays.values(), sees), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["groups", "latent"])
@pytest.mark.parametrize("preset, shape", [
    ("none", (1, 1)), ("sequence_parallel", (4, 2)), ("fully_sharded", (8, 1))])
def test_the_decoder_has_the_loss_and_the_gradients_of_all_rows_at_once(name, preset, shape):
    expected = loss_and_gradients(state(name))
    found = loss_and_gradients(state(name, preset, shape, by_row=True, remat="all"))
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-6)
    assert_close(found[1], expected[1], 2e-6)


@on_one_device
def test_documents_stay_apart_in_their_own_rows():
    own = {"segments": DOCUMENTS["segments"].copy(), "positions": DOCUMENTS["positions"]}
    own["segments"][3] = 0  # one row is one document
    found, expected = (logits(state("plain", by_row=by_row), tokens_BT=TOKENS, **own)
                       for by_row in (True, False))
    np.testing.assert_allclose(found, expected, atol=2e-5)
    np.testing.assert_array_less(1e-3, np.abs(found - logits(
        state("plain", by_row=True), tokens_BT=TOKENS, **DOCUMENTS))[3].max())


@pytest.mark.parametrize("name", ["plain", "latent, no biases"])
@pytest.mark.parametrize("policy", ["none", "products", "attention", "all"])
def test_the_scores_are_made_again_and_those_of_all_rows_are_nowhere(name, policy):
    rotary = 4 if CONFIGS[name].latent else 0  # so that no other array has the scores' dims
    config = dataclasses.replace(CONFIGS[name], remat=policy, by_row=True, rotary=rotary)
    made = state(name, remat=policy, by_row=True, rotary=rotary)
    one = products_of_a_layer(config)
    one["scores"] += one.pop("turned scores", 0)
    total = sum(one.values())
    again = {"attention": total - one["last"] - one["values"],
             "all": one["scores"] + total - one["last"]}.get(policy, one["scores"])
    batch = made.program.place({"tokens_BT": TOKENS})

    def loss(params):
        return jnp.square(made.program.model(params).hidden(**batch)).sum()

    with jax.set_mesh(made.program.mesh):
        program = jax.jit(jax.grad(loss)).lower(made.params).compile()
    done = (3 * total + again) * TOKENS.size * 2  # layers
    head = 3 * 2 * config.embed * config.padded * TOKENS.size
    assert work(program) == done and step_work(describe(config, Plan(), 8)).done == done + head
    B, T, H = *TOKENS.shape, config.heads
    found = {tuple(sorted(size for size in each.shape.dims if size > 1))
             for computation in module.parse(program).computations.values()
             for each in computation.instructions.values()
             if isinstance(each.shape, module.Shape)}
    assert (H, T, T) in found and tuple(sorted((B, H, T, T))) not in found
