"""On a mesh of one device every preset of rules is the same program, and sends nothing."""
import jax
import numpy as np
import optax
import pytest
from flax import nnx

from meshbook import proofs
from meshbook.costs.plans import PRESETS
from meshbook.models.decoder import Decoder, DecoderConfig
from meshbook.models.losses import language_loss
from meshbook.sharding import Sharding, make_mesh
from meshbook.training import compile_step, create_state

CONFIG = DecoderConfig(vocabulary=50, tokens=6, embed=8, hidden=16, heads=2, layers=1)
IDS = np.random.default_rng(0).integers(0, 50, (3, 7)).astype(np.int32)
BATCH = {"inputs": IDS[:, :-1], "labels": IDS[:, 1:]}


def after_a_step(rules):
    """(program, parameters) of one step on one device."""
    state = create_state(lambda: Decoder(CONFIG, rules, rngs=nnx.Rngs(0)), optax.sgd(1.0),
                         make_mesh((1, 1)), loss=language_loss)
    batch = state.program.place(BATCH)
    program = compile_step(state, batch, jax.random.key(0))
    return program, jax.device_get(program(state, batch, jax.random.key(0))[0].params)


@pytest.fixture(scope="module")
def plain():
    return after_a_step(Sharding.none())[1]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_step_is_that_of_rules_that_split_nothing(plain, preset):
    program, params = after_a_step(PRESETS[preset]())
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-6),
                 params, plain)
    proofs.assert_communicates(program, make_mesh((1, 1)), {})
