"""A decoder in stages: turns, permutes and bytes by formula are those of schedules and programs."""
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
from meshbook.drawing.schedules import facts
from meshbook.models.decoder import Decoder, DecoderConfig
from meshbook.models.pipelined import pipelined
from meshbook.parallel import pipeline, schedules
from meshbook.parallel.slots import in_slots
from meshbook.planning.decoder_memory import decoder_temporaries
from meshbook.planning.pipeline_costs import (
    SCHEDULES, pipeline_step_memory, pipeline_step_traffic, stage_parameters, turns_of
)
from meshbook.sharding import Sharding, make_mesh
from meshbook.training import abstract_state, compile_step

CONFIG = DecoderConfig(vocabulary=500, tokens=32, embed=32, hidden=64, heads=8, layers=4)


def split_one_f_one_b(stages, microbatches):
    return schedules.split_backward(schedules.one_f_one_b(stages, microbatches))


TABLES = {"one_f_one_b": split_one_f_one_b, "zero_bubble": schedules.zero_bubble}
PROGRAMS = {"gpipe": pipeline.gpipe, "lockstep": pipeline.one_f_one_b} | {
    name: in_slots(make) for name, make in TABLES.items()}


@functools.cache
def step(schedule, shape, microbatches, **changes):
    """(config, state, mesh, compiled step), of one row for each microbatch on each device."""
    config, mesh = dataclasses.replace(CONFIG, **changes), make_mesh(shape, ("batch", "stage"))
    rules, loss = Sharding.data_parallel().in_stages(), pipelined(PROGRAMS[schedule], microbatches)
    state = abstract_state(lambda: Decoder(config, rules, rngs=nnx.Rngs(0)), optax.sgd(0.1), mesh,
                           loss=loss)
    tokens = jax.ShapeDtypeStruct((microbatches * shape[0], config.tokens), np.int32,
                                  sharding=NamedSharding(mesh, P("batch")))
    key = jax.eval_shape(lambda: jax.random.key(0))
    return config, state, mesh, compile_step(state, {"inputs": tokens, "labels": tokens}, key)


@pytest.mark.parametrize("schedule, shape, m, changes", [
    ("gpipe", (2, 4), 4, {"bias": True}), ("lockstep", (4, 2), 2, {"groups": 4}),
    ("one_f_one_b", (1, 4), 6, {}), ("zero_bubble", (2, 4), 6, {"layers": 8, "gated": False})])
def test_bytes_are_those_of_the_program_and_memory_is_at_most(schedule, shape, m, changes):
    config, state, mesh, program = step(schedule, shape, m, **changes)
    held = [math.prod(leaf.sharding.shard_shape(leaf.shape))
            for leaf in jax.tree.leaves(state.params)]
    assert sum(held) == stage_parameters(config, shape[1])
    expected = pipeline_step_traffic(config, dict(mesh.shape), m * shape[0], schedule, m)
    found = proofs.collectives(program, mesh)
    if schedule != "gpipe":  # a branch that is not taken in every turn is read as if it were
        turns, axes = turns_of(schedule, shape[1], m).permutes // 2, ("all-reduce", ("stage",))
        size = config.tokens * (4 * 4 * config.embed + 3 * 4)
        more = expected[axes].bytes + (turns - m) * size
        expected[axes] = expected[axes]._replace(bytes=more)
    proofs.assert_communicates(program, mesh, expected)
    assert found["collective-permute", ("stage",)].count == turns_of(schedule, shape[1], m).permutes
    memory = pipeline_step_memory(config, m, shape[1], schedule, m, tpu=False)
    assert decoder_temporaries(memory) < program.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("p", range(1, 7))
@pytest.mark.parametrize("m", (1, 2, 5, 8, 16))
def test_slots_bubble_and_kept_are_those_of_the_simulated_schedule(p, m):
    for name, make in TABLES.items():
        found = schedules.simulate(make(p, m))
        turns = turns_of(name, p, m)
        assert turns.permutes == 2 * found.makespan
        assert turns.bubble == pytest.approx(found.bubble)
        assert turns.kept == max(found.live) and turns.factor == 1
    gpipe = schedules.simulate(schedules.gpipe(p, m))
    assert turns_of("gpipe", p, m).bubble == pytest.approx(gpipe.bubble)
    assert turns_of("gpipe", p, m).factor == pytest.approx((m + p - 1) / m)
    lockstep = facts(pipeline.lockstep_events(p, m))
    assert turns_of("lockstep", p, m).bubble == pytest.approx(lockstep.bubble)


def test_memory_falls_with_the_stages_and_grows_with_what_is_kept():
    held = {name: pipeline_step_memory(CONFIG, 16, 4, name, 16) for name in SCHEDULES}
    activations = [held[name]["activations"] for name in SCHEDULES]
    assert activations[0] / activations[2] == pytest.approx(19 / 4) and (
        activations[2] == activations[3] and activations[1] < activations[2])
    assert all(each["parameters"] == 4 * stage_parameters(CONFIG, 4) for each in held.values())
    one = stage_parameters(CONFIG, 1)
    assert one / 4 < stage_parameters(CONFIG, 4) < one / 4 + CONFIG.embed


@pytest.mark.parametrize("rows, p, m, words", [
    (8, 3, 4, "periods of layers=4 does not divide over 3 stages"),
    (8, 4, 3, "batch=8 does not divide over 6 devices times microbatches")])
def test_what_does_not_divide_is_refused(rows, p, m, words):
    with pytest.raises(ValueError, match=words):
        pipeline_step_traffic(CONFIG, {"batch": 2, "stage": p}, rows, "gpipe", m)
    with pytest.raises(ValueError, match="expected remat='none', found 'all'"):
        pipeline_step_traffic(dataclasses.replace(CONFIG, remat="all"), {"batch": 2, "stage": 4}, 8,
                              "gpipe", 4)
    with pytest.raises(ValueError, match="one of gpipe, .*; found 'dualpipe'"):
        turns_of("dualpipe", 4, 8)
