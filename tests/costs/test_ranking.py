"""Every mesh and plan is there, each impossible one has a sentence, and times add up."""
import dataclasses
import itertools
import math
import re
from dataclasses import replace

import jax.numpy as jnp
import pytest

from meshbook.costs.devices import DEVICES
from meshbook.costs.machines import Machine
from meshbook.costs.plans import AXES, Plan
from meshbook.costs.ranking import (
    METHODS, POLICIES, SCHEDULES, STAGED, WHOLE, best_on, impossible, meshes, plans_on, rank, ranked
)
from meshbook.costs.seconds import numbers_drawn, bytes_moved, step_seconds
from meshbook.costs.step import describe
from meshbook.costs.turns import passes_of, turns_of
from meshbook.costs.work import step_work
from meshbook.drawing.schedules import facts
from meshbook.models import MiniGPTConfig, ViTConfig
from meshbook.models.decoder import DecoderConfig
from meshbook.models.expert_layers import JAXFORMER, ExpertSizes
from meshbook.parallel.pipeline import lockstep_events

DENSE = DecoderConfig(vocabulary=500, tokens=32, embed=32, hidden=64, heads=4, layers=4)
ROUTED = replace(DENSE, experts=ExpertSizes(4, 2, capacity=1.5))
BIG = DecoderConfig.jaxformer(experts=JAXFORMER, dtype=jnp.bfloat16, by_row=True)
V4 = DEVICES["TPU v4"]
CHIPS, CUBE = Machine(V4, (2, 4, 4)), Machine(V4, (2, 2, 2))
SOURCE = Plan(8, stage=2, model=2, rules="fully_sharded", microbatches=16, remat="all")


@pytest.mark.parametrize("chips", (1, 6, 8, 32))
def test_meshes_are_all_ways_to_write_a_product(chips):
    found = [tuple(mesh.sizes.values()) for mesh in meshes(chips)]
    assert len(set(found)) == len(found) and all(math.prod(sizes) == chips for sizes in found)
    if chips < 10:
        assert set(found) == {sizes for sizes in itertools.product(range(1, chips + 1), repeat=5)
                              if math.prod(sizes) == chips}
    power = chips.bit_length() - 1
    if chips == 2**power:  # so many twos into so many axes
        assert len(found) == math.comb(power + len(AXES) - 1, len(AXES) - 1)


def test_plans_on_a_mesh_are_all_combinations():
    each = 5 * len(POLICIES)
    assert len(set(plans_on(Plan(8), 16))) == len(WHOLE) * each
    assert len(set(plans_on(Plan(4, stage=2), 16))) == len(STAGED) * len(SCHEDULES) * each
    assert len(set(plans_on(Plan(4, context=2), 16))) == len(WHOLE) * len(METHODS) * each


@pytest.mark.parametrize("config, plan, words", [
    (BIG, Plan(4, model=8), "heads=12 does not divide over 8 devices"),
    (BIG, Plan(2, stage=16), "periods of layers=8 does not divide over 16"),
    (BIG, Plan(1, expert=32), "experts=16 does not divide over 32"),
    (BIG, Plan(8, context=4), "keys and values of heads; found latent=128"),
    (ROUTED, Plan(8, context=4), "experts beside a context have no program here"),
    (DENSE, Plan(4, context=2, stage=2), "a context in stages has no program here"),
    (DENSE, Plan(1, context=4, model=2, method="ulysses"), "groups=4 does not divide over 8"),
    (DENSE, Plan(1, context=3), "tokens=32 does not divide over 3 devices"),
    (MiniGPTConfig(), Plan(context=2), "stages and a context have programs for the decoder only"),
    (ViTConfig(), Plan(stage=2), "stages and a context have programs for the decoder only"),
    (ViTConfig(), Plan(rules="zero1"), "zero1 has a program for the decoder only"),
    (ViTConfig(), Plan(remat="products"), "remat is one of none, all; found 'products'"),
    (DENSE, Plan(4, expert=2), "a model without experts has nothing to split over 2"),
    (DENSE, Plan(context=2, attention="rows"), "attention in blocks, or fused; found 'rows'"),
    (DENSE, Plan(stage=2, schedule="none"), "expected a schedule, one of gpipe, .*; found 'none'"),
    (replace(DENSE, tokens=1_048_577), Plan(context=2), "tokens=1048577 does not divide over 2"),
    (DENSE, Plan(64, rules="zero1"), "embed=32 does not divide over 64"),
    (BIG, Plan(32, microbatches=16), "rows of a microbatch=16 does not divide over 32"),
    (BIG, replace(SOURCE, schedule="lockstep"), "expected remat none, found all"),
    (BIG, Plan(4, stage=8, schedule="zero_bubble", remat="none", microbatches=4),
     "needs a microbatch for each of 8 stages; found 4")])
def test_what_is_impossible_has_a_sentence(config, plan, words):
    assert re.search(words, impossible(config, plan, 256))


def test_a_plan_that_leaves_the_policy_to_the_config_is_asked_for_that():
    staged = Plan(2, stage=2, rules="zero1", schedule="lockstep")
    assert impossible(DENSE, staged, 64) == ""
    assert "found all" in impossible(replace(DENSE, remat="all"), staged, 64)


