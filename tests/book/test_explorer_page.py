"""The form of the sharding explorer shows what the functions of Python give."""

import json
import math

import pytest
from browsers import CHROMIUM
from costs_in_js import STATIC
from meshbook_site import EXPLORER

from meshbook.costs import page as data_of
from meshbook.costs.explorer import (
    MODELS, activations, exchanges, explored, known_presets, notation, parameters
)
from meshbook.costs.plans import PRESETS, Plan
from meshbook.costs.traffic import step_traffic
from meshbook.drawing import svg
from meshbook.drawing.torus import NAMED

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium on the PATH")


@pytest.fixture
def page(browser, tmp_path):
    """A page with the explorer alone: (tab, its address)."""
    colours = [[each, svg.ink(each)] for each in svg.DEVICES]
    given = {"Colours": colours, "Axes": NAMED, "Costs": data_of.data()}
    scripts = [f"const meshbook{name} = {json.dumps(value)};" for name, value in given.items()]
    scripts += [(STATIC / name).read_text("utf8") for name in EXPLORER]
    style = (STATIC / "meshbook.css").read_text("utf8")
    path, wrong = tmp_path / "explorer.html", []
    path.write_text(f"<!doctype html><meta charset=utf-8><style>{style}</style>"
                    "<div id=explorer></div>" + "".join(f"<script>{each}</script>"
                                                        for each in scripts), "utf8")
    context = browser.new_context(viewport={"width": 390, "height": 800})
    tab = context.new_page()
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on("console", lambda message: wrong.append(message.text))
    tab.goto(path.as_uri())
    yield tab, path.as_uri()
    context.close()
    assert wrong == []


def chosen(tab, which, preset, **fields):
    """Choose in the form; the Step of the same choice."""
    labels = {"microbatches": "Microbatches", "schedule": "Schedule of stages"}
    tab.get_by_label("Model").first.select_option(which)
    tab.get_by_label("Sharding").select_option(preset)
    for name, value in fields.items():
        field = tab.get_by_label(labels.get(name, f"Mesh: {name}"))
        field.fill(str(value)) if name == "microbatches" else field.select_option(str(value))
    start = {"batch": 4, "model": 2} | fields
    return explored(MODELS[which][0], Plan(**start, rules=preset), 1024)


CHOICES = [
    ("ViT", "tensor_parallel", {}), ("MiniGPT", "fully_sharded", {"batch": 8, "model": 8}),
    ("Decoder", "zero1", {"batch": 2, "stage": 2, "model": 4, "microbatches": 4}),
    ("Decoder", "fully_sharded_again", {"batch": 2, "context": 4}),
    ("Decoder", "zero2", {"batch": 16, "model": 1}),
    ("JAXformer", "fully_sharded_kept", {"batch": 2, "expert": 4}),
    ("JAXformer", "tensor_parallel", {"batch": 1, "expert": 2, "stage": 4, "schedule": "gpipe"})]


