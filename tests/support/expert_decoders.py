"""Small decoders with experts: their sizes, their rules, batches, and compiled steps on a mesh."""
import dataclasses
import functools

import jax
import numpy as np
import optax
from flax import nnx

from meshbook.models.balanced_loss import balanced, balanced_loss
from meshbook.models.decoder import Decoder, DecoderConfig
from meshbook.models.expert_layers import ExpertSizes
from meshbook.sharding import Sharding, make_mesh
from meshbook.training import compile_step, create_state

E, A = 8, 2
SIZES = ExpertSizes(E, A, shared=32, capacity=1.25, auxiliary=0.1, block=8)
SMALL = DecoderConfig(vocabulary=250, tokens=16, embed=32, hidden=48, heads=4, layers=2,
                      experts=SIZES)
CONFIGS = {
    "capacity": SMALL,
    "dropless": dataclasses.replace(
        SMALL, dropout=0.1, experts=dataclasses.replace(SIZES, capacity=0.0, shared=0)),
    "biased": dataclasses.replace(SMALL, period=2, gated=False, bias=True,
                                  experts=dataclasses.replace(SIZES, biased=True,
                                                              router="sigmoid")),
}
AXES, ROWS = ("batch", "expert", "model"), ("batch", "expert")
RULES = Sharding.tensor_parallel().also(E="expert", B=ROWS)
RANDOM = np.random.default_rng(0)
TOKENS = RANDOM.integers(0, 250, (3, 16, 17)).astype(np.int32)
BATCHES = [{"inputs": rows[:, :-1], "labels": rows[:, 1:]} for rows in TOKENS]
KEY = jax.random.key(0)


def make(name, shape=None, optimizer=optax.sgd(0.1, momentum=0.0)):
    """A state of the model of this name, on a mesh of this shape or on one device."""
    rules = RULES if shape else Sharding.none()
    return create_state(lambda: Decoder(CONFIGS[name], rules, rngs=nnx.Rngs(0)),
                        balanced(optimizer, 0.01), make_mesh(shape or (1, 1, 1), AXES),
                        loss=balanced_loss, rows=ROWS)


@functools.cache
def step(name, shape=None):
    """(state, compiled step) of it, kept for the next test."""
    state = make(name, shape)
    return state, compile_step(state, state.program.place(BATCHES[0]), KEY)


def logits(state, tokens_BT):
    """Logits (B, T, V) of the tokens that exist, as NumPy has them."""
    with jax.set_mesh(state.program.mesh):
        found = jax.jit(state.program.apply)(
            state.params, state.program.place({"inputs": tokens_BT})["inputs"])
    return np.asarray(found)[..., :250]
