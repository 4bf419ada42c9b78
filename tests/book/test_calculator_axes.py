"""Stages, experts and context in the calculator: its JavaScript gives what Python gives."""

import dataclasses
import itertools
import json
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest
from browsers import CHROMIUM
from test_calculator import sizes_of
from test_calculator_plans import SCRIPTS

from meshbook.costs.devices import DEVICES
from meshbook.drawing.memory_timelines import WORDS, binary
from meshbook.models.decoder import DecoderConfig
from meshbook.models.expert_layers import ExpertSizes
from meshbook.planning.axis_estimates import estimate_context, estimate_experts, estimate_stages
from meshbook.planning.context_costs import METHODS
from meshbook.planning.pipeline_costs import SCHEDULES

STATIC = Path(__file__).resolve().parents[2] / "book" / "_static"
CONFIGS = [DecoderConfig(dropout=0.1, **sizes) for sizes in (
    {}, {"vocabulary": 1000, "tokens": 2048, "embed": 64, "hidden": 200, "heads": 8, "groups": 4,
         "layers": 12, "period": 3, "bias": True, "gated": False, "dtype": jnp.bfloat16},
    {"latent": 32, "rotary": 8, "layers": 8, "period": 2},
    {"remat": "products", "groups": 2}, {"remat": "all", "dtype": jnp.bfloat16})]
MESHES = (1, 1), (8, 1), (1, 4), (2, 4), (3, 2), (16, 8)
ASKED = {
    "stage": [{"schedule": schedule, "microbatches": m} for schedule in SCHEDULES for m in (1, 8)],
    "expert": [{"experts": count, "active": active, "capacity": capacity, "shared": shared}
               for count, active, capacity, shared in (
                   (8, 2, 1.25, 0), (16, 1, 1.0, 72), (4, 5, 2.0, 0), (6, 2, 1.1, 256))],
    "context": [{"method": method} for method in METHODS],
}

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium on the PATH")


def choices():
    for config, mesh, batch, (axis, kinds) in itertools.product(
            CONFIGS, MESHES, (96, 1024), ASKED.items()):
        for kind in kinds:
            yield config, kind, {"axis": axis, "sizes": sizes_of(config), "rows": mesh[0],
                                 "across": mesh[1], "batch": batch, **kind}


def in_python(config, kind, choice):
    axis, batch = choice["axis"], choice["batch"]
    mesh = {"batch": choice["rows"], axis: choice["across"]}
    try:
        if axis == "stage":
            found = estimate_stages(config, mesh, batch, **kind)
        elif axis == "context":
            found = estimate_context(config, mesh, batch, **kind)
        else:
            sizes = ExpertSizes(kind["experts"], kind["active"], kind["shared"], kind["capacity"])
            found = estimate_experts(replace(config, experts=sizes), mesh, batch)
    except ValueError as error:
        return str(error)
    moved = [[each, ", ".join(axes), one.bytes,
              pytest.approx(found.traffic.wire(*axes, kind=each), rel=1e-12)]
             for (each, axes), one in found.traffic.items()]
    return {"memory": found.memory, "peak": found.peak, "traffic": sorted(moved, key=by_name),
            "bubble": found.bubble if found.bubble is None else pytest.approx(found.bubble)}


def by_name(row):
    return row[:2]


@pytest.fixture
def tab(browser):
    context = browser.new_context()
    yield context.new_page()
    context.close()


def test_the_script_gives_what_python_gives(tab):
    for name in "calculator.js", "calculator-decoder.js", "calculator-axes.js":
        tab.add_script_tag(path=STATIC / name)
    asked = list(choices())
    answers = tab.evaluate(
        """choices => choices.map(choice => {
          try { return meshbook.axes.estimate(choice); } catch (error) { return error.message; }
        })""", [choice for *_, choice in asked])
    refused, given = set(), 0
    for (config, kind, choice), answer in zip(asked, answers, strict=True):
        expected = in_python(config, kind, choice)
        if isinstance(answer, str):
            assert answer == expected
            refused.add(answer)
            continue
        answer["traffic"] = sorted(answer["traffic"], key=by_name)
        assert answer == expected, choice
        given += 1
    assert len(refused) > 15 and given > len(asked) / 4


