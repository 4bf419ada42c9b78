"""A step of the decoder by formula: parameters, work and bytes are those of compiled programs."""
import dataclasses
import functools
import math

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from meshbook import proofs
from meshbook.hlo.collectives import Traffic
from meshbook.models.decoder import Decoder, DecoderConfig
from meshbook.models.decoder_config import POLICIES
from meshbook.models.losses import language_loss
from meshbook.parallel import overlap, sequence
from meshbook.planning.decoder_costs import (
    PRESETS, decoder_parameters, decoder_step_flops, decoder_step_traffic, layer_parameters, stacked_leaves
)
from meshbook.sharding import Sharding, make_mesh
from meshbook.training import abstract_state, clipped, compile_step

SMALL = DecoderConfig(vocabulary=500, tokens=16, embed=32, hidden=64, heads=8, layers=2)
CONFIGS = {
    "plain": SMALL,
    "groups": dataclasses.replace(SMALL, groups=4, bias=True, gated=False),
    "latent": dataclasses.replace(SMALL, latent=8, rotary=6, layers=4, period=2, bias=True),
    "latent, no biases": dataclasses.replace(SMALL, latent=8, rotary=10, gated=False),
    "latent, no rotary": dataclasses.replace(SMALL, latent=16),
}
RULES = PRESETS | {"in rings": functools.partial(Sharding.sequence_parallel, overlapped=True)}


@functools.cache
def step(name, preset, shape, rows=8, clip=False, optimizer=optax.sgd(0.1), compiled=True,
         **changes):
    """(config, state, batch, compiled step or None) of a decoder, all but the last as shapes."""
    config = dataclasses.replace(CONFIGS[name], **changes)
    optimizer = optax.chain(clipped(1.0), optimizer) if clip else optimizer
    rules, mesh = RULES.get(preset, Sharding.none)(), make_mesh(shape)
    state = abstract_state(lambda: Decoder(config, rules, rngs=nnx.Rngs(0)), optimizer, mesh,
                           loss=language_loss)
    tokens = jax.ShapeDtypeStruct((rows, config.tokens), np.int32,
                                  sharding=NamedSharding(mesh, jax.P("batch")))
    batch = {"inputs": tokens, "labels": tokens}
    key = jax.eval_shape(lambda: jax.random.key(0))
    return config, state, batch, compile_step(state, batch, key) if compiled else None


