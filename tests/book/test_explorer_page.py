"""The sharding explorer: its JavaScript gives what Python gives, and its form shows that."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
from browsers import CHROMIUM

from meshbook.costs.devices import DEVICES
from meshbook.drawing import svg
from meshbook.drawing.torus import AXES
from meshbook.models import MiniGPTConfig, ViTConfig
from meshbook.planning.estimates import PRESETS, estimate
from meshbook.planning.explorer import layer_exchanges, notation, step_total, tensors

STATIC = Path(__file__).resolve().parents[2] / "book" / "_static"
MODELS = {"ViT": ViTConfig(), "MiniGPT": MiniGPTConfig()}
MESHES = ((1, 1), (8, 1), (4, 2), (2, 4), (1, 8), (64, 1), (16, 4), (1, 16), (3, 2))
V5E = DEVICES["TPU v5e"]

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium on the PATH")


def sizes_of(config):
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)
            if field.type in ("int", int)}


@pytest.fixture
def tab(browser):
    context = browser.new_context(viewport={"width": 390, "height": 800})
    yield context.new_page()
    context.close()


@pytest.fixture
def page(tab, tmp_path):
    """A page with the explorer alone: (tab, its address, what went wrong)."""
    colours = [[each, svg.ink(each)] for each in svg.DEVICES]
    axes = dict(zip(("batch", "model"), AXES, strict=True))
    scripts = [f"const meshbookColours = {json.dumps(colours)};",
               f"const meshbookAxes = {json.dumps(axes)};"]
    scripts += [(STATIC / name).read_text("utf8")
                for name in ("form-elements.js", "calculator.js", "explorer.js",
                             "explorer-form.js")]
    style = (STATIC / "meshbook.css").read_text("utf8")
    path, wrong = tmp_path / "explorer.html", []
    path.write_text(f"<!doctype html><meta charset=utf-8><style>{style}</style>"
                    "<div id=explorer></div>" + "".join(f"<script>{each}</script>"
                                                        for each in scripts), "utf8")
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on("console", lambda message: wrong.append(message.text))
    tab.goto(path.as_uri())
    yield tab, path.as_uri()
    assert wrong == []


def in_python(config, preset, mesh, batch):
    try:
        expected = estimate(config, preset, mesh, batch, V5E)
    except ValueError as error:
        return str(error).partition(":")[0]
    exchanges = layer_exchanges(config, preset, mesh, batch)
    total = step_total(exchanges, config.layers)
    assert {key: each.bytes for key, each in total.items()} == {
        key: each.bytes for key, each in expected.traffic.items()}
    return {
        "tensors": sorted([each.layer, each.name, list(each.shape), list(each.spec),
                           list(each.held), each.bytes, each.is_parameter]
                          for each in tensors(config, preset, mesh, batch)),
        "exchanges": sorted(map(list, exchanges), key=str),
        "moved": {f"{kind} along {axis}": each.bytes for (kind, (axis,)), each in total.items()},
        "traffic": sorted([kind, axis, each.bytes, expected.traffic.wire(axis, kind=kind)]
                          for (kind, (axis,)), each in expected.traffic.items()),
        "held": expected.memory["parameters"],
    }


def test_the_script_gives_what_python_gives(tab):
    for name in ("calculator.js", "explorer.js"):
        tab.add_script_tag(path=STATIC / name)
    asked = [*itertools.product(MODELS, PRESETS, MESHES, [1024]),
             ("ViT", "data_parallel", (4, 2), 7)]
    choices = [{"model": model, "sizes": sizes_of(MODELS[model]), "preset": preset, "rows": rows,
                "across": across, "batch": batch, "device": dataclasses.asdict(V5E)}
               for model, preset, (rows, across), batch in asked]
    answers = tab.evaluate(
        """choices => choices.map(choice => {
          try {
            const {tensors, exchanges, moved, traffic, held} = meshbookExplorer.explore(choice);
            return {moved, traffic, held,
              tensors: tensors.map(({layer, name, shape, spec, held, bytes, isParameter}) =>
                [layer, name, shape, spec, held, bytes, isParameter]),
              exchanges: exchanges.map(({layer, when, what, kind, axis, count, bytes}) =>
                [layer, when, what, kind, axis, count, bytes])};
          } catch (error) { return error.message; }
        })""", choices)
    refused = 0
    for (model, preset, shape, batch), answer in zip(asked, answers, strict=True):
        mesh = dict(zip(("batch", "model"), shape))
        expected = in_python(MODELS[model], preset, mesh, batch)
        if isinstance(answer, dict):
            for name in ("tensors", "exchanges", "traffic"):
                answer[name] = sorted(answer[name], key=str if name == "exchanges" else None)
            assert isinstance(expected, dict), (model, preset, shape, expected)
            traffic = expected.pop("traffic")
            assert [each[:3] for each in answer["traffic"]] == [each[:3] for each in traffic]
            assert [each[3] for each in answer.pop("traffic")] == pytest.approx(
                [each[3] for each in traffic], rel=1e-12)
        else:
            refused += 1
        assert answer == expected, (model, preset, shape)
    assert 5 < refused < len(asked) / 2


@pytest.mark.parametrize("model, preset, rows, across", [
    ("ViT", "tensor_parallel", 4, 2), ("MiniGPT", "fully_sharded", 8, 8),
    ("MiniGPT", "tensor_parallel", 2, 4)])
def test_the_form_shows_every_tensor_its_pieces_and_all_that_is_communicated(
        page, model, preset, rows, across):
    tab, _ = page
    for label, value in {"Model": model, "Sharding": preset, "Mesh: batch": str(rows),
                         "Mesh: model": str(across)}.items():
        tab.get_by_label(label).first.select_option(value)
    mesh, config = {"batch": rows, "model": across}, MODELS[model]
    tab.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    key = lambda card: (card["layer"], card["code"], 'P("batch"' in card["text"])
    cards = {key(card): card for card in tab.evaluate(
        """() => [...document.querySelectorAll(".explorer-tensor")].map(card => ({
          layer: card.closest("section").querySelector("h3").textContent,
          code: card.querySelector("code").textContent, text: card.innerText,
          devices: [...card.querySelectorAll("[data-device]")].map(each =>
            [Number(each.dataset.device), each.getAttribute("fill")])}))""")}
    layers = {"embedding": "Embedding", "block": f"One of {config.layers} blocks",
              "head": "Head and loss"}
    found = tensors(config, preset, mesh, 1024)
    assert len(cards) == len(found)
    for each in found:
        card = cards[layers[each.layer], notation(each), each.spec[0] == "batch"]
        held = " × ".join(f"{size:,}" for size in each.held)
        assert f"→ ({held})" in card["text"] and f"{each.bytes:,} bytes per device" in card["text"]
        assert sorted(card["devices"]) == sorted(
            [device, svg.device_colour(device)] for device in range(rows * across))
    shown = tab.locator(".explorer-output").inner_text()
    for each in layer_exchanges(config, preset, mesh, 1024):
        times = "" if each.count is None else f"{each.count:,} × "
        joined = ", joined with others" if each.count is None else ""
        assert (f"{each.when}: {each.what}\t{times}{each.kind} along {each.axis}{joined}\t"
                f"{each.bytes:,}") in shown
    traffic = estimate(config, preset, mesh, 1024, V5E).traffic
    for (kind, (axis,)), moved in traffic.items():
        wire = traffic.wire(axis, kind=kind)
        assert f"{kind} along {axis}\t{moved.bytes:,}\t{wire:,.0f}" in shown
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize("model, preset", [
    ("ViT", "tensor_parallel"), ("MiniGPT", "fully_sharded"), ("ViT", "data_parallel")])
def test_the_bars_are_all_that_a_step_communicates(page, model, preset):
    tab, _ = page
    tab.get_by_label("Model").first.select_option(model)
    tab.get_by_label("Sharding").select_option(preset)
    bars = tab.evaluate("""() => [...document.querySelectorAll("[data-what]")].map(each => [
      each.dataset.layer, each.dataset.what, Number(each.dataset.bytes),
      Number(each.getAttribute("width")), each.getAttribute("fill")])""")
    config, mesh = MODELS[model], {"batch": 4, "model": 2}
    exchanges = layer_exchanges(config, preset, mesh, 1024)
    for (kind, (axis,)), moved in step_total(exchanges, config.layers).items():
        assert sum(bar[2] for bar in bars if bar[1] == f"{kind} along {axis}") == moved.bytes
    blocks = [each for each in exchanges if each.layer == "block"]
    assert sum(bar[2] for bar in bars if bar[0] == f"All {config.layers} blocks") == sum(
        config.layers * each.bytes for each in blocks)
    most, colours = max(bar[2] for bar in bars), dict(zip(("batch", "model"), AXES))
    for _, what, size, width, fill in bars:
        assert width == pytest.approx(max(1, 180 * size / most))
        assert fill == colours[what.rpartition(" ")[2]]


def test_a_device_alone_has_no_bars(page):
    tab, _ = page
    tab.get_by_label("Mesh: batch").select_option("1")
    tab.get_by_label("Mesh: model").select_option("1")
    assert tab.locator("[data-what]").count() == 0
    assert tab.locator(".explorer-tensor").count() > 0


def test_a_piece_lies_where_the_spec_says(page):
    tab, _ = page
    boxes = dict(tab.evaluate("""() => [...document.querySelectorAll(".explorer-tensor")]
      .find(card => card.innerText.startsWith("query")).querySelectorAll("[data-device]").values()
      .map(each => [Number(each.dataset.device), [each.getAttribute("x"), each.getAttribute("y")]
        .map(Number)]).toArray()"""))
    for device in range(8):  # query[B_batch, T, H_model, K]: batch downwards, model to the right
        row, column = divmod(device, 2)
        assert boxes[device] == [1 + 75 * column, 1 + 16 * row]


def test_the_address_keeps_the_choice_and_the_keyboard_makes_it(page):
    tab, address = page
    tab.get_by_label("Sharding").focus()
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("Tab")
    tab.keyboard.press("ArrowDown")
    assert tab.url.endswith("#model=ViT&preset=fully_sharded&rows=8&across=2&batch=1024")
    shown = tab.locator("#explorer").inner_text()
    other = tab.context.new_page()
    other.goto(tab.url)
    assert other.locator("#explorer").inner_text() == shown
    other.goto(f"{address}#model=none&rows=5&batch=512")
    assert other.get_by_label("Model").first.input_value() == "ViT"
    assert other.get_by_label("Mesh: batch").input_value() == "4"
    assert other.get_by_label("Batch, all devices").input_value() == "512"


@pytest.mark.parametrize("label, value, words", [
    ("Mesh: model", "16", "heads=8 does not divide over mesh axis 'model' of size 16"),
    ("Mesh: batch", "64", "A mesh of 64 by 2 has 128 devices; 64 can be drawn"),
    ("Batch, all devices", "6", "batch=6 does not divide over mesh axis 'batch' of size 4"),
    ("Batch, all devices", "", "Batch, all devices is a whole number from 1; found nothing")])
def test_what_cannot_be_is_said_and_nothing_is_drawn(page, label, value, words):
    tab, _ = page
    field = tab.get_by_label(label)
    field.select_option(value) if label.startswith("Mesh") else field.fill(value)
    assert tab.locator("[aria-live]").inner_text() == words
    assert tab.locator(".explorer-tensor").count() == 0


def test_work_that_is_done_several_times_is_said(page):
    tab, _ = page
    verdict = tab.locator("[aria-live]")
    assert verdict.inner_text().startswith("Each of 8 devices holds 21.5 MB of the 42.8 MB")
    assert "same work" not in verdict.inner_text()
    tab.get_by_label("Sharding").select_option("data parallel")
    assert verdict.inner_text().endswith("Along model, 2 devices do the same work.")
