"""The formula's curve of memory over a step beside the programs that were kept."""

import pytest

from meshbook.costs import timeline
from meshbook.costs.timeline import Moment
from meshbook.hlo.memory_kinds import KINDS, StepMemory
from meshbook.models import MiniGPTConfig
from meshbook.planning import recorded_timelines
from meshbook.planning.programs import step_of
from meshbook.planning.recorded_timelines import SAME_KINDS, Comparison, compare_timelines

KEPT = {"v2-8 (8, 1) 512": 0.99, "v2-8 (8, 1) 512 row=fully_sharded": 0.97,
        "v5e-8 (4, 2) 1024": 1.07, "v5e-8 (8, 1) 256 model=MiniGPT": 0.98,
        "v2-8 (8, 1) 512 checkpoint=True": 0.92}


@pytest.fixture(scope="module", params=KEPT)
def pair(request):
    return request.param, compare_timelines(request.param)


def test_the_places_are_in_the_order_of_the_moments_and_each_is_in_its_block(pair):
    name, both = pair
    assert len(both.places) == len(both.moments)
    assert both.places == sorted(both.places) and both.places[-1] == len(both.step.total) - 1
    text, _ = recorded_timelines.recorded_program(name)
    lines = text[text.index("\nENTRY"):].split("\n")[2:]
    layers = max(each.block or 0 for each in both.moments)
    for moment, place in zip(both.moments, both.places):
        if moment.phase == "forward" and moment.block < layers:
            assert f"block_{moment.block}" in lines[place]  # the first matmul of the next block
        if moment.phase == "backward" and moment.block:
            around = "".join(lines[place - 200: place + 200])
            assert f"block_{moment.block - 1}" in around and "transpose(" in around


def test_the_curve_is_near_the_program(pair):
    name, both = pair
    peak = max(both.step.total)
    assert max(each.total for each in both.moments) / peak == pytest.approx(KEPT[name], abs=0.015)
    assert max(map(abs, both.errors("forward", "loss"))) < 0.18
    assert max(map(abs, both.errors("forward", "loss", "backward", "update"))) < 0.25
    expected = ("backward", 1) if "checkpoint" in name else ("loss", None)
    top = max(both.moments, key=lambda each: each.total)
    assert (top.phase, top.block) == expected
    order = [each[:2] for each in both.moments]
    assert 0 <= order.index(both.peak_moment()[:2]) - order.index(expected) <= 1


def test_a_curve_that_is_wrong_is_found():
    """Activations that are forgotten, or counted twice, are beyond every bound."""
    both = compare_timelines("v5e-8 (4, 2) 1024")
    for factor in (0, 2):
        wrong = [each._replace(held=each.held | {"activations": factor * each.held["activations"]})
                 for each in both.moments]
        assert max(map(abs, both._replace(moments=wrong).errors("forward", "backward"))) > 0.5


def test_errors_and_groups_are_those_of_the_arrays():
    kinds = {kind: [0, 0, 0] for kind in KINDS} | {
        "parameters": [10, 10, 10], "activations": [0, 90, 20], "other": [0, 0, 50]}
    moments = [Moment("forward", 0, {"parameters": 10, "inputs": 5}),
               Moment("loss", None, {"parameters": 10, "activations": 80, "logits": 20})]
    both = Comparison(moments, [0, 2], StepMemory(kinds, 1, [0, 1, 2]))
    assert both.found == [10, 80] and both.errors("forward") == [0.05]
    assert both.errors("forward", "loss") == [0.05, 0.3] and both.errors("update") == []
    assert both.peak_moment() == moments[0]


def test_every_kind_is_in_one_group():
    grouped = [kind for kinds in SAME_KINDS.values() for kind in kinds]
    assert set(grouped) == set(KINDS) | set(timeline.KINDS)
    assert len(grouped) == len(set(grouped))


def test_the_name_says_what_the_formula_is_of():
    of = {"batch": 8, "model": 1}
    step = step_of("v5e-8 (8, 1) 1024 parts=4 checkpoint=True", of)
    assert (step.rows, step.microbatch, step.remat, step.config.layers) == (1024, 32, "all", 6)
    step = step_of("v5e-8 (8, 1) 256 row=fully_sharded model=MiniGPT", of)
    assert isinstance(step.config, MiniGPTConfig) and step.plan.is_fully_sharded
    assert step_of("v2-8 none 64 embed=512", {}).config.hidden == 2048
