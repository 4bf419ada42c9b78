"""Plans for a run: every mesh is there, each impossible one has a sentence, formulas hold."""
import dataclasses
import itertools
import math

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from meshbook import proofs
from meshbook.costs.devices import DEVICES
from meshbook.costs.places import spans
from meshbook.drawing.schedules import facts
from meshbook.hlo.flops import work
from meshbook.models.decoder import DecoderConfig
from meshbook.models.expert_layers import JAXFORMER, ExpertSizes
from meshbook.parallel.pipeline import lockstep_events
from meshbook.planning.mesh_costs import own_parameters, plan_traffic
from meshbook.planning.mesh_steps import (
    passes_of, plan_drawn, plan_memory, plan_moved, plan_peak, plan_seconds, plan_work
)
from meshbook.planning.meshes import (
    AXES, POLICIES, SCHEDULES, STAGED, WHOLE, Plan, best_on, impossible, meshes, plans_on, rank,
    ranked
)
from meshbook.planning.plan_programs import plan_program
from meshbook.sharding import make_mesh

DENSE = DecoderConfig(vocabulary=500, tokens=32, embed=32, hidden=64, heads=4, layers=4)
LATENT = dataclasses.replace(DENSE, latent=8, rotary=4, period=2, gated=False, bias=True,
                             by_row=True)
EXPERTS = dataclasses.replace(LATENT, experts=ExpertSizes(
    8, 3, shared=16, capacity=1.5, router="sigmoid", auxiliary=1e-4))
BIG = DecoderConfig.jaxformer(experts=JAXFORMER, dtype=jax.numpy.bfloat16, by_row=True)
V4, TORUS = DEVICES["TPU v4"], (2, 4, 4)


def compiled(plan, config, rows=16):
    """A plan's step for simulated devices, and its mesh."""
    mesh = make_mesh(tuple(plan.mesh.values()), tuple(plan.mesh))
    step, *given = plan_program(config, plan, rows, mesh)
    with jax.set_mesh(mesh):
        return step.lower(*given).compile(), mesh, given[0]


ONE_ACTIVE = dataclasses.replace(EXPERTS, experts=dataclasses.replace(EXPERTS.experts, active=1))
CASES = {
    "one active, three microbatches": (ONE_ACTIVE, Plan(2, expert=2, model=2, rules="zero1",
                                                        microbatches=3, remat="none")),
    "experts, five microbatches": (EXPERTS, Plan(4, expert=2, microbatches=5, remat="products")),
    "dense, three microbatches": (LATENT, Plan(4, model=2, rules="zero1", microbatches=3)),
    "stages and model": (DENSE, Plan(2, stage=2, model=2, rules="fully_sharded", microbatches=4)),
    "gathered again": (LATENT, Plan(8, rules="fully_sharded_again", remat="none")),
    "experts, products": (EXPERTS, Plan(4, model=2, rules="tensor_parallel", remat="products")),
    "experts, microbatches": (EXPERTS, Plan(4, expert=2, microbatches=2, remat="attention")),
    "experts and model": (EXPERTS, Plan(2, expert=2, model=2, rules="tensor_parallel",
                                        remat="none")),
    "three axes": (EXPERTS, Plan(2, expert=2, stage=2, rules="fully_sharded", microbatches=2)),
}


