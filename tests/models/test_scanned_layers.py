"""The decoder's program does not grow with its layers, and scanning them changes no result."""
import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from meshbook.models.decoder import Decoder, DecoderConfig
from meshbook.models.losses import language_loss
from meshbook.sharding import Sharding, make_mesh
from meshbook.training import abstract_state, create_state

CONFIG = functools.partial(DecoderConfig, vocabulary=250, tokens=16, embed=32, hidden=64, heads=4)
KINDS = {"plain": {}, "kept by name": {"remat": "attention"},
         "periods": dict(latent=8, rotary=8, period=2, dropout=0.25)}
ROWS = np.random.default_rng(0).integers(0, 250, (4, 17)).astype(np.int32)
BATCH, KEY = {"inputs": ROWS[:, :-1], "labels": ROWS[:, 1:]}, jax.random.key(1)


class Unrolled(Decoder):
    """The same parameters; its layers are a Python loop."""

    def each_period(self, turn, x_BTD, *parts):
        graph, stacked = nnx.split(self.layers)
        for number in range(self.config.layers // self.config.period):
            layers, *own = jax.tree.map(lambda x: x[number], (stacked, *parts))
            x_BTD, _ = turn(x_BTD, nnx.merge(graph, layers), *own)
        return x_BTD, None


def begun(make, model, layers, **changes):
    """A state of a model, or its shapes, as `make` makes it."""
    config = CONFIG(layers=layers, **changes)
    return make(lambda: model(config, Sharding.none(), rngs=nnx.Rngs(0)), optax.identity(),
                make_mesh((1, 1)))


def lowered(model, layers, **changes):
    """Loss and gradients of a model, lowered."""
    return lowered_of(begun(abstract_state, model, layers, **changes))


def lowered_of(state):
    """Loss and gradients of a state's model, lowered."""
    run = jax.jit(jax.value_and_grad(lambda params, batch, key: language_loss(
        params, state.program, batch, key)[0]))
    with jax.set_mesh(state.program.mesh):
        return run.lower(state.params, BATCH, KEY)


@pytest.mark.parametrize("kind", KINDS)
def test_the_lines_of_a_program_do_not_grow_with_its_layers(kind):
    lines = {layers: lowered(Decoder, layers, **KINDS[kind]).as_text().count("\n")
             for layers in (4, 6)}
    assert lines[4] == lines[6]
    loop = [lowered(Unrolled, layers, **KINDS[kind]).as_text().count("\n") for layers in (4, 6)]
    assert lines[4] < loop[0] < loop[1] and loop[1] - loop[0] > 2 * 100


@pytest.mark.parametrize("kind", ["plain", "periods"])
def test_a_loop_in_python_gives_the_same(kind):
    found = []
    for model in Decoder, Unrolled:
        state = begun(create_state, model, 4, **KINDS[kind])
        with jax.set_mesh(state.program.mesh):
            found.append(jax.device_get(lowered_of(state).compile()(state.params, BATCH, KEY)))
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
