"""The step that a plan asks for: what it is given, and who moves the biases of experts."""
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from meshbook.costs.plans import Plan
from meshbook.models.balanced_loss import balanced_loss
from meshbook.models.decoder import DecoderConfig
from meshbook.models.expert_layers import ExpertSizes
from meshbook.models.losses import language_loss
from meshbook.planning.plan_programs import plan_loss, plan_program, taken_by
from meshbook.sharding import make_mesh

EXPERTS = DecoderConfig(70_000, tokens=16, embed=16, hidden=32, heads=4, layers=2,
                        experts=ExpertSizes(4, 2, capacity=1.5, biased=True))


def program_of(config, plan, rows, **more):
    mesh = make_mesh(tuple(plan.mesh.values()), tuple(plan.mesh))
    return mesh, plan_program(config, plan, rows, mesh, **more)


@pytest.mark.parametrize("plan, split", [
    (Plan(4, rules="data_parallel"), P("batch")),
    (Plan(2, expert=4, rules="data_parallel"), P(("batch", "expert"))),
    (Plan(2, stage=2, microbatches=2, rules="data_parallel"), P("batch"))])
def test_a_batch_is_rows_of_token_ids_that_any_vocabulary_has_room_for(plan, split):
    config = replace(EXPERTS, experts=EXPERTS.experts if plan.expert > 1 else None)
    mesh, (_, _, batch, _) = program_of(config, plan, 16, names=("inputs", "labels", "segments"))
    assert set(batch) == {"inputs", "labels", "segments"}
    for ids in batch.values():
        assert ids.shape == (16, 16) and ids.sharding.mesh == mesh and ids.sharding.spec == split
        assert jnp.iinfo(ids.dtype).max > config.vocabulary


@pytest.mark.parametrize("biased", [False, True])
def test_the_biases_of_experts_are_left_to_their_balancer(biased):
    config = replace(EXPERTS, experts=replace(EXPERTS.experts, biased=biased))
    mesh, (step, *given) = program_of(config, Plan(2, expert=2, rules="data_parallel"), 8)
    with jax.set_mesh(mesh):
        out, _ = jax.eval_shape(step, *given)  # refused where an optimizer would train them
    assert jax.tree.map(jnp.shape, out.params) == jax.tree.map(jnp.shape, given[0].params)


@pytest.mark.parametrize("schedule", ["lockstep", "one_f_one_b", "zero_bubble"])
def test_a_schedule_with_conditionals_says_which_branches_run(schedule):
    assert taken_by(Plan(2, stage=1, schedule=schedule)) is None
    assert taken_by(Plan(stage=2, microbatches=4, schedule="gpipe")) is None
    assert taken_by(Plan(stage=2, microbatches=4, schedule=schedule)) is not None


def test_a_loss_is_cut_in_microbatches_only_where_there_are_several():
    dense = replace(EXPERTS, experts=None)
    assert plan_loss(dense, Plan(8)) is language_loss
    assert plan_loss(EXPERTS, Plan(2, expert=4)) is balanced_loss
    for config, plan in (dense, Plan(8, microbatches=2)), (EXPERTS, Plan(8, microbatches=3)):
        assert plan_loss(config, plan) not in (language_loss, balanced_loss)
