"""In bfloat16 what is promised in float32 is float32, and in float32 nothing is bfloat16.

Read from the equations of a whole training step, gradients and AdamW too, and from values that
bfloat16 cannot hold.
"""
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from meshes import on_one_device
from test_vit import all_equations

from meshbook.models import MiniGPT, MiniGPTConfig, ViT, ViTConfig
from meshbook.models.balanced_loss import balanced, balanced_loss
from meshbook.models.decoder import Decoder, DecoderConfig
from meshbook.models.decoder_layers import RMSNorm
from meshbook.models.earlier import EarlierNorm
from meshbook.models.expert_layers import ExpertSizes
from meshbook.models.fast import FastMiniGPT, FastViT
from meshbook.models.fused_loss import one_pass_cross_entropy
from meshbook.models.layers import Norm
from meshbook.models.losses import chunked_cross_entropy, language_loss
from meshbook.parallel.context import Context
from meshbook.parallel.zigzag import zigzag
from meshbook.sharding import Sharding, make_mesh
from meshbook.training import abstract_state, language_recipe, loss_and_metrics, train_step
from meshbook.training.loop import value_and_gradients

VIT = ViTConfig(embed=32, hidden=48, heads=4, layers=2, patch=8, dropout=0.1)
GPT = MiniGPTConfig(vocabulary=250, tokens=16, embed=32, hidden=48, heads=4, layers=2, dropout=0.1)
SMALL = DecoderConfig(vocabulary=250, tokens=16, embed=32, hidden=48, heads=4, layers=2,
                      dropout=0.1)
decoder = functools.partial(dataclasses.replace, SMALL)
ONE_PASS = functools.partial(language_loss, cross_entropy=one_pass_cross_entropy)


def in_zigzag(params, program, batch, key=None):
    return language_loss(params, program, zigzag(batch, 2), key)


MODELS = {
    "ViT": (ViT, VIT, loss_and_metrics), "fast ViT": (FastViT, VIT, loss_and_metrics),
    "MiniGPT": (MiniGPT, GPT, language_loss), "fast MiniGPT": (FastMiniGPT, GPT, ONE_PASS),
    "groups": (Decoder, decoder(groups=2, bias=True, gated=False), language_loss),
    "by row": (Decoder, decoder(by_row=True, remat="attention"), ONE_PASS),
    "latent": (Decoder, decoder(latent=8, rotary=4, period=2), language_loss),
    "latent by row": (Decoder, decoder(latent=8, rotary=4, by_row=True, bias=True), language_loss),
    "capacity": (Decoder, decoder(experts=ExpertSizes(4, 2, capacity=1.0, auxiliary=0.1)),
                 balanced_loss),
    "dropless": (Decoder, decoder(experts=ExpertSizes(
        4, 2, biased=True, router="sigmoid", block=8)), balanced_loss),
    "sequence": (Decoder, SMALL, language_loss), "ring": (Decoder, SMALL, in_zigzag),
}
RULES = {"sequence": Sharding.sequence_parallel(),
         "ring": Sharding.context_parallel(Context(axis="model", zigzagged=True, block=4))}
STATISTICS = {  # what softmax, norms, positions, routers, losses and sums of many rows are made of
    "exp", "log", "log1p", "rsqrt", "sqrt", "square", "cos", "sin", "div", "reduce_max", "argmax",
    "top_k", "cumsum", "scatter-add", "pmax", "psum"}
IDS = np.zeros((8, 16), np.int32)
HALF, WHOLE = jnp.dtype("bfloat16"), jnp.dtype("float32")


@functools.cache
def traced(name, dtype):
    """The equations of a step of training, and the types of gradients and of what it returns."""
    model, config, loss = MODELS[name]
    config, rules = dataclasses.replace(config, dtype=dtype), RULES.get(name, Sharding.none())
    state = abstract_state(
        lambda: model(config, rules, rngs=nnx.Rngs(0)), balanced(language_recipe(10)),
        make_mesh((2, 2) if name in RULES else (1, 1)), loss=loss)
    batch = {"inputs": IDS, "labels": IDS, "weight": np.ones(IDS.shape, np.float32)}
    if isinstance(config, ViTConfig):
        images = np.zeros((8, 32, 32, 3), np.float32)
        batch = {"inputs": images, "labels": IDS[:, 0], "weight": np.ones(8, np.float32)}
    with jax.set_mesh(state.program.mesh):
        batch = state.program.place(batch)
        step = jax.make_jaxpr(train_step)(state, batch, jax.random.key(0))
        gradients = jax.eval_shape(value_and_gradients, state, batch, jax.random.key(0))
    types = {x.dtype for x in (*step.out_avals, *jax.tree.leaves(gradients))}
    return list(all_equations(step.jaxpr)), types


def types_in(equations):
    """(name of the operation, type) of every number that goes into or comes out of one."""
    return {(eqn.primitive.name, v.aval.dtype) for eqn in equations
            for v in (*eqn.invars, *eqn.outvars) if hasattr(v.aval, "dtype")}


