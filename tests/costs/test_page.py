"""What a page is given is JSON; what it is told of plans that no model here has is a sentence."""
import json
from dataclasses import replace

import pytest

from meshbook.costs import page
from meshbook.costs.devices import DEVICES
from meshbook.costs.machines import Machine
from meshbook.costs.plans import PRESETS, Plan
from meshbook.costs.ranking import impossible
from meshbook.costs.seconds import step_seconds
from meshbook.costs.step import describe
from meshbook.models import MiniGPTConfig, ViTConfig

ONE = Machine(DEVICES["H100"], (1,)).groups(Plan().sizes)


def test_the_data_of_a_page_is_json():
    data = page.data()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert set(data["rules"]) == set(PRESETS)
    assert set(data["rules"]["zero1"]) == {
        "", "expert", "stage", "context", "expert stage", "expert context", "stage context",
        "expert stage context"}


@pytest.mark.parametrize("plan, words", [
    (Plan(remat="products"), "remat is one of none, all; found 'products'"),
    (Plan(context=2), "stages and a context have programs for the decoder only")])
def test_a_plan_for_which_a_model_has_no_program_is_refused(plan, words):
    assert impossible(MiniGPTConfig(), plan, 8).startswith(words)


def test_random_numbers_of_a_device_without_a_clock_take_no_known_time():
    device, config = DEVICES["H100"], ViTConfig()
    with pytest.raises(ValueError, match="random numbers of dropout take on H100"):
        step_seconds(describe(config, Plan(), 8), device, ONE)
    without = describe(replace(config, dropout=0.0), Plan(), 8)
    assert step_seconds(without, device, ONE)["random"] == 0
