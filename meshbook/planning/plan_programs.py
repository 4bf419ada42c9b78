"""The training step that a plan asks for, as shapes and layouts, ready to be compiled."""
from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from meshbook.costs.plans import Plan, rules_of
from meshbook.models.balanced_loss import balanced, balanced_loss
from meshbook.models.decoder import Decoder, DecoderConfig
from meshbook.models.losses import language_loss
from meshbook.models.pipelined import pipelined
from meshbook.parallel import schedules, slots
from meshbook.parallel.accumulation import in_microbatches
from meshbook.parallel.pipeline import by_tick, gpipe, one_f_one_b
from meshbook.training import abstract_state, as_it_is, train_step

TABLES = {  # of slots, for F, B and W of a microbatch
    "one_f_one_b": lambda stages, microbatches: schedules.split_backward(
        schedules.one_f_one_b(stages, microbatches)),
    "zero_bubble": schedules.zero_bubble}
SCHEDULES = {"gpipe": gpipe, "lockstep": one_f_one_b} | {
    name: slots.in_slots(make) for name, make in TABLES.items()}


def plan_loss(config: DecoderConfig, plan: Plan):
    """The loss of a plan: through its stages, or in its microbatches."""
    if plan.stage > 1:
        return pipelined(SCHEDULES[plan.schedule], plan.microbatches)
    loss = balanced_loss if config.experts else language_loss
    return in_microbatches(loss, plan.microbatches) if plan.microbatches > 1 else loss


def plan_program(config: DecoderConfig, plan: Plan, rows: int, mesh: Mesh,
                 optimizer: optax.GradientTransformation | None = None,
                 names: tuple[str, ...] = ("inputs", "labels")):
    """A plan's step on a mesh, (jitted function, state, batch, key), without arrays.

    rows: B of a step; optimizer: SGD, where none is given; names: of the arrays (B, T) of a batch.
    """
    config, rules = dataclasses.replace(config, remat=plan.remat or config.remat), rules_of(plan)
    across = ("batch", "expert") if plan.expert > 1 else "batch"
    optimizer = optimizer or optax.sgd(0.1)
    if config.experts and config.experts.biased:
        optimizer = balanced(optimizer)
    state = abstract_state(lambda: Decoder(config, rules, rngs=nnx.Rngs(0)), optimizer, mesh,
                           as_it_is, plan_loss(config, plan), rows=across)
    ids = jax.ShapeDtypeStruct((rows, config.tokens), jnp.int32,
                               sharding=NamedSharding(mesh, P(across)))
    return (train_step, state, dict.fromkeys(names, ids),
            jax.eval_shape(lambda: jax.random.key(0)))


def taken_by(plan: Plan) -> Any:
    """Which branches some device takes in each turn of a plan's schedule: see
    `meshbook.hlo.schedule.play`; None where there are no conditionals.
    """
    if plan.stage == 1 or plan.schedule == "gpipe":
        return None
    if plan.schedule == "lockstep":
        return by_tick(plan.stage, plan.microbatches)
    return slots.table_of(TABLES[plan.schedule](plan.stage, plan.microbatches)).by_turn
