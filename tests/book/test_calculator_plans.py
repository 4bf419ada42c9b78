"""The ranking of plans in the calculator: its JavaScript gives what Python gives."""
import dataclasses
import itertools
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest
from browsers import CHROMIUM
from test_calculator import sizes_of

from meshbook.costs.devices import DEVICES
from meshbook.costs.places import spans
from meshbook.models.decoder import DecoderConfig
from meshbook.models.expert_layers import JAXFORMER, ExpertSizes
from meshbook.planning.expert_costs import slots_in_row
from meshbook.planning.mesh_costs import plan_traffic
from meshbook.planning.meshes import AXES, SPARE, impossible, meshes, plans_on, rank, ranked

STATIC = Path(__file__).resolve().parents[2] / "book" / "_static"
SCRIPTS = ("calculator.js", "calculator-decoder.js", "calculator-axes.js", "calculator-places.js",
           "calculator-plans.js", "calculator-meshes.js")
JAX = DecoderConfig.jaxformer(experts=JAXFORMER, dtype=jnp.bfloat16, by_row=True)
LARGE = replace(JAX, embed=1536, hidden=6144)
CONFIGS = [DecoderConfig(dropout=0.1, **sizes) for sizes in (
    {"heads": 4},
    {"vocabulary": 1000, "tokens": 512, "embed": 64, "hidden": 256, "heads": 8, "groups": 4,
     "layers": 12, "period": 3, "bias": True, "gated": False, "dtype": jnp.bfloat16,
     "experts": ExpertSizes(6, 2, capacity=1.1, biased=True)},
    {"latent": 24, "rotary": 8, "layers": 8, "period": 2, "bias": True, "by_row": True,
     "experts": ExpertSizes(8, 1, shared=192, capacity=2.0)},
    {"by_row": True, "groups": 2, "experts": ExpertSizes(4, 2, shared=64, capacity=1.25,
                                                         auxiliary=1e-2)},
    {"hidden": 1_000_002, "groups": 1, "layers": 3})]
ASKED = [  # config, rows, device, torus
    (JAX, 256, "TPU v4", (2, 4, 4)), (CONFIGS[1], 96, "TPU v5e", (4, 4, 1)),
    (CONFIGS[2], 64, "TPU v6e", (2, 4, 1)), (CONFIGS[3], 32, "TPU v5p", (2, 2, 2)),
    (CONFIGS[0], 1, "TPU v5p", (2, 2, 1)), (JAX, 12, "TPU v5e", (2, 2, 1)),
    (LARGE, 16, "TPU v5e", (2, 4, 1)), (LARGE, 64, "TPU v5e", (2, 2, 1)),  # some fit, none fits
    (CONFIGS[4], 4, "TPU v4", (2, 2, 1))]  # two things do not divide
IN_TURN = """asked => asked.map(([sizes, experts, plans, rows, device, place]) => {
  const c = meshbook.plans.decoder(sizes, experts);
  return plans.map(plan => ({
    why: meshbook.meshes.impossible(c, plan, rows), ...(meshbook.meshes.impossible(c, plan, rows)
      ? {} : {memory: meshbook.plans.memory(c, plan, rows),
              seconds: meshbook.plans.seconds(c, plan, rows, device, place),
              traffic: meshbook.plans.traffic(c, plan, rows)})}));
})"""
RANKED = """asked => asked.map(([sizes, experts, rows, device, torus]) => meshbook.meshes.rank(
  meshbook.plans.decoder(sizes, experts), rows, device, torus))"""

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium on the PATH")


def experts_of(config):
    e = config.experts
    return e and {"count": e.count, "active": e.active, "shared": e.shared,
                  "capacity": e.capacity, "auxiliary": e.auxiliary, "biased": e.biased}


def close(numbers):
    return {what: pytest.approx(each, rel=1e-12) for what, each in numbers.items()}


@pytest.fixture(scope="module")
def script(browser):
    context = browser.new_context()
    tab = context.new_page()
    for name in SCRIPTS:
        tab.add_script_tag(path=STATIC / name)
    yield tab.evaluate
    context.close()


@pytest.mark.parametrize("torus", [
    (2, 4, 4), (2, 2, 1), (2, 2, 4), (4, 8, 1), (8, 8, 1), (3, 4, 2), (4, 6, 1), (1, 1, 1)])
