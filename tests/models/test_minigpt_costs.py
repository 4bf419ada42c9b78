"""A training step of MiniGPT: the four proofs on every mesh, each byte by its formula."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from meshes import on_one_device
from tiny_gpt import B, BATCHES, CONFIG, compiled, tiny_state, weights
from tiny_vit import KEY, RULES, run

from meshbook import proofs
from meshbook.costs.plans import Plan
from meshbook.costs.step import describe
from meshbook.costs.traffic import step_traffic
from meshbook.costs.work import extend_flops, step_work
from meshbook.models import MiniGPTConfig, generation, reference
from meshbook.models.losses import language_loss
from meshbook.training import (
    evaluate, fit, language_recipe, loss_and_metrics, value_and_gradients,
)

L = CONFIG.layers


@functools.cache
def plain():
    """The same training from the same weights, of other code, on one device."""
    return reference.Reference(reference.minigpt, weights(), optax.sgd(0.5), KEY,
                               rate=CONFIG.dropout, classes=CONFIG.vocabulary, clip=0.5).run()


@pytest.mark.parametrize("row, shape", [
    ("tensor_parallel", (8, 1)), ("tensor_parallel", (4, 2)), ("tensor_parallel", (2, 4)),
    ("fully_sharded", (4, 2)),
])
def test_four_proofs(row, shape):
    state, program = compiled(row, shape)
    verdict = proofs.assert_same_training(run(state, program), plain(), BATCHES)
    assert repr(verdict).startswith("same training: 10 steps") and not verdict.zero
    mesh = state.program.mesh
    step = describe(CONFIG, Plan(**mesh.shape, rules=row), B)
    work, traffic = step_work(step), step_traffic(step, clipped=True)
    held = 2 * 4 * step.numbers["stored"]
    arrays = {"params": state.params, "opt_state": state.opt_state}
    proofs.assert_sharded(arrays, proofs.by_letters(arrays, RULES[row]), mesh, held + 4)  # the norm
    proofs.assert_donated(program, held + 4)  # the step number; the old norm is not even read
    proofs.assert_divided(program, 8, 8 * work.useful, work.factor, rtol=1e-9)
    if row == "fully_sharded":
        assert traffic["all-gather", ("batch",)].count == 10 * L + 3
    proofs.assert_communicates(program, mesh, traffic)


def test_on_one_device_it_is_the_training_of_the_reference():
    a, b = run(*compiled()), plain()
    norms = [float(b.step(b.state, batch)[1]["gradient_norm"]) for batch in BATCHES[:2]]
    assert min(norms) > 0.5  # so that they are clipped
    assert not proofs.assert_same_training(a, b, BATCHES).zero


def test_without_clipping_nothing_but_its_norms_is_missing():
    step = describe(CONFIG, Plan(4, model=2, rules="tensor_parallel"), B)
    whole, less = (step_traffic(step, clipped=clipped) for clipped in (True, False))
    batch, model = (("all-reduce", (axis,)) for axis in ("batch", "model"))
    assert whole[batch] == less[batch]
    assert whole[model].bytes - less[model].bytes == 4 * (6 * L + 3)
    assert whole[model].count - less[model].count == 1


def test_at_the_sources_size_the_work_is_known():
    config = MiniGPTConfig()
    work = step_work(describe(config, Plan(), 256))
    assert round(work.useful / (256 * 256) / 1e6, 2) == 89.78
    assert work.useful / 1e12 == pytest.approx(5.88, abs=0.005)
    assert 1 < work.factor < 1.001


@on_one_device
def test_the_loss_in_chunks_is_the_plain_one_with_dropout_and_all():
    found = []
    for loss in language_loss, loss_and_metrics:
        state = tiny_state(loss=loss)
        run = jax.jit(value_and_gradients).lower(state, BATCHES[0], KEY).compile()
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


@pytest.mark.parametrize("tokens", [CONFIG.tokens, 1])
def test_flops_of_prefill_and_decode_are_those_of_compiled_programs(tokens):
    state = tiny_state("tensor_parallel", (1, 1))
    rows, first, column = generation.laid_out([[1] * CONFIG.tokens] * 2, [True] * 2, CONFIG.tokens)
    first = jnp.asarray(first)

    @jax.jit
    def one_more(params, tokens_BT, cache):
        x_BTD, cache = state.program.model(params).extend(tokens_BT, cache, 5, first)
        return generation.logits(state.program.model(params), x_BTD), cache

    with jax.set_mesh(state.program.mesh):
        cache = state.program.model(state.params).empty_cache(2)
        lowered = one_more.lower(state.params, jnp.asarray(rows[:, :1]), cache) if tokens == 1 else (
            generation.prefill.lower(state.program, state.params, rows, first, column))
        program = lowered.compile()
    assert proofs.work(program) == extend_flops(describe(CONFIG, Plan(), 2), tokens)
