"""The decoder with experts against the reference, in which every expert computes every token."""
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from moved import moved

from meshbook.models.balanced_loss import loads_of
from meshbook.models.decoder import Decoder, DecoderConfig
from meshbook.models.expert_layers import ExpertSizes
from meshbook.models.reference_decoder import decoder_with_experts
from meshbook.sharding import Sharding, make_mesh
from meshbook.training import create_state

B, T, V = 4, 12, 50
RANDOM = np.random.default_rng(0)
TOKENS = RANDOM.integers(0, V, (B, T)).astype(np.int32)
CONFIGS = {
    "latent, sigmoid": DecoderConfig(
        V, T, 24, 40, 4, layers=4, period=2, latent=8, rotary=4, gated=False, bias=True,
        dropout=0.2, experts=ExpertSizes(4, 2, shared=16, capacity=1.0, router="sigmoid")),
    "gated, softmax": DecoderConfig(V, T, 16, 24, 2, layers=2, dropout=0.25,
                                    experts=ExpertSizes(6, 3, capacity=0.7)),
    "one expert of a token": DecoderConfig(V, T, 16, 24, 2, layers=2,
                                           experts=ExpertSizes(4, 1, capacity=1.0)),
    "a bias chooses": DecoderConfig(V, T, 16, 24, 2, layers=2, bias=True,
                                    experts=ExpertSizes(4, 2, capacity=1.2, biased=True)),
}


def made(name):
    state = create_state(lambda: Decoder(CONFIGS[name], Sharding.none(), rngs=nnx.Rngs(0)),
                         optax.sgd(0.1), make_mesh((1, 1)))
    return replace(state, params=moved(state.params, 0.2))


@pytest.mark.parametrize("key", [None, jax.random.key(3)], ids=["evaluation", "dropout"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_every_expert_on_every_token(name, key):
    state = made(name)
    with jax.set_mesh(state.program.mesh):
        run = jax.jit(lambda params, key: state.program.apply(params, TOKENS, key))
        found = np.asarray(run(state.params, key))[..., :V]
    params = jax.device_get(state.params)
    expected, _ = decoder_with_experts(params, TOKENS, CONFIGS[name].experts,
                                       CONFIGS[name].dropout, key)
    assert np.abs(found - expected[..., :V]).max() < 2e-5 * np.abs(expected[..., :V]).max()


@pytest.mark.parametrize("name", CONFIGS)
def test_loads_before_and_after_dropping_are_counted_alike(name):
    state = made(name)
    with jax.set_mesh(state.program.mesh):
        batch = state.program.place({"inputs": TOKENS, "labels": TOKENS})
        found = jax.device_get(loads_of(state, batch))
    _, each = decoder_with_experts(jax.device_get(state.params), TOKENS, CONFIGS[name].experts)
    assert found.before_E.shape[0] == len(each)
    for before_E, after_E, balance, (expected, chosen_BTE, kept_BTE) in zip(
            found.before_E, found.after_E, found.balance, each, strict=True):
        assert np.array_equal(before_E, chosen_BTE.sum((0, 1)))
        assert np.array_equal(after_E, kept_BTE.sum((0, 1)))
        assert abs(balance - expected) < 1e-5
    assert found.after_E.sum() < found.before_E.sum()  # something is dropped


def test_of_experts_with_equal_scores_the_first_are_chosen():
    state, sizes = made("gated, softmax"), CONFIGS["gated, softmax"].experts
    same = lambda path, x: x * 0 if path[-1].key == "w_router_DC" else x
    params = jax.tree_util.tree_map_with_path(same, state.params)
    _, each = decoder_with_experts(jax.device_get(params), TOKENS, sizes)
    with jax.set_mesh(state.program.mesh):
        batch = state.program.place({"inputs": TOKENS, "labels": TOKENS})
        found = jax.device_get(loads_of(replace(state, params=params), batch))
    for before_E, (_, chosen_BTE, _) in zip(found.before_E, each, strict=True):
        assert before_E.tolist() == chosen_BTE.sum((0, 1)).tolist() == [B * T] * 3 + [0] * 3