def test_axes_lie_where_jax_lays_them(script, torus):
    chips = torus[0] * torus[1] * torus[2]
    every = [list(mesh.sizes.values()) for mesh in meshes(chips)]
    assert script("chips => meshbook.meshes.meshesOf(chips).map(Object.values)", chips) == every
    found = script("([torus, all]) => all.map(sizes => meshbook.places.spans(torus, sizes))",
                   [torus, every])
    for sizes, each in zip(every, found, strict=True):
        expected = spans(torus, dict(zip(AXES, sizes, strict=True)))
        assert each == [[list(along), shared] for along, shared in expected.values()], sizes


def sampled(config, rows, chips):
    """Plans of every mesh, about as many of each run: all of few, some of many."""
    plans = [plan for mesh in meshes(chips) if mesh.context == 1 for plan in plans_on(mesh, rows)]
    return plans[::1 + len(plans) // 1500]


def test_the_script_gives_seconds_memory_traffic_and_sentences_of_every_plan(script):
    plans = [sampled(config, rows, torus[0] * torus[1] * torus[2])
             for config, rows, _, torus in ASKED]
    given, sentences = 0, set()
    for (config, rows, name, torus), each in zip(ASKED, plans, strict=True):
        device, by_mesh = DEVICES[name], itertools.groupby(each, key=lambda plan: plan.sizes)
        groups = [(sizes, list(some)) for sizes, some in by_mesh]
        answers = script(IN_TURN, [
            [sizes_of(config), experts_of(config), [dataclasses.asdict(plan) for plan in some],
             rows, dataclasses.asdict(device), list(spans(torus, sizes).values())]
            for sizes, some in groups])
        for (_, some), found in zip(groups, answers, strict=True):
            for plan, answer in zip(some, found, strict=True):
                why = impossible(config, plan, rows)
                assert answer["why"] == why, plan
                sentences.add(why)
                if why:
                    continue
                expected = ranked(config, plan, rows, device, torus)
                assert answer["memory"] == expected.memory, plan
                assert answer["seconds"] == close(expected.seconds), plan
                traffic = plan_traffic(config, plan, rows, jnp.dtype(config.dtype).itemsize)
                assert [(kind, tuple(axes), size) for kind, axes, size in answer["traffic"]] == [
                    (kind, axes, moved.bytes) for (kind, axes), moved in traffic.items()], plan
                given += 1
    assert given > 1000 and len(sentences) > 30


@pytest.mark.parametrize("sizes", [{"active": 7}, {"capacity": 1e-12}])
def test_experts_that_make_no_sense_are_refused_in_the_same_words(script, sizes):
    experts = {"count": 6, "active": 2, "shared": 0, "capacity": 1.5} | sizes
    with pytest.raises(ValueError) as refused:
        slots_in_row(replace(CONFIGS[0], experts=ExpertSizes(**experts)))
    assert str(refused.value) == script("""([sizes, experts]) => {
      try { meshbook.plans.decoder(sizes, experts); } catch (error) { return error.message; }
    }""", [sizes_of(CONFIGS[0]), experts])


def test_the_script_ranks_as_python_does(script):
    answers = script(RANKED, [[sizes_of(config), experts_of(config), rows,
                               dataclasses.asdict(DEVICES[name]), torus]
                              for config, rows, name, torus in ASKED])
    fits, reasons = set(), set()
    for (config, rows, name, torus), answer in zip(ASKED, answers, strict=True):
        found, refused = rank(config, rows, DEVICES[name], torus)
        assert [(each["plan"], each["fits"]) for each in answer["found"]] == [
            (dataclasses.asdict(each.plan), each.fits) for each in found]
        for ours, theirs in zip(answer["found"], found, strict=True):
            assert ours["peak"] == theirs.peak
            assert ours["step"] == pytest.approx(theirs.step, rel=1e-12)
        fits.add(tuple(sorted({each.fits for each in found})))
        assert {tuple(each["mesh"].values()): each["why"] for each in answer["refused"]} == {
            tuple(mesh.sizes.values()): why for mesh, why in refused.items()}
        reasons |= set(refused.values())
    assert fits == {(True,), (False, True), (False,)} and len(reasons) > 10
    assert script("() => meshbook.meshes.SPARE") == SPARE
