"""The optimizers: what decays and what does not, the rate, and the norm before clipping."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tiny_gpt import weights

from meshbook.models import ViT, ViTConfig
from meshbook.models.decoder import Decoder, DecoderConfig
from meshbook.proofs.verdicts import named_leaves
from meshbook.sharding import Sharding, make_mesh
from meshbook.training import (
    clipped, decayed, found_in, language_recipe, last_gradients, nested, recipe, weights_of_moments,
)

BIASES = {"b_in_F", "b_out_D", "b_qkv_SHK", "scale_D", "bias_D"}
MATRICES = {"w_qkv_DSHK", "w_out_HKD", "w_in_DF", "w_out_FD"}


def vit():
    config = ViTConfig(embed=32, hidden=64, heads=4, layers=2, patch=8)
    return ones_of(lambda: ViT(config, Sharding.none(), rngs=nnx.Rngs(0)))


def decoder():
    """Its layers are stacked, so that even a norm's scale has two dimensions."""
    config = DecoderConfig(vocabulary=250, tokens=16, embed=32, hidden=64, heads=4, layers=2,
                           latent=8, rotary=8, bias=True)
    return ones_of(lambda: Decoder(config, Sharding.none(), rngs=nnx.Rngs(0)))


def ones_of(make):
    """A model's parameters, all of them 1."""
    with jax.set_mesh(make_mesh((1, 1))):
        shapes = nested(nnx.state(nnx.eval_shape(make), nnx.Param))
    return jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes)


MODELS = {
    "ViT": (vit, BIASES | {"b_patch_D", "class_D", "b_head_C"},
            MATRICES | {"w_patch_XD", "position_TD", "w_head_DC"}),
    "MiniGPT": (weights, BIASES | {"b_head_V"},
                MATRICES | {"token_VD", "position_TD", "w_head_DV"}),
    "Decoder": (decoder,
                {"scale_D", "shift_D", "b_latent_SR", "b_query_HK", "b_kept_SHK", "b_out_D",
                 "b_turned_P", "b_turned_query_HP", "b_in_SF"},
                {"token_VD", "w_latent_DSR", "w_query_RHK", "w_kept_RSHK", "w_out_HKD",
                 "w_turned_SRP", "w_turned_query_SRHP", "w_in_DSF", "w_out_FD"}),
}


@pytest.mark.parametrize("model", MODELS)
def test_exactly_the_matrices_decay(model):
    make, kept, pulled = MODELS[model]
    found = {True: set(), False: set()}
    for name, decays in named_leaves(decayed(make())).items():
        found[decays].add(name.split("/")[-1])
    assert found[False] == kept
    assert found[True] == pulled


@pytest.mark.parametrize("optimizer", [recipe(10, 1e-2), language_recipe(10, 1e-2)])
def test_with_zero_gradients_a_step_pulls_matrices_and_leaves_biases(optimizer):
    params = {"w_in_DF": jnp.ones((4, 4)), "b_qkv_SHK": jnp.ones((3, 2, 2)),
              "scale_D": jnp.ones(4)}
    zero, state = jax.tree.map(jnp.zeros_like, params), optimizer.init(params)
    for _ in range(2):  # the first has a rate of 0
        updates, state = optimizer.update(zero, state, params)
    assert not updates["b_qkv_SHK"].any() and not updates["scale_D"].any()
    np.testing.assert_allclose(updates["w_in_DF"], -1e-2 * 0.05, rtol=1e-6)


def test_clipping_is_that_of_optax_and_keeps_the_norm_from_before():
    draw = np.random.default_rng(0).normal
    for most, size in ((1.0, 10.0), (1.0, 1e-3), (0.5, 0.0)):
        gradients = {"a": size * draw(size=(5, 3)), "b": size * draw(size=7)}
        gradients = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), gradients)
        theirs = optax.clip_by_global_norm(most)
        right, _ = theirs.update(gradients, theirs.init(gradients))
        ours = clipped(most)
        found, state = ours.update(gradients, ours.init(gradients))
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), found, right)
        norm = np.sqrt(sum(np.sum(np.square(x)) for x in gradients.values()))
        assert state["gradient_norm"] == pytest.approx(norm, rel=1e-6)
    half = {"a": jnp.full(3, 2, jnp.bfloat16)}
    assert ours.update(half, ours.init(half))[0]["a"].dtype == jnp.bfloat16


def test_the_rate_rises_for_a_tenth_and_falls_to_nothing():
    optimizer, params = recipe(100, 1e-2), {"scale_D": jnp.ones(1)}
    state, rates = optimizer.init(params), []
    for _ in range(101):  # Adam's steps on a gradient that stays are as long as the rate
        updates, state = optimizer.update({"scale_D": jnp.ones(1)}, state, params)
        rates.append(-updates["scale_D"].item())
    assert rates[0] == 0 and rates[5] == pytest.approx(5e-3, rel=1e-3)
    assert max(rates) == rates[10] == pytest.approx(1e-2, rel=1e-3)
    assert rates[55] == pytest.approx(5e-3, rel=1e-3) and rates[100] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("optimizer, name, decay, share", [
    (optax.adam(1e-3), "mu", 0.9, 0.1), (optax.adamw(1e-3, b1=0.5), "mu", 0.5, 0.5),
    (recipe(10), "mu", 0.9, 0.1), (language_recipe(10), "mu", 0.9, 0.1),
    (optax.sgd(1.0, momentum=0.0), "trace", 0.0, 1.0),
    (optax.sgd(1.0, momentum=0.9), "trace", 0.9, 1.0),
    (optax.chain(optax.scale(4.0), optax.adam(1e-3)), "mu", 0.9, 0.1),
    (optax.chain(clipped(0.5), optax.sgd(1.0, momentum=0.9)), "trace", 0.9, 1.0),
])
def test_how_moments_are_made_is_found_by_trying(optimizer, name, decay, share):
    found = weights_of_moments(optimizer, name)
    assert found == pytest.approx((decay, share), abs=1e-6)
    gradients, norm = last_gradients({"w": jnp.full(4, 2.0)}, {"w": jnp.full(4, 3.0)}, *found)
    np.testing.assert_allclose(gradients["w"], (3 - decay * 2) / share, rtol=1e-4)
    assert norm == pytest.approx(2 * (3 - decay * 2) / share, rel=1e-4)


def test_what_an_optimizers_state_holds_is_found_at_any_depth():
    state = {"0": {"gradient_norm": 3, "inner": None}, "1": {"0": {"mu": {"w": 1}, "count": 2}}}
    assert found_in(state, "mu") == {"w": 1} and found_in(state, "gradient_norm") == 3
    assert found_in(state, "trace") is None