def test_a_ranking_hides_no_error():
    narrow = replace(ROUTED, experts=replace(ROUTED.experts, capacity=1e-12))
    with pytest.raises(ValueError, match="capacity of 1 or more slots"):
        rank(narrow, 64, Machine(V4, (2, 2, 1)))
    with pytest.raises(ValueError, match="at least one row in a step; found 0"):
        rank(DENSE, 0, Machine(V4, (2, 2, 1)))
    with pytest.raises(ValueError, match="random numbers of dropout take on H100 is not known"):
        rank(replace(DENSE, dropout=0.1), 64, Machine(DEVICES["H100"], (4,)))


def test_a_context_beside_other_axes_is_possible():
    for plan in (Plan(2, context=4), Plan(2, context=2, model=2), Plan(8, context=1)):
        assert impossible(DENSE, replace(plan, rules="zero1"), 256) == ""


def test_the_ranking_has_every_mesh_once_and_the_fastest_that_fits_first():
    found, refused = rank(BIG, 256, CUBE)
    assert len(found) + len(refused) == len(list(meshes(8))) and all(refused.values())
    assert not {each.plan.where for each in found} & {mesh.where for mesh in refused}
    fitting = [each.step for each in found if each.fits]
    assert fitting and fitting == sorted(fitting)
    with pytest.raises(ValueError, match="heads=12"):
        best_on(BIG, Plan(4, model=8), 256, CHIPS)


def test_a_long_context_is_ranked_beside_all_others():
    long = DecoderConfig(50_257, tokens=131_072, embed=1024, hidden=4096, heads=16, groups=8,
                         layers=12, gated=False, dtype=jnp.bfloat16)
    found, refused = rank(long, 1, Machine(DEVICES["TPU v5e"], (2, 4)))
    assert found[0].fits and found[0].plan.context == 8
    assert not any("context" in why and "no formula" in why for why in refused.values())


def test_a_step_is_slower_with_a_bubble_with_wire_and_with_what_is_made_again():
    steps = {name: ranked(BIG, replace(SOURCE, **change), 256, CHIPS) for name, change in {
        "": {}, "few": {"microbatches": 4}, "kept": {"remat": "none"},
        "no stages": {"stage": 1, "batch": 16, "rules": "zero1", "microbatches": 1}}.items()}
    products = {name: each.seconds["products"] for name, each in steps.items()}
    assert products["few"] / products[""] == pytest.approx((5 / 4) / (17 / 16), rel=0.02)
    assert products["kept"] < products[""] and products["no stages"] < products[""]
    assert steps["kept"].peak > steps[""].peak and "stage" not in steps["no stages"].seconds
    one, two = (describe(BIG, each.plan, 256) for each in (steps[""], steps["no stages"]))
    drawn = numbers_drawn(one) / numbers_drawn(two)  # half the layers, of twice the rows
    assert drawn == pytest.approx(17 / 16)
    assert numbers_drawn(describe(DENSE, SOURCE, 256)) == 0
    assert bytes_moved(one)["activations"] > bytes_moved(one)["weights"] > 0


@pytest.mark.parametrize("p, m", ((2, 2), (4, 8), (8, 3)))
def test_lockstep_takes_as_long_as_its_ticks(p, m):
    plan = Plan(2, stage=p, schedule="lockstep", microbatches=m)
    forward, _, backward = passes_of(plan)
    assert m * (forward + 2 * backward) == pytest.approx(facts(lockstep_events(p, m)).makespan)
    with pytest.raises(ValueError, match="expected a schedule, one of gpipe, .*; found 'none'"):
        turns_of("none", p, m)


def test_a_shared_link_takes_longer():
    groups, step = CHIPS.groups(SOURCE.sizes), describe(BIG, SOURCE, 256)
    assert groups["batch"] == ((2, 4), (False, False), 2, 8, 1)
    assert groups["model"] == ((2,), (False,), 1, 2, 1)
    shared, alone = (step_seconds(step, V4, groups | {"batch": each})["batch"]
                     for each in (groups["batch"], groups["batch"]._replace(shared=1)))
    assert shared == 2 * alone


def test_narrow_heads_fill_a_part_of_a_matrix_unit():
    wide = DecoderConfig(500, tokens=1024, embed=512, hidden=512, heads=4, layers=2)
    for heads, factor in ((4, 1), (8, 2), (16, 4)):
        step = describe(replace(wide, heads=heads), Plan(rules="data_parallel"), 8)
        narrow = sum(3 * each.flops for each in step.placed if "U" in each.row.letters)
        assert step_work(step).spent - step_work(step).done == pytest.approx((factor - 1) * narrow)


def test_what_does_not_change_the_work_changes_no_flops():
    plans = [replace(SOURCE, stage=1, batch=16, microbatches=m, rules=rules) for m in (1, 2, 4)
             for rules in ("zero1", "fully_sharded_kept", "tensor_parallel")]
    assert len({step_work(describe(BIG, plan, 256)) for plan in plans}) == 1
    assert dataclasses.asdict(plans[0])["remat"] == "all"
