"""A decoder with experts over an axis: bytes and temporaries by formula are those of programs."""
import dataclasses
import functools
import math

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

from meshbook import proofs
from meshbook.models.decoder import Decoder, DecoderConfig
from meshbook.models.expert_layers import ExpertSizes
from meshbook.models.losses import language_loss
from meshbook.planning.axis_estimates import estimate_experts
from meshbook.planning.decoder_memory import decoder_temporaries
from meshbook.planning.expert_steps import (
    expert_step_memory, expert_step_traffic, slots_waiting
)
from meshbook.sharding import Sharding, make_mesh
from meshbook.training import abstract_state, compile_step

CONFIG = DecoderConfig(vocabulary=500, tokens=64, embed=64, hidden=128, heads=8, layers=4, period=2,
                       experts=ExpertSizes(8, 2, capacity=1.25))
AXES = "batch", "expert"


@functools.cache
def step(shape, rows=16, **changes):
    """(config, state, mesh, compiled step)."""
    config, mesh = dataclasses.replace(CONFIG, **changes), make_mesh(shape, AXES)
    rules = Sharding.data_parallel().also(E="expert", B=AXES)
    state = abstract_state(lambda: Decoder(config, rules, rngs=nnx.Rngs(0)), optax.sgd(0.1), mesh,
                           loss=language_loss, rows=AXES)
    tokens = jax.ShapeDtypeStruct((rows, config.tokens), np.int32,
                                  sharding=NamedSharding(mesh, P(AXES)))
    key = jax.eval_shape(lambda: jax.random.key(0))
    return config, state, mesh, compile_step(state, {"inputs": tokens, "labels": tokens}, key)


@pytest.mark.parametrize("shape, changes", [
    ((2, 4), {"experts": ExpertSizes(8, 2, shared=64, capacity=1.5, auxiliary=0.01)}),
    ((1, 4), {"remat": "products", "bias": True, "gated": False})])
def test_bytes_and_temporaries_are_those_of_the_program(shape, changes):
    config, state, mesh, program = step(shape, **changes)
    proofs.assert_communicates(program, mesh, expert_step_traffic(config, dict(mesh.shape), 16))
    held = expert_step_memory(config, 16 // mesh.size, shape[1], tpu=False)
    here = [math.prod(leaf.sharding.shard_shape(leaf.shape))
            for leaf in jax.tree.leaves(state.params)]
    assert 4 * sum(here) == held["parameters"]
    found = program.memory_analysis().temp_size_in_bytes
    assert decoder_temporaries(held) == pytest.approx(found, rel=0.2)


def test_experts_keep_what_slots_have_and_not_what_an_mlp_keeps():
    slots, tokens, D, F = 2 * 8 * 20, 2 * 64, 64, 128  # 20 = 1.25 · 2 · 64 / 8
    assert slots_waiting(CONFIG, 2, tpu=False) == 4 * (slots * (2 * D + 2 * F) - 6 * tokens * F)


def test_experts_divide_parameters_and_slots_send_more_with_capacity():
    one, eight = (estimate_experts(CONFIG, {"batch": 8 // ways, "expert": ways}, 16)
                  for ways in (1, 8))
    mlp = 3 * CONFIG.embed * CONFIG.hidden
    assert one.memory["parameters"] - eight.memory["parameters"] == 4 * 2 * 7 * mlp
    assert ("all-to-all", ("expert",)) not in one.traffic
    roomy = dataclasses.replace(CONFIG, experts=ExpertSizes(8, 2, capacity=2.5))
    more = estimate_experts(roomy, {"batch": 1, "expert": 8}, 16).traffic
    assert more.wire("expert", kind="all-to-all") == 2 * eight.traffic.wire(
        "expert", kind="all-to-all")


@pytest.mark.parametrize("experts, batch, words", [
    (ExpertSizes(6, 2, capacity=1.0), 16, "experts=6 does not divide over 4 devices"),
    (ExpertSizes(8, 2, capacity=1.0), 12, "batch=12 does not divide over 8 devices"),
    (ExpertSizes(8, 2), 16, "expected a capacity above 0")])
def test_what_cannot_be_is_refused(experts, batch, words):
    config = dataclasses.replace(CONFIG, experts=experts)
    with pytest.raises(ValueError, match=words):
        estimate_experts(config, {"batch": 2, "expert": 4}, batch)
