"""Experts inside of the stages of a pipeline: gradients of one device, and what travels."""
import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from meshbook import proofs
from meshbook.models.balanced_loss import Balanced, balanced_loss
from meshbook.models.decoder import Decoder, DecoderConfig
from meshbook.models.expert_layers import ExpertSizes
from meshbook.models.pipelined import pipelined
from meshbook.parallel import routing, schedules
from meshbook.parallel.accumulation import in_microbatches
from meshbook.parallel.pipeline import gpipe, one_f_one_b
from meshbook.parallel.slots import in_slots
from meshbook.sharding import Sharding, make_mesh
from meshbook.training import compile_step, create_state, run

SIZES = ExpertSizes(4, 2, capacity=1.0, auxiliary=0.3)
SMALL = DecoderConfig(vocabulary=120, tokens=8, embed=16, hidden=16, heads=2, layers=4,
                      experts=SIZES)
BIASED = ExpertSizes(4, 2, shared=16, router="sigmoid", auxiliary=0.01, biased=True, block=4)
DROPPING = dataclasses.replace(BIASED, capacity=0.75, block=128)
AXES, ROWS, PARTS = ("batch", "stage", "expert", "model"), ("batch", "expert"), 4
RULES = Sharding.tensor_parallel().also(B=ROWS, E="expert").in_stages()
SCHEDULES = {
    "gpipe": gpipe, "lockstep": one_f_one_b, "ZB-H1": in_slots(schedules.zero_bubble)}
KEY = jax.random.key(0)


def batch_of(rows=16):
    ids = np.random.default_rng(0).integers(0, 120, (rows, 9)).astype(np.int32)
    return {"inputs": ids[:, :-1], "labels": ids[:, 1:]}


def state_of(config, rules, shape, loss):
    """A state that keeps what an optimizer is given: loads, where there is a bias."""
    return create_state(lambda: Decoder(config, rules, rngs=nnx.Rngs(0)),
                        Balanced(*optax.sgd(0.1, momentum=0.0)), make_mesh(shape, AXES), loss=loss,
                        rows=ROWS)


def mean_loss(*given):
    """balanced_loss, with the value and the metrics that a pipeline has."""
    added, metrics = balanced_loss(*given)
    loss = metrics["loss"]
    return added - jax.lax.stop_gradient(added - loss), {
        name: metrics[name] for name in ("loss", "accuracy")}


@functools.cache
def alone(**changes):
    """(state, program) of one device that adds up the same microbatches."""
    config = dataclasses.replace(SMALL, **changes)
    state = state_of(config, Sharding.none().also(E=None), (1, 1, 1, 1),
                     in_microbatches(mean_loss, PARTS))
    return state, compile_step(state, state.program.place(batch_of()), KEY)


@functools.cache
def in_stages(schedule, shape, **changes):
    """(state, program) of a step in stages."""
    state = state_of(dataclasses.replace(SMALL, **changes), RULES, shape,
                     pipelined(SCHEDULES[schedule], PARTS))
    return state, compile_step(state, state.program.place(batch_of()), KEY)


def same(state, program, **changes):
    """The proof of training beside one device."""
    one = alone(**changes)
    return proofs.assert_same_training(run(state, KEY, program), run(one[0], KEY, one[1]),
                                       [batch_of()])


@pytest.mark.parametrize("schedule, shape, changes", [
    ("gpipe", (2, 2, 2, 1), {}),
    ("lockstep", (2, 2, 2, 1), {}),
    ("ZB-H1", (1, 2, 2, 2), {}),
    ("gpipe", (1, 4, 2, 1), {"remat": "attention", "gated": False, "bias": True}),
    ("ZB-H1", (1, 2, 2, 2), {"experts": BIASED, "bias": True}),
    ("gpipe", (1, 2, 2, 2), {"experts": DROPPING, "period": 2}),
])
def test_every_gradient_is_that_of_one_device(schedule, shape, changes):
    assert same(*in_stages(schedule, shape, **changes), **changes).gradient_difference < 1e-6


@pytest.mark.parametrize("schedule, ticks, trips", [("gpipe", 5, 4), ("lockstep", 6, 6)])
def test_slots_travel_in_every_tick_and_gradients_once(schedule, ticks, trips):
    """Lockstep 1F1B computes a stage's layers again, with their trips."""
    state, program = in_stages(schedule, (2, 2, 2, 1))
    moved, layers = proofs.collectives(program, state.program.mesh), SMALL.layers // 2
    C = routing.capacity(SIZES.capacity, SMALL.tokens, SIZES.active, SIZES.count)
    rows, count = 16 // PARTS // 4, ticks * layers * trips
    slots = SIZES.count * rows * C * SMALL.embed * 4
    assert moved["all-to-all", ("expert",)] == (count, count * slots)
    own = 2 * SIZES.count // 2 * 3 * SMALL.embed * SMALL.hidden * 4  # of two layers, half of E
    assert moved["all-reduce", ("batch",)] == (1, own)


def test_without_its_part_of_the_loss_a_router_learns_something_else(monkeypatch):
    monkeypatch.setattr("meshbook.models.pipelined.costs_of", lambda *given: {})
    with pytest.raises(proofs.ProofFailed, match="gradient"):
        same(*in_stages.__wrapped__("gpipe", (2, 2, 2, 1)))


def test_batches_that_are_split_otherwise_than_the_rules_say_are_refused():
    state = create_state(lambda: Decoder(SMALL, RULES, rngs=nnx.Rngs(0)),
                         optax.sgd(0.1, momentum=0.0), make_mesh((1, 2, 2, 2), AXES),
                         loss=pipelined(gpipe, PARTS))
    with pytest.raises(ValueError, match="over batch, expert, and batches are split over batch: "
                                         "expected create_state"):
        compile_step(state, state.program.place(batch_of()), KEY)


def test_a_bias_that_would_be_trained_by_its_loads_is_refused():
    config = dataclasses.replace(SMALL, experts=BIASED)
    state = create_state(lambda: Decoder(config, RULES, rngs=nnx.Rngs(0)), optax.adamw(1e-3),
                         make_mesh((1, 2, 2, 2), AXES), loss=pipelined(gpipe, PARTS), rows=ROWS)
    with pytest.raises(ValueError, match="moved by their loads, not by gradients"):
        compile_step(state, state.program.place(batch_of()), KEY)