@pytest.mark.parametrize("model, preset, fields", CHOICES)
def test_the_form_shows_every_tensor_its_pieces_and_all_that_is_sent(page, model, preset, fields):
    tab, _ = page
    step = chosen(tab, model, preset, **fields)
    tab.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    cards = tab.evaluate(
        """() => [...document.querySelectorAll(".explorer-tensor")].map(card => ({
          part: card.closest("section").querySelector("h3").textContent,
          code: card.querySelector("code").textContent, text: card.innerText,
          devices: [...card.querySelectorAll("[data-device]")].map(each =>
            [Number(each.dataset.device), each.getAttribute("fill")])}))""")
    found, devices = parameters(step) + activations(step), math.prod(step.plan.mesh.values())
    moments = {(each.part, each.name): each for each in parameters(step, "moments")}
    assert len(cards) == len(found)
    titles = {}
    for each in found:
        card = next(card for card in cards if card["code"] == notation(each)
                    and titles.setdefault(each.part, card["part"]) == card["part"])
        cards.remove(card)
        held = " × ".join(f"{size:,}" for size in each.held)
        assert f"→ ({held})\n{each.bytes:,} bytes per device" in card["text"]
        assert sorted(card["devices"]) == sorted(
            [device, svg.device_colour(device)] for device in range(devices))
        several = f"{each.arrays} such arrays" if each.is_parameter else (
            f"in each of {each.arrays} layers")
        assert (several in card["text"]) == (each.arrays > 1)
        also = moments.get((each.part, each.name)) if each.is_parameter else None
        assert ("each moment" in card["text"]) == bool(also and also.spec != each.spec)
        assert not also or also.spec == each.spec or f", {also.bytes:,} bytes" in card["text"]
    for part, layers in step.layers.items():
        per = f", {layers} in each stage" if step.plan.stage > 1 else ""
        assert titles[part] == f"{layers * step.plan.stage} {part}{per}"
    shown = tab.locator(".explorer-output").inner_text()
    for each in exchanges(step):
        times = f"{each.count:,} × " if each.count else ""
        note = {None: ", number open", 0: ", joined with others"}.get(each.count, "")
        assert (f"{each.when}: {each.what}\t{times}{each.kind} along {', '.join(each.axes)}{note}\t"
                f"{each.bytes:,}") in shown
    traffic = step_traffic(step)
    for (kind, axes), moved in traffic.items():
        wire = traffic.wire(*axes, kind=kind)
        assert f"{kind} along {', '.join(axes)}\t{moved.bytes:,}\t{wire:,.0f}" in shown
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize("model, preset, fields", CHOICES)
def test_the_bars_are_all_that_a_step_sends(page, model, preset, fields):
    tab, _ = page
    step = chosen(tab, model, preset, **fields)
    bars = tab.evaluate("""() => [...document.querySelectorAll("[data-what]")].map(each => [
      each.dataset.part, each.dataset.what, Number(each.dataset.bytes),
      Number(each.getAttribute("width")), each.getAttribute("fill")])""")
    for (kind, axes), moved in step_traffic(step).items():
        name = f"{kind} along {', '.join(axes)}"
        assert sum(bar[2] for bar in bars if bar[1] == name) == moved.bytes
    parts = list(dict.fromkeys(bar[0] for bar in bars))
    lines = exchanges(step)
    for part, title in zip(dict.fromkeys(each.part for each in lines), parts, strict=True):
        assert sum(bar[2] for bar in bars if bar[0] == title) == sum(
            each.bytes for each in lines if each.part == part)
    most = max(bar[2] for bar in bars)
    for _, what, size, width, fill in bars:
        assert width == pytest.approx(max(1, 120 * size / most))
        assert fill == NAMED[what.partition(" along ")[2].partition(",")[0]]


def test_a_device_alone_has_no_bars(page):
    tab, _ = page
    chosen(tab, "ViT", "tensor_parallel", batch=1, model=1)
    assert tab.locator("[data-what]").count() == 0
    assert tab.locator(".explorer-tensor").count() > 0


def boxes_of(tab, name):
    """{device: where its square begins} on the card of a tensor."""
    return dict(tab.evaluate("""name => [...document.querySelectorAll(".explorer-tensor")]
      .find(card => card.innerText.startsWith(name)).querySelectorAll("[data-device]").values()
      .map(each => [Number(each.dataset.device), [each.getAttribute("x"), each.getAttribute("y")]
        .map(Number)]).toArray()""", name))


def test_a_piece_lies_where_the_spec_says(page):
    tab, _ = page
    boxes = boxes_of(tab, "mlp/w_in makes [B_batch, T, F_model]")
    for device in range(8):  # batch downwards, model to the right
        row, column = divmod(device, 2)
        assert boxes[device] == [1 + 75 * column, 1 + 16 * row]
    chosen(tab, "Decoder", "fully_sharded", batch=2, stage=2, model=2)
    boxes = boxes_of(tab, "mlp/w_out[L_stage, F_model, D_batch]")
    for device in range(8):  # devices count along model first, then stage, then batch
        batch, stage, model = device // 4, device // 2 % 2, device % 2
        assert boxes[device] == [1 + 75 * batch, 1 + 16 * (2 * stage + model)]
    boxes = boxes_of(tab, "token[V_stage_model, D_batch]")
    assert boxes[3] == [1, 1 + 16 * 3] and boxes[6] == [1 + 75, 1 + 16 * 2]


