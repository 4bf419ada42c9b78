"""A decoder whose tokens are split: bytes and temporaries by formula are those of programs."""
import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

from meshbook import proofs
from meshbook.models.decoder import Decoder, DecoderConfig
from meshbook.models.losses import language_loss
from meshbook.parallel import context
from meshbook.planning.context_costs import (
    BLOCK, METHODS, context_step_memory, context_step_traffic, layer_exchanges
)
from meshbook.planning.decoder_memory import decoder_temporaries
from meshbook.sharding import Sharding, make_mesh
from meshbook.training import abstract_state, compile_step

CONFIG = DecoderConfig(vocabulary=500, tokens=256, embed=64, hidden=128, heads=8, layers=2)


@functools.cache
def step(method, shape, rows=4, **changes):
    """(config, mesh, compiled step)."""
    config, mesh = dataclasses.replace(CONFIG, **changes), make_mesh(shape, ("batch", "context"))
    rules = Sharding.context_parallel(context.Context(method))
    state = abstract_state(lambda: Decoder(config, rules, rngs=nnx.Rngs(0)), optax.sgd(0.1), mesh,
                           loss=language_loss)
    tokens = jax.ShapeDtypeStruct((rows, config.tokens), np.int32,
                                  sharding=NamedSharding(mesh, P("batch", "context")))
    key = jax.eval_shape(lambda: jax.random.key(0))
    return config, mesh, compile_step(state, {"inputs": tokens, "labels": tokens}, key)


@pytest.mark.parametrize("method, shape, changes", [
    ("ring", (2, 4), {"remat": "attention", "groups": 4, "tokens": 4096}),
    ("ring", (1, 4), {"remat": "all", "bias": True, "tokens": 4096}),
    ("gather", (2, 4), {"remat": "products", "groups": 4, "gated": False}),
    ("ulysses", (4, 2), {})])
def test_bytes_and_temporaries_are_those_of_the_program(method, shape, changes):
    config, mesh, program = step(method, shape, **changes)
    proofs.assert_communicates(program, mesh, context_step_traffic(
        config, dict(mesh.shape), 4, method))
    held = context_step_memory(config, 4 // shape[0], shape[1], method, tpu=False)
    found = program.memory_analysis().temp_size_in_bytes
    assert decoder_temporaries(held) == pytest.approx(found, rel=0.2)


def test_a_ring_and_gathered_keys_send_the_same_and_results_are_by_hand():
    config = dataclasses.replace(CONFIG, groups=2)
    u, n = 4 * 3 * 64 * 2 * 8, 4
    ring, gather = (layer_exchanges(config, 3, n, method) for method in ("ring", "gather"))
    assert ring == {"collective-permute": (18, 6 * (n - 1) * u)}
    assert gather == {"all-gather": (4, 4 * n * u), "reduce-scatter": (2, 2 * u)}
    wire = gather["all-gather"].bytes * (n - 1) / n + gather["reduce-scatter"].bytes * (n - 1)
    assert wire == ring["collective-permute"].bytes
    config = dataclasses.replace(config, groups=0)
    assert layer_exchanges(config, 3, n, "ulysses") == {"all-to-all": (8, 8 * 4 * u)}
    assert BLOCK == context.BLOCK and set(METHODS) == context.METHODS.keys()


def test_activations_fall_with_the_devices_and_not_the_parameters():
    one, four = (context_step_memory(CONFIG, 1, ways, tpu=False) for ways in (1, 4))
    assert one["parameters"] == four["parameters"] and one["moments"] == four["moments"]
    assert one["activations"] == 4 * four["activations"]


@pytest.mark.parametrize("changes, ways, method, words", [
    ({}, 3, "ring", "tokens=256 does not divide over 3 devices of the context"),
    ({"groups": 2}, 4, "ulysses", "groups=2 does not divide over 4 devices"),
    ({"latent": 16}, 4, "ring", "for keys and values of heads; found latent=16"),
    ({}, 4, "star", "one of ring, gather, ulysses; found 'star'")])
def test_what_cannot_be_is_refused(changes, ways, method, words):
    config = dataclasses.replace(CONFIG, **changes)
    for asked in (lambda: context_step_memory(config, 1, ways, method),
                  lambda: context_step_traffic(config, {"batch": 2, "context": ways}, 4, method)):
        with pytest.raises(ValueError, match=words):
            asked()
