"""The formulas of `meshbook.planning` that the tables replace: equal on thousands of points.

Exceptions are listed, each with a compiled program on the side of the tables (test_step_traffic).
"""
import dataclasses
import itertools
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from meshbook.costs.plans import PRESETS, Plan
from meshbook.costs.ranking import impossible
from meshbook.costs.step import describe
from meshbook.costs.timeline import step_peak, step_timeline
from meshbook.costs.traffic import step_traffic
from meshbook.costs.work import step_work
from meshbook.models import MiniGPTConfig, ViTConfig
from meshbook.models.decoder import DecoderConfig
from meshbook.models.expert_layers import ExpertSizes
from meshbook.planning import (
    context_costs, costs, decoder_costs, expert_steps, mesh_costs, mesh_steps, pipeline_costs
)
from meshbook.planning.memory_timeline import memory_timeline
from meshbook.planning.meshes import meshes, plans_on

VIT, GPT = ViTConfig(), MiniGPTConfig()
SIZES = dict(vocabulary=640, tokens=128, embed=96, hidden=256, heads=4, layers=4)
DENSE = DecoderConfig(**SIZES)
LATENT = DecoderConfig(**SIZES, period=2, latent=32, rotary=16, gated=False, bias=True)
GROUPS = DecoderConfig(**SIZES | {"heads": 8}, groups=4, bias=True, by_row=True)
ROUTED = replace(DENSE, experts=ExpertSizes(8, 2, shared=64, capacity=1.5))
ROUTED_LATENT = replace(LATENT, experts=ExpertSizes(8, 3, shared=64, capacity=1.5, biased=True))
TWO = tuple(itertools.product((1, 2, 4), (1, 2, 4)))


def mesh_of(rows, ways):
    return SimpleNamespace(shape={"batch": rows, "model": ways})


def differs(new, old, counts=True):
    """Whether two traffics differ, in bytes or in counts."""
    old = {(kind, tuple(axes)): moved for (kind, axes), moved in old.items() if moved}
    return new.keys() != old.keys() or any(
        abs(new[key].bytes - old[key].bytes) > 1 or counts and new[key].count != old[key].count
        for key in new)


@pytest.mark.parametrize("clipped", [False, True])
def test_traffic_of_the_vit_and_minigpt(clipped):
    for (rows, ways), rules in itertools.product(TWO, ("tensor_parallel", "fully_sharded")):
        mesh, parts = mesh_of(rows, ways), rules == "fully_sharded" and rows > 1
        plan = Plan(rows, model=ways, rules=rules, remat="none")
        old = costs.gpt_step_traffic(GPT, mesh, 16, clipped, sharded=parts)
        if parts:
            old["all-gather", ("batch",)] = costs.Moved(
                10 * GPT.layers + 3, costs.step_gathers(costs.gpt_parameters, GPT, mesh))
        assert not differs(step_traffic(describe(GPT, plan, 16), clipped=clipped), old)
        old = costs.vit_step_traffic(VIT, mesh, 16)
        if parts:
            old["all-gather", ("batch",)] = costs.Moved(
                10 * VIT.layers + 7, costs.step_gathers(costs.vit_parameters, VIT, mesh))
        assert not differs(step_traffic(describe(VIT, plan, 16)), old)


def test_traffic_and_work_of_the_decoder():
    apart, points = Counter(), 0
    for config, rules, (rows, ways), remat, clipped in itertools.product(
            (DENSE, LATENT, GROUPS), PRESETS, TWO, ("none", "products", "attention", "all"),
            (False, True)):
        config = replace(config, remat=remat)
        step = describe(config, Plan(rows, model=ways, rules=rules), 16)
        points += 1
        assert not differs(step_traffic(step, clipped=clipped), decoder_costs.decoder_step_traffic(
            config, mesh_of(rows, ways), 16, rules, clipped)), (step.plan, config)
        useful, factor = decoder_costs.decoder_step_flops(config, 16, ways, rules)
        done, found = useful * factor / (rows * ways), step_work(step)
        assert found.useful == pytest.approx(useful / (rows * ways), rel=1e-12)
        if found.done != pytest.approx(done, rel=1e-12):
            apart[rules, bool(config.latent), ways > 1] += 1
    assert points > 1000 and sum(apart.values()) < 0.05 * points
    # latents under data parallelism were counted once for each device, twice
    assert apart.keys() == {("data_parallel", True, True)}


def test_traffic_of_experts_stages_and_contexts():
    for (rows, ways), remat in itertools.product(TWO, ("none", "products", "attention", "all")):
        config = replace(ROUTED, remat=remat)
        step = describe(config, Plan(rows, expert=ways, rules="data_parallel"), 16)
        assert not differs(step_traffic(step, balanced=False), expert_steps.expert_step_traffic(
            config, {"batch": rows, "expert": ways}, 16))
        for method in context_costs.METHODS:
            config = replace(GROUPS, remat=remat)
            plan = Plan(rows, context=ways, rules="data_parallel", method=method)
            assert not differs(step_traffic(describe(config, plan, 16)),
                               context_costs.context_step_traffic(
                                   config, {"batch": rows, "context": ways}, 16, method))
    for (rows, stages), schedule, config in itertools.product(
            TWO, pipeline_costs.SCHEDULES, (DENSE, GROUPS)):
        config = replace(config, vocabulary=512)
        plan = Plan(rows, stage=stages, rules="data_parallel", schedule=schedule, microbatches=4)
        assert not differs(step_traffic(describe(config, plan, 16)),
                           pipeline_costs.pipeline_step_traffic(
                               config, {"batch": rows, "stage": stages}, 16, schedule, 4))


def test_plans_on_every_mesh_of_eight_devices():
    points = 0
    for mesh, config in itertools.product(meshes(8), (DENSE, LATENT, ROUTED, ROUTED_LATENT)):
        for old in itertools.islice(plans_on(mesh, 8), 0, None, 7):
            plan, config = Plan(**dataclasses.asdict(old)), replace(config, remat=old.remat)
            if mesh.context > 1 or impossible(config, plan, 64):
                continue
            step, points = describe(config, plan, 64), points + 1
            work = mesh_steps.plan_work(config, old, 64)
            assert step_work(step) == pytest.approx(work, rel=1e-12)
            assert step.numbers["stored"] == mesh_costs.own_parameters(config, old)
            assert not differs(step_traffic(step), mesh_costs.plan_traffic(config, old, 64), False)
    assert points > 400


@pytest.mark.parametrize("config", [VIT, GPT, replace(GPT, dropout=0.1)])
def test_memory_of_the_vit_and_minigpt_from_moment_to_moment(config):
    of = costs.gpt_step_memory if isinstance(config, MiniGPTConfig) else costs.vit_step_memory
    for ways, rows, batch, remat in itertools.product((1, 2, 4), (1, 8), (8, 512), ("none", "all")):
        rules = "fully_sharded" if rows > 1 else "tensor_parallel"
        step = describe(config, Plan(rows, model=ways, rules=rules, remat=remat), batch * rows)
        assert [(each.phase, each.block, each.held) for each in step_timeline(step)] == [
            tuple(each) for each in memory_timeline(config, batch, ways, rows, remat == "all")]
        if remat == "none":
            assert step_peak(step) == costs.step_peak(of(config, batch, ways, rows))
