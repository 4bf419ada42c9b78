"""What is said of a run on TPUs before it begins, and, where libtpu is, its step compiled."""
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from meshbook.models.decoder import Decoder, DecoderConfig
from meshbook.models.pipelined import pipelined
from meshbook.parallel.pipeline import one_f_one_b
from meshbook.planning import dry_runs, topologies
from meshbook.planning.dry_runs import compile_run, said_of
from meshbook.sharding import Sharding, make_mesh
from meshbook.training import train_step

RECORD = topologies.recorded()
compiler = pytest.mark.skipif(not topologies.installed(), reason="libtpu is not installed")


def test_memory_wire_work_and_time_are_those_of_the_program():
    made, useful = RECORD["v2-8 (4, 2) 128"], 4e11
    assert said_of(made, 7_000, 1_000_000, (128,), useful).splitlines() == [
        "7,000 parameters on {'batch': 4, 'model': 2} of v2-8, compiled in 43 s",
        "memory     0.2 of 8 GiB on each device, 0.1 of them the state and the batch",
        # a ring of n sends 2 (n - 1) / n of an all-reduce's bytes
        f"wire       {21_514_800 * 3 / 2 / 1e6:.1f} MB per device and step along batch",
        f"wire       {76_677_120 / 1e6:.1f} MB per device and step along model",
        f"work       68.3 GFLOP per device and step, {8 * 68_269_768_704 / useful:.2f} of the useful "
        "work",
        # of 23 TFLOP/s that a core of a TPU v2 does
        "time       11 ms a step by the compiler's clock, 1 of them waiting for links; "
        f"{useful / 8 / 10.962e-3 / 23e12:.0%} MFU",
        f"the run    1,000,000 steps, 128,000,000 images, {1e6 * 10.962e-3 / 3_600:.1f} hours"]
    long = said_of(made, 7, 10**8, (128,), useful)
    assert long.endswith(f"images, {1e8 * 10.962e-3 / 86_400:.1f} days")
    assert "1,000 steps, 2,048,000 tokens" in said_of(made, 7, 1_000, (128, 16), useful)


def test_a_program_without_a_clock_has_no_time():
    said = said_of(replace(RECORD["v2-8 (4, 2) 128"], clock=None), 7, 10, (128,), 1e9)
    assert said.endswith("time       the compiler's clock has none for this program")


def test_what_does_not_fit_says_by_how_much():
    said = said_of(RECORD["v2-8 none 4096"], 7, 10, (4096,), 1e9).splitlines()
    assert said[0] == "7 parameters on one device of v2-8, compiled in 6 s"
    assert said[1:] == ["does not fit: a device would need 20.8 GiB, and has 7.5"]


@compiler
def test_a_mesh_axis_may_have_a_part_of_one_of_the_torus():
    mesh = topologies.tpu_mesh("v4:2x4x4", (8, 2, 2), ("batch", "stage", "model"))
    assert mesh.devices.shape == (8, 2, 2) and len({*mesh.devices.flat}) == 32


@compiler
def test_a_run_in_stages_is_compiled_before_it_begins():
    config = DecoderConfig(250, tokens=128, embed=128, hidden=256, heads=4, layers=2)
    rules = Sharding.fully_sharded().in_stages()
    axes = {"batch": 2, "stage": 2, "model": 2}
    batch = dict.fromkeys(("inputs", "labels"), ((8, 128), jnp.int32))
    made, parameters = compile_run(
        "v5e-8", axes, batch, optimizer=optax.adam(1e-3), loss=pipelined(one_f_one_b, 2),
        make_model=lambda: Decoder(config, rules, rngs=nnx.Rngs(0)), prepare=lambda x, key: x)
    assert made.fits and made.mesh == axes and made.clock["step"] > 0
    assert parameters == 256 * 128 + 2 * (4 * 128**2 + 3 * 128 * 256 + 2 * 128) + 128
    assert made.traffic.along("stage").count  # activations and gradients go on to neighbours
    assert "along stage" in said_of(made, parameters, 10, (8, 128), 1e9)


def test_a_run_is_its_state_and_its_batch_over_the_axes_of_rows(monkeypatch):
    """Everything but the compiler, on eight simulated devices."""
    config = DecoderConfig(vocabulary=250, tokens=24, embed=16, hidden=32, heads=4, layers=2)
    monkeypatch.setattr(dry_runs, "tpu_mesh", lambda name, shape, names: make_mesh(shape, names))
    monkeypatch.setattr(dry_runs, "compile_for", lambda name, step, *given: (name, step, given))
    rules = Sharding.fully_sharded()
    (name, step, (state, batch, key)), numbers = compile_run(
        "v5e-8", {"batch": 4, "model": 2}, {"inputs": ((16, 24), jnp.int32),
                                            "labels": ((16, 24), jnp.int32)},
        make_model=lambda: Decoder(config, rules, rngs=nnx.Rngs(0)), optimizer=optax.sgd(0.1))
    assert name == "v5e-8" and step is train_step
    for ids in batch.values():
        assert ids.sharding.shard_shape(ids.shape) == (4, 24) and ids.dtype == jnp.int32
    # the table of tokens, padded to whole tiles; four matrices of D × D, three of D × F; scales
    assert numbers == 256 * 16 + 2 * (4 * 16**2 + 3 * 16 * 32 + 2 * 16) + 16