@pytest.mark.parametrize("name", CASES)
def test_bytes_work_and_parameters_are_those_of_the_program(name):
    config, plan = CASES[name]
    rows = 16 if 16 % plan.microbatches == 0 else 8 * plan.microbatches
    program, mesh, state = compiled(plan, config, rows)
    assert impossible(config, plan, rows) == ""
    proofs.assert_communicates(program, mesh, plan_traffic(config, plan, rows))
    assert work(program) == plan_work(config, plan, rows).done
    held = [math.prod(leaf.sharding.shard_shape(leaf.shape))
            for leaf in jax.tree.leaves(state.params)]
    assert sum(held) == own_parameters(config, plan)
    planted = dataclasses.replace(plan, remat="all" if plan.remat == "none" else "none")
    assert work(program) != plan_work(config, planted, rows).done
    with pytest.raises(AssertionError):  # a formula for another mesh
        other = dataclasses.replace(plan, batch=plan.batch // 2, model=plan.model * 2)
        proofs.assert_communicates(program, mesh, plan_traffic(config, other, rows))


@pytest.mark.parametrize("chips", (1, 6, 8, 32))
def test_meshes_are_all_ways_to_write_a_product(chips):
    found = [tuple(mesh.sizes.values()) for mesh in meshes(chips)]
    every = [sizes for sizes in itertools.product(range(1, chips + 1), repeat=len(AXES))
             if math.prod(sizes) == chips] if chips < 10 else None
    assert len(set(found)) == len(found) and all(math.prod(sizes) == chips for sizes in found)
    if every is not None:
        assert set(found) == set(every)
    power = chips.bit_length() - 1
    if chips == 2**power:  # so many twos into so many axes
        assert len(found) == math.comb(power + len(AXES) - 1, len(AXES) - 1)


def test_plans_on_a_mesh_are_all_combinations():
    assert len(list(plans_on(Plan(8), 16))) == len(WHOLE) * 5 * len(POLICIES)
    staged = list(plans_on(Plan(4, stage=2), 16))
    assert len(set(staged)) == len(STAGED) * len(SCHEDULES) * 5 * len(POLICIES)


@pytest.mark.parametrize("config, plan, words", [
    (BIG, Plan(4, model=8), "heads=12 does not divide over 8 devices"),
    (BIG, Plan(2, stage=16), "periods of layers=8 does not divide over 16"),
    (BIG, Plan(1, expert=32), "experts=16 does not divide over 32"),
    (BIG, Plan(8, context=4), "keys and values of heads; found latent=128"),
    (DENSE, Plan(8, context=4), "has no formula here"),
    (DENSE, Plan(4, expert=2), "without experts has nothing to split over 2"),
    (BIG, Plan(32, microbatches=16), "rows in a microbatch of a batch=16 does not divide over 32"),
    (BIG, Plan(8, stage=2, model=2, schedule="lockstep"), "expected remat none, found all"),
    (BIG, Plan(4, stage=8, schedule="zero_bubble", remat="none", microbatches=4),
     "needs a microbatch for each of 8 stages; found 4")])
def test_what_is_impossible_has_a_sentence(config, plan, words):
    assert words in impossible(config, plan, 256)


def test_the_ranking_has_every_mesh_once_and_the_fastest_that_fits_first():
    found, refused = rank(BIG, 256, V4, TORUS)
    assert len(found) + len(refused) == len(list(meshes(32))) and all(refused.values())
    assert not {each.plan.where for each in found} & {mesh.where for mesh in refused}
    fitting = [each.step for each in found if each.fits]
    assert fitting == sorted(fitting) and len(fitting) > 20
    with pytest.raises(ValueError, match="heads=12"):
        best_on(BIG, Plan(4, model=8), 256, V4, TORUS)


def test_a_step_is_slower_with_a_bubble_with_wire_and_with_what_is_made_again():
    source = Plan(8, stage=2, model=2, rules="fully_sharded", microbatches=16)
    steps = {name: ranked(BIG, dataclasses.replace(source, **change), 256, V4, TORUS)
             for name, change in {
                 "": {}, "few": {"microbatches": 4}, "kept": {"remat": "none"},
                 "no stages": {"stage": 1, "batch": 16, "rules": "zero1", "microbatches": 1},
             }.items()}
    products = {name: each.seconds["products"] for name, each in steps.items()}
    assert products["few"] / products[""] == pytest.approx((5 / 4) / (17 / 16), rel=0.02)
    assert products["kept"] < products[""] and products["no stages"] < products[""]
    assert steps["kept"].peak > steps[""].peak and "stage" not in steps["no stages"].seconds
    drawn = [plan_drawn(BIG, each.plan, 256) for each in (steps[""], steps["no stages"])]
    assert drawn[0] / drawn[1] == pytest.approx(17 / 16)  # half the layers, of twice the rows
    assert plan_drawn(DENSE, source, 256) == 0
    moved = plan_moved(BIG, source, 256)
    assert moved["activations"] > moved["weights"] > 0
    held = plan_memory(BIG, source, 256)
    assert max(held.values()) < plan_peak(held) < sum(held.values())


@pytest.mark.parametrize("p, m", ((2, 2), (4, 8), (8, 3)))
def test_lockstep_takes_as_long_as_its_ticks_and_moves_as_often_as_it_has_microbatches(p, m):
    plan = Plan(2, stage=p, model=2, schedule="lockstep", microbatches=m, remat="none")
    forward, _, backward = passes_of(plan)
    assert m * (forward + 2 * backward) == pytest.approx(
        facts(lockstep_events(p, m)).makespan)
    along = [plan_traffic(LATENT, dataclasses.replace(plan, schedule=name), 16 * m, 4)
             .along("model").bytes for name in ("lockstep", "zero_bubble")]
    assert along[0] >= along[1]  # both in m turns; lockstep sums once more in what it makes again
    more = along[0] / along[1]
    assert more < 1.5


def test_a_shared_link_takes_longer():
    plan = Plan(8, stage=2, model=2, rules="fully_sharded", microbatches=16)
    place = spans(TORUS, plan.sizes)
    assert place["batch"] == ((2, 4), 2) and place["model"] == ((2,), 1)
    alone = place | {"batch": ((2, 4), 1)}
    both = [plan_seconds(BIG, plan, 256, V4, each)["batch"] for each in (place, alone)]
    assert both[0] == 2 * both[1]
