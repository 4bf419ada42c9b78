"""The faster models: the same logits, gradients and training, and less work where it is said."""
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from meshes import on_one_device
from tiny_gpt import B, BATCHES as WORDS, CLIPPED, CONFIG as GPT, compiled as compiled_gpt
from tiny_vit import BATCHES as IMAGES, KEY, STILL as CONFIG, compiled, normalised, run

from meshbook import proofs
from meshbook.costs.plans import Plan
from meshbook.costs.step import describe
from meshbook.costs.work import step_work
from meshbook.models import ViT, ViTConfig
from meshbook.models.fast import (
    FastMiniGPT, FastViT, attend, class_token_saving, train_steps,
)
from meshbook.models.fused_loss import one_pass_cross_entropy
from meshbook.models.losses import language_loss
from meshbook.sharding import Sharding
from meshbook.training import create_state, train_step

ONE_PASS = functools.partial(language_loss, cross_entropy=one_pass_cross_entropy)


PIXELS = normalised(IMAGES[0]["inputs"])


def program(model=ViT, shape=(1, 1)):
    return compiled("tensor_parallel", shape, CONFIG, model=model, prepare=normalised)


def parameters(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


@on_one_device
def test_they_have_the_same_parameters():
    for plain, fast, config in (ViT, FastViT, CONFIG), (tiny_gpt_model, FastMiniGPT, GPT):
        pair = [kind(config, Sharding.none(), rngs=nnx.Rngs(0)) for kind in (plain, fast)]
        jax.tree.map(np.testing.assert_array_equal, *map(parameters, pair))


def tiny_gpt_model(config, sharding, rngs):
    return FastMiniGPT.__base__(config, sharding, rngs=rngs)


@pytest.mark.parametrize("shape", [(1, 1), (4, 2)])
def test_the_fast_vit_trains_alike(shape):
    proofs.assert_same_training(run(*program(FastViT, shape)), run(*program()), IMAGES[:3])


@pytest.mark.parametrize("length", [16, 17])
@pytest.mark.parametrize("causal", [False, True])
def test_a_kernel_gives_the_same_attention_for_even_and_odd_lengths(causal, length):
    random = np.random.default_rng(0)
    q, k, v, c = (random.normal(size=(2, length, 2, 8)).astype(np.float32) for _ in range(4))

    def run(kernel):
        y, back = jax.vjp(functools.partial(attend, kernel, is_causal=causal), q, k, v)
        return y, *back(c)

    for plain, by_kernel in zip(run(None), run("xla"), strict=True):
        np.testing.assert_allclose(plain, by_kernel, rtol=1e-5, atol=1e-5)


def test_only_what_nobody_reads_is_left_out():
    for kind, saved in (ViT, 0), (FastViT, class_token_saving(CONFIG, B)):
        useful = step_work(describe(CONFIG, Plan(), B)).useful
        proofs.assert_divided(program(kind)[1], 1, useful - saved, rtol=1e-9)


def test_at_the_size_of_the_source_it_is_a_seventh():
    useful = step_work(describe(ViTConfig(), Plan(), 1)).useful
    assert round(class_token_saving(ViTConfig(), 1) / useful, 3) == 0.137


@on_one_device
@pytest.mark.parametrize("layers", [1, 3])
def test_the_last_block_is_the_last_whatever_their_number(layers):
    config = ViTConfig(embed=16, hidden=16, heads=2, layers=layers, patch=16)
    pair = [kind(config, Sharding.none(), rngs=nnx.Rngs(0)) for kind in (ViT, FastViT)]
    plain, fast = (jax.jit(model)(PIXELS) for model in pair)
    np.testing.assert_allclose(plain, fast, rtol=1e-4, atol=1e-4)


@on_one_device
def test_several_steps_in_one_call_are_the_same_steps():
    state, losses = program()[0], []
    one = jax.tree.map(jnp.copy, state)
    for batch in IMAGES[:3]:
        one, metrics = train_step(one, batch, KEY)
        losses.append(metrics["loss"])
    stacked = jax.tree.map(lambda *x: np.stack(x), *IMAGES[:3])
    many, metrics = train_steps(jax.tree.map(jnp.copy, state), stacked, KEY)
    np.testing.assert_allclose(metrics["loss"], losses, rtol=1e-6)
    assert many.step == 3
    for one, many in zip(*map(jax.tree.leaves, (one.params, many.params)), strict=True):
        np.testing.assert_allclose(one, many, rtol=1e-5, atol=1e-6)


@on_one_device
def test_several_steps_do_as_much_work_as_one_by_one():
    state, step = program()
    batches = jax.tree.map(lambda x: np.stack([x] * 3), IMAGES[0])
    many = train_steps.lower(state, batches, KEY).compile()
    assert proofs.work(many) == 3 * proofs.work(step)


@pytest.mark.parametrize("loss", [language_loss, ONE_PASS])
def test_the_fast_minigpt_trains_alike(loss):
    make = lambda: FastMiniGPT(GPT, Sharding.none(), rngs=nnx.Rngs(0))
    plain, step = compiled_gpt()
    fast = dataclasses.replace(create_state(make, CLIPPED, loss=loss), params=plain.params)
    proofs.assert_same_training(run(fast), run(plain, step), WORDS[:3])


@on_one_device
def test_rows_of_several_documents_stay_apart():
    pair = [kind(GPT, Sharding.none(), rngs=nnx.Rngs(0)) for kind in (tiny_gpt_model, FastMiniGPT)]
    segments = np.arange(GPT.tokens)[None].repeat(B, 0) // 5
    inputs = WORDS[0]["inputs"]
    plain, fast = (jax.jit(model.hidden)(inputs, segments=segments) for model in pair)
    np.testing.assert_allclose(plain, fast, rtol=1e-5, atol=1e-5)
    assert np.abs(fast - jax.jit(pair[1].hidden)(inputs)).max() > 0.1


@on_one_device
def test_a_kernel_that_is_not_here_is_an_error_and_not_another_kernel():
    model = FastViT(CONFIG, Sharding.none(), rngs=nnx.Rngs(0), kernel="cudnn")
    with pytest.raises(RuntimeError, match="cuDNN"):
        model(PIXELS)
