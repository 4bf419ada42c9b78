"""Every gradient of a decoder, against a backward pass in NumPy alone and finite differences."""
import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from decoder_by_hand import loss_and_gradients
from flax import nnx
from moved import moved

from meshbook.models.decoder import Decoder, DecoderConfig
from meshbook.models.losses import language_loss
from meshbook.sharding import Sharding, make_mesh
from meshbook.training import create_state

V, B, T = 50, 8, 12
SMALL = DecoderConfig(vocabulary=V, tokens=T, embed=24, hidden=40, heads=4, layers=2, gated=False)
CONFIGS = {
    "plain": dataclasses.replace(SMALL, embed=16),
    "plain, gated": dataclasses.replace(SMALL, embed=16, gated=True),
    "groups": dataclasses.replace(SMALL, embed=16, groups=2, bias=True, layers=4, period=2),
    "one group, gated": dataclasses.replace(SMALL, embed=16, groups=1, bias=True, gated=True),
    "latent": dataclasses.replace(SMALL, latent=8, rotary=4, layers=4, period=2, bias=True),
    "latent, gated, no biases": dataclasses.replace(SMALL, latent=6, rotary=8, gated=True),
    "latent without positions": dataclasses.replace(SMALL, latent=8, bias=True),
}
RANDOM = np.random.default_rng(0)
PLAIN = {name: RANDOM.integers(0, V, (B, T)).astype(np.int32) for name in ("inputs", "labels")}
START = RANDOM.integers(2, T - 1, (B, 1))  # where the second document of a row begins
AT = np.arange(T) + np.zeros((B, 1), np.int32)
DOCUMENTS = PLAIN | {
    "segments": (AT >= START).astype(np.int32),
    "positions": np.where(AT >= START, AT - START, AT).astype(np.int32),
    "weight": (RANDOM.random((B, T)) < 0.7).astype(np.float32)}


@functools.cache
def state(name, preset="none", shape=(1, 1), **changes):
    """Parameters none of which is 0 or 1, so that each of them counts; some scores are sharp."""
    config, rules = dataclasses.replace(CONFIGS[name], **changes), getattr(Sharding, preset)()
    made = create_state(lambda: Decoder(config, rules, rngs=nnx.Rngs(0)), optax.sgd(0.1),
                        make_mesh(shape))
    return dataclasses.replace(made, params=moved(made.params, 0.2))


def found(state, batch):
    """The model's loss and gradients."""
    run = jax.jit(jax.value_and_grad(lambda params, batch: language_loss(
        params, state.program, batch)[0]))
    with jax.set_mesh(state.program.mesh):
        return jax.device_get(run(state.params, state.program.place(batch)))


@functools.cache
def expected(name, documents):
    return loss_and_gradients(jax.device_get(state(name).params),
                              DOCUMENTS if documents else PLAIN, V)


def leaves(tree, path=()):
    """(path, array) of nested dicts."""
    for name, each in sorted(tree.items()):
        if isinstance(each, dict):
            yield from leaves(each, (*path, name))
        else:
            yield "/".join((*path, name)), each


def assert_every_leaf_close(one, other, rtol):
    for (path, x), (same, y) in zip(leaves(one), leaves(other), strict=True):
        assert path == same and x.shape == y.shape
        assert np.linalg.norm(x - y) <= rtol * np.linalg.norm(y), path


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("documents", [False, True])
def test_the_backward_pass_by_hand_is_that_of_finite_differences(name, documents):
    """Of each leaf, along a random direction."""
    batch = DOCUMENTS if documents else PLAIN
    params = jax.tree.map(np.float64, jax.device_get(state(name).params))
    gradients = dict(leaves(expected(name, documents)[1]))
    random, step = np.random.default_rng(2), 1e-5
    for path, x in leaves(params):
        x += step * (direction := random.normal(size=x.shape))
        above = loss_and_gradients(params, batch, V)[0]
        x -= 2 * step * direction
        below = loss_and_gradients(params, batch, V)[0]
        x += step * direction
        slope = (gradients[path] * direction).sum()
        size = np.linalg.norm(gradients[path])
        assert (above - below) / (2 * step) == pytest.approx(slope, abs=1e-6 * size + 1e-9), path


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("documents", [False, True])
def test_loss_and_every_gradient_are_those_by_hand(name, documents):
    loss, gradients = expected(name, documents)
    mine = found(state(name), DOCUMENTS if documents else PLAIN)
    np.testing.assert_allclose(mine[0], loss, rtol=1e-6)
    assert_every_leaf_close(mine[1], gradients, 1e-5)
    assert np.abs(mine[1]["token_VD"][V:]).max() == 0  # no token


@pytest.mark.parametrize("name, preset, shape, remat", [
    ("plain, gated", "data_parallel", (8, 1), "products"),
    ("groups", "fully_sharded", (4, 2), "none"), ("latent", "tensor_parallel", (2, 2), "all"),
    ("latent, gated, no biases", "fully_sharded", (2, 4), "attention")])
def test_and_on_a_mesh(name, preset, shape, remat):
    loss, gradients = expected(name, True)
    mine = found(state(name, preset, shape, remat=remat), DOCUMENTS)
    np.testing.assert_allclose(mine[0], loss, rtol=1e-6)
    assert_every_leaf_close(mine[1], gradients, 1e-5)


def test_a_leaf_that_is_a_little_wrong_is_seen():
    gradients = expected("latent", False)[1]
    wrong = jax.tree.map(np.copy, gradients)
    wrong["norm"]["scale_D"][3] *= 1 + 1e-3
    with pytest.raises(AssertionError, match="norm/scale_D"):
        assert_every_leaf_close(wrong, gradients, 1e-5)