def test_the_mesh_is_drawn_with_its_last_axis_to_the_right(page):
    tab, _ = page
    chosen(tab, "Decoder", "tensor_parallel", batch=2, stage=2, model=4)
    figure = tab.locator(".explorer-mesh").first
    assert figure.inner_text().endswith(
        "16 devices: batch, then stage downwards, model to the right")
    places = figure.evaluate("""figure => [...figure.querySelectorAll("text")].map(each =>
      [each.textContent, each.getAttribute("x"), each.getAttribute("y")].map(Number))""")
    assert sorted(places) == [
        [device, 28 * (device % 4 + 0.5), 28 * (device // 4 + 0.5) + 4] for device in range(16)]


def test_a_model_has_the_fields_of_its_axes_and_its_presets(page):
    tab, _ = page
    for name, (config, axes) in MODELS.items():
        tab.get_by_label("Model").first.select_option(name)
        labels = tab.locator(".calculator-field:visible span").all_inner_texts()
        assert [each for each in labels if each.startswith("Mesh")] == [
            f"Mesh: {axis}" for axis in axes]
        assert "Microbatches" in labels
        offered = tab.get_by_label("Sharding").locator("option").evaluate_all(
            "all => all.map(each => each.value)")
        assert offered == [rules for rules in PRESETS if any(
            rules in known_presets(config, Plan(stage=stage))[1] for stage in (1, 2))]
    tab.get_by_label("Model").first.select_option("Decoder")
    for label, axis in ("Schedule of stages", "stage"), ("Keys of other devices", "context"):
        assert not tab.get_by_label(label).is_visible()
        tab.get_by_label(f"Mesh: {axis}").select_option("2")
        assert tab.get_by_label(label).is_visible()


def test_the_address_keeps_the_choice_and_the_keyboard_makes_it(page):
    tab, address = page
    tab.get_by_label("Sharding").focus()
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("Tab")
    tab.keyboard.press("ArrowDown")
    assert tab.url.endswith("#model=ViT&preset=fully_sharded&rows=8&across=2&batch=1024"
                            "&microbatches=1")
    chosen(tab, "Decoder", "zero1", batch=2, stage=2, microbatches=4, schedule="lockstep")
    assert tab.url.endswith("#model=Decoder&preset=zero1&rows=2&stage=2&context=1&across=2"
                            "&batch=1024&microbatches=4&schedule=lockstep")
    shown = tab.locator("#explorer").inner_text()
    other = tab.context.new_page()
    other.goto(tab.url)
    assert other.locator("#explorer").inner_text() == shown
    other.goto(f"{address}#model=none&rows=5&batch=512&preset=zero1")
    assert other.get_by_label("Model").first.input_value() == "ViT"
    assert other.get_by_label("Sharding").input_value() == "tensor_parallel"
    assert other.get_by_label("Mesh: batch").input_value() == "4"
    assert other.get_by_label("Batch, all devices").input_value() == "512"


@pytest.mark.parametrize("model, label, value, words", [
    ("ViT", "Mesh: model", "16", "heads=8 does not divide over 16 devices"),
    ("ViT", "Mesh: batch", "64", "A mesh of 64 by 2 has 128 devices; 64 can be drawn"),
    ("ViT", "Batch, all devices", "6",
     "rows of a microbatch=6 does not divide over 4 devices"),
    ("ViT", "Batch, all devices", "", "Batch, all devices is a whole number from 1; found nothing"),
    ("Decoder", "Mesh: stage", "8", "periods of layers=4 does not divide over 8 devices"),
    ("Decoder", "Microbatches", "3", "1024 rows do not divide into 3 microbatches"),
    ("JAXformer", "Mesh: model", "8", "heads=12 does not divide over 8 devices")])
def test_what_cannot_be_is_said_and_nothing_is_drawn(page, model, label, value, words):
    tab, _ = page
    tab.get_by_label("Model").first.select_option(model)
    field = tab.get_by_label(label)
    field.select_option(value) if label.startswith("Mesh") else field.fill(value)
    assert tab.locator("[aria-live]").inner_text() == words
    assert tab.locator(".explorer-tensor").count() == 0


def test_a_preset_whose_bytes_are_not_known_is_refused_in_the_words_of_python(page):
    tab, _ = page
    with pytest.raises(ValueError) as refused:
        chosen(tab, "Decoder", "sequence_parallel", stage=2)
    assert tab.locator("[aria-live]").inner_text() == str(refused.value)


def test_what_a_device_holds_and_work_that_is_done_several_times_are_said(page):
    tab, _ = page
    verdict = tab.locator("[aria-live]")
    assert verdict.inner_text().startswith("Each of 8 devices holds 21.5 MB of the 42.8 MB")
    assert "same work" not in verdict.inner_text()
    chosen(tab, "ViT", "data_parallel")
    assert verdict.inner_text().endswith("Along model, 2 devices do the same work.")
    step = chosen(tab, "Decoder", "zero1", batch=4, model=2)
    moments = 4 * step.numbers["moments"] / 1e6
    assert f"{moments:.1f} MB of each of Adam's moments" in verdict.inner_text()