@pytest.fixture
def page(tab, tmp_path):
    """A page with the form alone: the tab, and what went wrong."""
    devices = {name: dataclasses.asdict(each) for name, each in DEVICES.items()}
    scripts = [f"const meshbookDevices = {json.dumps(devices)};",
               f"const meshbookParts = {json.dumps(WORDS)};"]
    scripts += [(STATIC / name).read_text("utf8") for name in (
        "form-elements.js", *SCRIPTS, "calculator-plans-form.js", "calculator-ranking.js",
        "calculator-timeline.js", "calculator-limits.js", "calculator-form.js")]
    style, path = (STATIC / "meshbook.css").read_text("utf8"), tmp_path / "calculator.html"
    path.write_text(f"<!doctype html><meta charset=utf-8><style>{style}</style>"
                    "<div id=calculator></div>" + "".join(f"<script>{each}</script>"
                                                          for each in scripts), "utf8")
    wrong = []
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.goto(path.as_uri())
    yield tab
    assert wrong == []


def choose(page, **fields):
    for name, value in fields.items():
        field = page.locator(f"[name={name}]")
        if field.evaluate("each => each.tagName") == "SELECT":
            field.select_option(str(value))
        else:
            field.fill(str(value))


def rows_of(page, caption):
    lines = page.locator("table", has_text=caption).locator("tbody tr").all_inner_texts()
    return {line.split("\t")[0].strip(): line.split("\t")[1:] for line in lines}


def fields(page):
    """The fields that belong to an axis and are seen."""
    names = "schedule", "microbatches", "method"
    return [name for name in names if page.locator(f"[name={name}]").is_visible()]


def shown_is(page, expected):
    assert binary(expected.peak) in page.locator(".calculator-verdict").inner_text()
    memory = {WORDS[kind][0]: f"{size:,}" for kind, size in expected.memory.items() if size}
    assert {what: cells[0] for what, cells in rows_of(page, "Memory of each device").items()
            } == memory
    traffic = expected.traffic
    assert rows_of(page, "Collectives of a step") == {
        f"{kind} along {', '.join(axes)}": [f"{each.bytes:,}",
                                            f"{traffic.wire(*axes, kind=kind):,.0f}"]
        for (kind, axes), each in traffic.items()}


def test_the_form_has_the_fields_of_the_axis_and_shows_what_python_says(page):
    config = DecoderConfig(dropout=0.1)
    assert fields(page) == []
    choose(page, model="Decoder", preset="stage", batch=512, schedule="zero_bubble")
    assert fields(page) == ["schedule", "microbatches"]
    assert page.get_by_label("Mesh: stage").input_value() == "2"
    shown_is(page, estimate_stages(config, {"batch": 4, "stage": 2}, 512, "zero_bubble", 8))
    assert page.get_by_text("Bubble: 4% of the time of each device.").is_visible()
    assert page.locator(".calculator-verdict").inner_text().startswith("Needs at least ")
    choose(page, preset="expert", capacity=2.5, experts=16, across=8)
    assert fields(page) == []
    sizes = ExpertSizes(16, 2, capacity=2.5)
    shown_is(page, estimate_experts(replace(config, experts=sizes), {"batch": 4, "expert": 8}, 512))
    choose(page, preset="context", method="gather", tokens=4096)
    assert fields(page) == ["method"]
    longer = replace(config, tokens=4096)
    shown_is(page, estimate_context(longer, {"batch": 4, "context": 8}, 512, "gather"))
    address = page.url
    other = page.context.new_page()
    other.goto(address)
    shown_is(other, estimate_context(longer, {"batch": 4, "context": 8}, 512, "gather"))
    choose(page, preset="tensor_parallel")
    assert fields(page) == [] and page.get_by_label("Mesh: model").is_visible()
    assert "Counted without the experts" in page.locator(".calculator-output").inner_text()


@pytest.mark.parametrize("changes, words", [
    ({"preset": "stage", "across": 3}, "periods of layers=4 does not divide over 3 stages"),
    ({"preset": "expert", "experts": 8, "capacity": 0},
     "Capacity factor is a number above 0; found 0"),
    ({"preset": "expert"}, "Experts E is a whole number from 1; found 0"),
    ({"preset": "expert", "experts": 8, "active": 9},
     "a token goes to 1 to 8 of 8 experts; found active=9"),
    ({"preset": "context", "across": 3}, "tokens=256 does not divide over 3 devices of the context"),
])
def test_what_cannot_be_is_said_in_the_form(page, changes, words):
    choose(page, model="Decoder", batch=512)
    choose(page, **changes)
    assert page.locator(".calculator-output").inner_text() == words