def numbers_held(tree):
    """How many numbers one device holds of these leaves."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("name, preset, shape, changes", [
    ("plain", "data_parallel", (8, 1), {"remat": "products", "dropout": 0.1}),
    ("plain", "tensor_parallel", (4, 2), {"clip": True}),
    ("plain", "fully_sharded", (8, 1), {"remat": "attention", "clip": True}),
    ("groups", "tensor_parallel", (2, 4), {"remat": "all"}),
    ("groups", "fully_sharded", (4, 2), {"tokens": 600}),
    ("latent", "tensor_parallel", (4, 2), {"remat": "attention"}),
    ("latent", "fully_sharded", (4, 2), {"remat": "products", "clip": True}),
    ("latent, no biases", "tensor_parallel", (1, 8), {"dtype": "bfloat16"}),
    ("latent, no biases", "fully_sharded", (2, 4), {"remat": "all", "rows": 2}),
    ("latent, no rotary", "data_parallel", (4, 1), {"rows": 12}),
    ("plain", "zero1", (8, 1), {}),
    ("groups", "zero1", (4, 2), {"clip": True}),
    ("groups", "zero2", (4, 2), {"remat": "all"}),
    ("latent", "fully_sharded_kept", (4, 2), {}),
    ("plain", "fully_sharded_again", (2, 4), {}),
    ("groups", "fully_sharded_again", (4, 2), {"remat": "products", "clip": True}),
    ("groups", "sequence_parallel", (2, 4), {"remat": "products", "clip": True}),
    ("plain", "sequence_parallel", (1, 4), {}),
    ("latent", "sequence_parallel", (4, 2), {"remat": "attention"}),
    ("latent, no biases", "sequence_parallel", (1, 8), {"remat": "all"}),
])
def test_parameters_work_and_bytes_are_those_of_the_program(name, preset, shape, changes):
    config, state, _, program = step(name, preset, shape, **changes)
    rows, ways = shape
    sharded = preset.startswith("fully_sharded")
    assert numbers_held(state.params) == decoder_parameters(config, ways, rows if sharded else 1)
    batch = changes.get("rows", 8)
    done = decoder_step_flops(config, batch, ways, preset)
    proofs.assert_divided(program, rows * ways, *done, rtol=1e-9)
    traffic = decoder_step_traffic(config, state.program.mesh, batch, preset,
                                   clipped=changes.get("clip", False))
    proofs.assert_communicates(program, state.program.mesh, traffic)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("ways, rings", [
    (2, "one way"), (3, "none"), (3, "one way"), (3, "both ways"), (4, "both ways"),
    (5, "one way"), (5, "both ways")])
def test_whatever_is_kept_rings_do_no_more_work_and_send_no_more(policy, ways, rings, monkeypatch):
    for function in (overlap.all_gather_matmul, overlap.matmul_reduce_scatter):
        monkeypatch.setattr(sequence, function.__name__, functools.partial(
            function, bidirectional=rings == "both ways"))
    sizes = dict(vocabulary=128 * ways, tokens=4 * ways, embed=16 * ways, hidden=32 * ways,
                 heads=2 * ways, remat=policy)
    batch, shape = 2, (1 if ways == 5 else 2, ways)
    config, state, _, program = step.__wrapped__(
        "plain", "sequence_parallel" if rings == "none" else "in rings", shape, batch, **sizes)
    done = decoder_step_flops(config, batch, ways, "sequence_parallel")
    proofs.assert_divided(program, math.prod(shape), *done, rtol=1e-9)
    expected = Traffic(decoder_step_traffic(
        config, state.program.mesh, batch, "sequence_parallel"), state.program.mesh.shape)
    found = proofs.collectives(program, state.program.mesh)
    assert found.wire("model") == pytest.approx(expected.wire("model"), rel=1e-9)
    assert (("collective-permute", ("model",)) in found) == (rings != "none")


def test_under_tensor_parallelism_latents_are_made_by_every_device():
    whole = decoder_step_flops(CONFIGS["latent"], 8)
    each = decoder_step_flops(CONFIGS["latent"], 8, ways=4)
    assert whole[0] == each[0]
    D, R, P, layers, turned = 32, 8, 6, 4, 2  # two of four layers have no positions
    again = 3 * 3 * 8 * 16 * (layers * 2 * D * 2 * R + turned * 2 * 2 * R * P)
    assert each[0] * (each[1] - whole[1]) == pytest.approx(again)
    assert decoder_step_flops(SMALL, 8) == decoder_step_flops(SMALL, 8, ways=4)


def test_a_stricter_policy_does_more_work():
    factors = [decoder_step_flops(dataclasses.replace(CONFIGS["latent"], remat=policy), 8)[1]
               for policy in ("none", "products", "attention", "all")]
    assert set(POLICIES) == {"none", "products", "attention", "all"}
    assert factors == sorted(factors) and 1 < factors[0] < factors[1]
    assert factors[-1] < 4 / 3 * factors[0]


def test_data_parallel_devices_along_model_repeat_everything():
    assert decoder_step_flops(SMALL, 8, 4, "data_parallel")[1] == pytest.approx(
        4 * decoder_step_flops(SMALL, 8)[1])


def test_axes_have_the_names_of_the_mesh():
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "tensor"))
    found = decoder_step_traffic(SMALL, mesh, 8, "fully_sharded", axes=("data", "tensor"))
    assert found.keys() == {("all-reduce", ("data",)), ("all-reduce", ("tensor",)),
                            ("all-gather", ("data",))}


def test_in_bfloat16_half_travels_but_for_norms_and_the_loss():
    mesh = make_mesh((4, 2))
    for name in CONFIGS:
        config = dataclasses.replace(CONFIGS[name], remat="all")
        whole, half = (decoder_step_traffic(config, mesh, 8, "fully_sharded", number=number)
                       for number in (4, 2))
        norms = 4 * (2 * config.layers + 1) * (1 + config.bias) * config.embed
        again = norms + 4 * 2 * config.layers * (1 + config.bias) * config.embed
        rest = {("all-reduce", ("batch",)): norms + 8, ("all-gather", ("batch",)): again,
                ("all-reduce", ("model",)): 3 * 4 * 2 * 16}
        for key in whole:
            assert half[key].bytes - rest[key] == (whole[key].bytes - rest[key]) / 2, key


def test_there_are_as_many_leaves_as_the_model_has():
    for name in "plain", "groups", "latent":
        with jax.set_mesh(make_mesh((1, 1))):
            model = nnx.eval_shape(lambda: Decoder(CONFIGS[name], Sharding.none(),
                                                   rngs=nnx.Rngs(0)))
        assert len(jax.tree.leaves(nnx.state(model))) == len(stacked_leaves(CONFIGS[name]))


def test_jaxformer_without_its_experts():
    config = DecoderConfig.jaxformer()
    one = layer_parameters(config) - layer_parameters(config, has_positions=False)
    assert one == 2 * 128 * 128 + 128 + 2 * 128 * 12 * 128 + 12 * 128  # what turns with positions
    D, F, E = config.embed, config.hidden, 16
    padding = (config.padded - config.vocabulary) * D
    mlp = 2 * D * F + F + D
    experts = E * mlp + D * E + E + D * 2 * D + 2 * D  # with a router, and two shared experts
    assert decoder_parameters(config) - padding + 8 * (experts - mlp) == 949_248_384