@pytest.mark.parametrize("name", MODELS)
def test_in_bfloat16_statistics_losses_parameters_moments_and_gradients_are_float32(name):
    equations, types = traced(name, HALF)
    found = types_in(equations)
    narrow = {kind for kind, dtype in found if dtype == HALF}
    assert narrow & STATISTICS == set() and "dot_general" in narrow
    assert {"exp", "log", "rsqrt", "square", "reduce_max"} <= {
        kind for kind, dtype in found if dtype == WHOLE}
    assert {dtype for dtype in types if jnp.issubdtype(dtype, jnp.floating)} == {WHOLE}


@pytest.mark.parametrize("name", MODELS)
def test_in_float32_nothing_is_of_another_floating_type(name):
    equations, _ = traced(name, WHOLE)
    found = {dtype for _, dtype in types_in(equations) if jnp.issubdtype(dtype, jnp.floating)}
    assert found == {WHOLE}


# Values that bfloat16 cannot hold -----------------------------------------------------------------

CROSS_ENTROPIES = {"chunked": chunked_cross_entropy, "one pass": one_pass_cross_entropy}
V, VOCABULARY = 128, 100


@on_one_device
@pytest.mark.parametrize("name", CROSS_ENTROPIES)
def test_logits_of_a_loss_are_not_rounded(name):
    """257 at the label and 256 elsewhere, which bfloat16 takes for the same number."""
    hidden, w = jnp.ones((1, 2, 257), HALF), np.ones((257, V))
    w[0] = np.arange(V) == 7
    loss, accuracy = jax.jit(functools.partial(
        CROSS_ENTROPIES[name], vocabulary=VOCABULARY, sharding=Sharding.none()))(
            hidden, jnp.asarray(w, HALF), jnp.zeros(V, HALF), np.full((1, 2), 7, np.int32))
    assert loss.dtype == accuracy.dtype == WHOLE and accuracy == 1
    assert loss == pytest.approx(np.log1p((VOCABULARY - 1) * np.exp(-1)), abs=5e-5)


@on_one_device
@pytest.mark.parametrize("name", CROSS_ENTROPIES)
def test_gradients_of_chunks_are_not_rounded_before_they_are_summed(name):
    """600 equal terms, whose sum in bfloat16 would stand still at 256 of them."""
    n, D = 600, 4

    def loss(w, b):
        return CROSS_ENTROPIES[name](
            jnp.ones((1, n, D), HALF), w, b, np.zeros((1, n), np.int32), vocabulary=VOCABULARY,
            sharding=Sharding.none(), chunk=1)[0]

    dw, db = jax.jit(jax.grad(loss, (0, 1)))(jnp.zeros((D, V), HALF), jnp.zeros(V, HALF))
    expected = 1 / VOCABULARY - (np.arange(V) == 0)
    expected[VOCABULARY:] = 0
    for found in (*np.float32(dw), np.float32(db)):
        np.testing.assert_allclose(found, expected, rtol=2**-7)


@on_one_device
@pytest.mark.parametrize("kind", [Norm, EarlierNorm, RMSNorm])
def test_norms_find_a_spread_that_bfloat16_cannot_see(kind):
    """Numbers of 1 ± 1/128: in bfloat16 the mean of their squares is that of ones."""
    x = jnp.asarray(1 + (-1.0) ** np.arange(32) / 128, HALF)
    if kind is RMSNorm:  # a mean that is rounded rounds some of so many numbers the other way
        x = jnp.asarray(np.random.default_rng(0).normal(size=512), HALF)
    sizes = dataclasses.replace(SMALL, embed=len(x), heads=1)
    make = lambda letters, shape, f: nnx.Param(f(jax.random.key(0), shape, WHOLE))
    norm = kind(sizes, Sharding.none(), make) if kind is RMSNorm else kind(
        sizes, Sharding.none(), rngs=nnx.Rngs(0))
    found, wide = jax.jit(lambda x: norm(x))(x), np.float64(x)
    mean = 0 if kind is RMSNorm else wide.mean()
    expected = (wide - mean) / np.sqrt(((wide - mean) ** 2).mean() + 1e-6)
    assert found.dtype == HALF
    np.testing.assert_array_equal(found, jnp.asarray(expected, HALF))


@on_one_device
def test_routers_tell_scores_apart_that_are_one_number_in_bfloat16():
    config = dataclasses.replace(MODELS["dropless"][1], dtype=HALF)
    model = Decoder(config, Sharding.none(), rngs=nnx.Rngs(0))
    experts = jax.tree.map(lambda x: x[0], nnx.state(model.layers[0].experts))
    experts = nnx.merge(nnx.split(model.layers[0].experts)[0], experts)
    w_DC = np.ones((32, 4), np.float32)
    w_DC[:, 3] += 2.0**-12
    w_DC[:, 1] += 2.0**-13
    experts.w_router_DC[...] = jnp.asarray(w_DC)
    found = experts.route(jnp.full((1, 1, 32), 2.0**-5, HALF))
    assert found.experts_BTA.ravel().tolist() == [3, 1]
    assert {x.dtype for x in (found.gates_BTA, found.shares_BTE)} == {WHOLE}
