"""What the decoder's step holds by formula: what a scan stacks, exactly; temporaries, bounded."""
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_decoder_costs import numbers_held, step

from meshbook.planning.decoder_costs import PRESETS, layers_of
from meshbook.planning.decoder_memory import (
    decoder_step_memory, decoder_step_peak, decoder_temporaries, waiting_bytes
)
from meshbook.training import value_and_gradients

ROWS, ADAM = 3, optax.adam(1e-3)


def scans(jaxpr):
    """The scans of a program that stand in no other."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield eqn
            continue
        for inner in jax.tree.leaves(list(eqn.params.values()),
                                     is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from scans(inner)


def stacked(config, state, batch):
    """Bytes that the forward scan over the layers stacks on each device, of ROWS rows each."""
    mesh = state.program.mesh
    with jax.set_mesh(mesh):
        program = jax.make_jaxpr(value_and_gradients)(state, batch, jax.random.key(0))
    (scan,) = [eqn for eqn in scans(program.jaxpr) if not eqn.params["reverse"]
               and eqn.params["length"] == config.layers // config.period
               and eqn.params["num_carry"] == 1]
    total = 0
    for each in (x.aval for x in scan.outvars[1:]):
        if each.ndim > 2 and each.shape[1] in (ROWS, ROWS * mesh.size):  # no weight, no key
            total += np.prod(each.sharding.shard_shape(each.shape)) * each.dtype.itemsize
    return total


@pytest.mark.parametrize("remat", ["none", "products", "attention", "all"])
@pytest.mark.parametrize("name, preset", [
    ("plain", "tensor_parallel"), ("plain", "sequence_parallel"), ("groups", "tensor_parallel"),
    ("latent", "tensor_parallel"), ("latent", "sequence_parallel")])
def test_what_waits_is_what_the_scan_stacks(name, preset, remat):
    more = {"dtype": jnp.bfloat16, "dropout": 0.1} if name == "groups" else {}
    assert_waits(name, preset, remat=remat, **more)


@pytest.mark.parametrize("name, preset", [("plain", "none"), ("latent", "tensor_parallel")])
def test_attention_row_by_row_keeps_no_scores(name, preset):
    assert_waits(name, preset, by_row=True)


def assert_waits(name, preset, **more):
    ways = 1 if preset == "none" else 2
    config, state, batch, _ = step(name, preset, (1, ways), rows=ROWS, compiled=False, **more)
    assert stacked(config, state, batch) == sum(
        count * waiting_bytes(config, ROWS, ways, has_positions, split=preset[0] == "s")
        for count, has_positions in layers_of(config))


@pytest.mark.parametrize("preset", PRESETS)
def test_what_is_held_is_what_lies_on_the_devices(preset):
    config, state, *_ = step("groups", preset, (4, 2), optimizer=ADAM, compiled=False)
    held = decoder_step_memory(config, 2, 1 if preset == "data_parallel" else 2, 4, preset)
    assert 4 * numbers_held(state.params) == held["parameters"]
    assert 4 * (numbers_held(state.opt_state) - 1) == held["moments"]  # Adam counts its steps


@pytest.mark.parametrize("name, preset, shape, changes", [
    ("plain", "none", (1, 1), {"tokens": 64, "layers": 8}),
    ("plain", "none", (1, 1), {"remat": "products", "vocabulary": 4000}),
    ("groups", "tensor_parallel", (4, 2), {"remat": "products", "tokens": 64, "layers": 8}),
    ("latent", "fully_sharded", (4, 2), {"remat": "attention", "tokens": 64}),
    ("plain", "fully_sharded", (8, 1), {"remat": "all", "tokens": 64, "layers": 8}),
    ("plain", "zero1", (8, 1), {"remat": "all", "tokens": 64, "layers": 8}),
    ("plain", "zero2", (4, 2), {"tokens": 64, "layers": 8}),
    ("plain", "fully_sharded_again", (4, 2), {"embed": 128, "hidden": 256}),
    ("plain", "fully_sharded_kept", (8, 1), {"remat": "all", "tokens": 64, "layers": 8}),
    ("groups", "sequence_parallel", (2, 4), {"tokens": 64, "layers": 8}),
])
def test_temporaries_are_within_a_fifth_of_what_a_cpu_takes(name, preset, shape, changes):
    config, *_, program = step(name, preset, shape, rows=8 * shape[0], optimizer=ADAM, **changes)
    held = decoder_step_memory(config, 8, *shape[::-1], preset, tpu=False)
    found = program.memory_analysis()
    assert decoder_temporaries(held) == pytest.approx(found.temp_size_in_bytes, rel=0.2)
    arguments = held["parameters"] + held["moments"] + held["inputs"]
    assert found.argument_size_in_bytes == pytest.approx(arguments, abs=64)  # counters, and a key
    assert decoder_step_peak(held) == arguments + decoder_temporaries(held)
