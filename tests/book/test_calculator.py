"""The calculator: its JavaScript gives what Python gives, and its form what its JavaScript gives."""

import dataclasses
import itertools
import re
from pathlib import Path

import jax.numpy as jnp
import pytest
from browsers import CHROMIUM

from meshbook.costs.devices import DEVICES
from meshbook.drawing.memory_timelines import WORDS, binary
from meshbook.models import MiniGPTConfig, ViTConfig
from meshbook.models.decoder import DecoderConfig
from meshbook.planning.decoder_costs import PRESETS as DECODER_PRESETS
from meshbook.planning.estimates import PRESETS, estimate
from meshbook.planning.memory_timeline import highest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "_build" / "html" / "book" / "calculator.html"
SIZES = {
    "ViT": (ViTConfig, ({}, {"image": 48, "patch": 6, "classes": 100, "embed": 96, "hidden": 200,
                             "heads": 4, "layers": 3}, {"embed": 1024, "hidden": 4096, "heads": 16,
                                                        "layers": 24, "patch": 2})),
    "MiniGPT": (MiniGPTConfig, ({}, {"vocabulary": 250, "tokens": 24, "embed": 40, "hidden": 96,
                                     "heads": 4, "layers": 2}, {"embed": 1536, "hidden": 6144,
                                                                "heads": 12, "layers": 48})),
    "Decoder": (DecoderConfig, (
        {}, {"vocabulary": 250, "tokens": 32, "embed": 40, "hidden": 96, "heads": 4, "layers": 2,
             "groups": 2, "bias": True, "remat": "products", "dtype": jnp.bfloat16},
        {"embed": 64, "hidden": 80, "heads": 8, "layers": 6, "period": 3, "latent": 24, "rotary": 6,
         "tokens": 40, "bias": True, "gated": False},
        {"latent": 16, "heads": 4, "rotary": 10, "remat": "attention"},
        {"latent": 16, "remat": "all", "groups": 0, "dtype": jnp.bfloat16},
        {"latent": 16, "rotary": 8, "bias": True, "by_row": True, "remat": "none"},
        {"by_row": True, "remat": "products"}, {"by_row": True, "remat": "all"})),
}
JAXFORMER = DecoderConfig.jaxformer(dtype=jnp.bfloat16, remat="all", by_row=True)
MESHES = ((1, 1), (8, 1), (1, 8), (4, 2), (2, 4), (3, 5), (256, 2))
BATCHES = (8, 15, 1024, 65_536)

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium on the PATH")


def presets_of(model):
    return DECODER_PRESETS if model == "Decoder" else PRESETS


def sizes_of(config):
    """A config as the script has it."""
    sizes = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)
             if field.type in ("int", int)}
    if isinstance(config, DecoderConfig):
        sizes |= {"gated": int(config.gated), "bias": int(config.bias), "remat": config.remat,
                  "byRow": int(config.by_row),
                  "number": jnp.dtype(config.dtype).itemsize}
    return sizes


def choices():
    for model, (Config, kinds) in SIZES.items():
        for own, preset, mesh, batch in itertools.product(kinds, presets_of(model), MESHES,
                                                          BATCHES):
            config = Config(**own, **({"dropout": 0.1} if model == "Decoder" else {}))
            device = list(DEVICES.values())[(batch + sum(mesh)) % len(DEVICES)]
            yield config, device, {
                "model": model, "sizes": sizes_of(config), "preset": preset, "rows": mesh[0],
                "across": mesh[1], "batch": batch,
                "checkpointed": model != "Decoder" and (batch + mesh[0]) % 3 == 0,
                "device": dataclasses.asdict(device)}


def in_python(config, device, choice):
    try:
        mesh = {"batch": choice["rows"], "model": choice["across"]}
        found = estimate(config, choice["preset"], mesh, choice["batch"], device,
                         choice["checkpointed"])
    except ValueError as error:
        return str(error).partition(":")[0]
    traffic = found.traffic
    moved = [[kind, ", ".join(axes), each.bytes,
              pytest.approx(traffic.wire(*axes, kind=kind), rel=1e-12)]
             for (kind, axes), each in traffic.items()]
    timeline = [moment._asdict() for moment in found.timeline]
    return found._asdict() | {"traffic": sorted(moved, key=lambda each: each[:2]),
                              "timeline": timeline}


@pytest.fixture
def tab(browser):
    context = browser.new_context()
    yield context.new_page()
    context.close()


def add_scripts(tab):
    for name in "calculator.js", "calculator-decoder.js":
        tab.add_script_tag(path=ROOT / "book" / "_static" / name)


def test_the_script_gives_what_python_gives(tab):
    add_scripts(tab)
    asked = list(choices())
    answers = tab.evaluate(
        """choices => choices.map(choice => {
          try { return meshbook.estimate(choice); } catch (error) { return error.message; }
        })""", [choice for *_, choice in asked])
    refused, kinds = 0, set()
    for (config, device, choice), answer in zip(asked, answers, strict=True):
        expected = in_python(config, device, choice)
        if isinstance(expected, str):
            assert answer == expected
            refused += 1
            continue
        answer["traffic"] = sorted(answer["traffic"], key=lambda each: each[:2])
        for name in ("memory", "timeline", "peak", "traffic"):
            assert answer[name] == expected[name], (name, choice)
        kinds.add((choice["model"], choice["preset"], choice["checkpointed"]))
        assert float(answer["useful"]) == float(expected["useful"])  # beyond 2^53 a double is both
        for name in ("factor", "flops", "floors"):
            assert answer[name] == pytest.approx(expected[name], rel=1e-12), (name, choice)
    assert 100 < refused < len(asked) - 100
    assert len(kinds) == 2 * len(PRESETS) * 2 + len(DECODER_PRESETS)  # checkpointed and not


def test_a_form_that_makes_no_sense_is_refused_in_words(tab):
    add_scripts(tab)
    first = {choice["model"]: choice for *_, choice in reversed(list(choices()))}
    for model, change, words in [
            ("ViT", {"heads": 5}, "embed=384 is not a multiple of heads=5"),
            ("ViT", {"patch": 5}, "image=32 is not a multiple of patch=5"),
            ("Decoder", {"groups": 3}, "heads=8 is not a multiple of groups=3"),
            ("Decoder", {"period": 3}, "layers=4 is not a multiple of period=3"),
            ("Decoder", {"rotary": 8}, "rotary=8 is for a latent"),
            ("Decoder", {"latent": 8, "rotary": 7}, "rotary positions turn pairs of numbers"),
            ("Decoder", {"latent": 8, "groups": 4},
             "keys and values come from groups or from a latent")]:
        sizes = first[model]["sizes"] | change
        assert words == tab.evaluate("""choice => {
          try { meshbook.estimate(choice); } catch (error) { return error.message; } }""",
                                     first[model] | {"sizes": sizes})


site = pytest.mark.skipif(not PAGE.exists(), reason="no site in _build/html: make book")


@site
def test_the_form_shows_what_the_script_says_and_the_address_keeps_it(tab):
    tab.goto(PAGE.as_uri())
    verdict = tab.locator(".calculator-verdict")
    before = verdict.inner_text()
    assert before.startswith("Fits: ")
    tab.get_by_label("Batch, all devices").fill("65536")
    assert verdict.inner_text().startswith("Does not fit: ") and verdict.inner_text() != before
    tab.get_by_label("Sharding").select_option("fully sharded")
    cells = tab.locator("table", has_text="Collectives of a step").inner_text()
    expected = estimate(ViTConfig(), "fully_sharded", {"batch": 4, "model": 2}, 65_536,
                        DEVICES["TPU v5e"])
    assert "result bytes per device\twire bytes per device" in cells
    for (kind, (axis,)), moved in expected.traffic.items():
        wire = expected.traffic.wire(axis, kind=kind)
        assert f"{kind} along {axis}\t{moved.bytes:,}\t{wire:,.0f}" in cells
    shown, address = tab.locator(".calculator-output").inner_text(), tab.url
    other = tab.context.new_page()
    other.goto(address)
    assert other.locator(".calculator-output").inner_text() == shown


@site
def test_the_slider_goes_through_the_moments_by_keyboard(tab):
    tab.goto(PAGE.as_uri())
    tab.get_by_label("Sharding").select_option("fully sharded")
    timeline = estimate(ViTConfig(), "fully_sharded", {"batch": 4, "model": 2}, 8192,
                        DEVICES["TPU v5e"]).timeline
    slider, told = tab.get_by_label("Moment of the step"), tab.locator(".calculator-told")
    top = timeline.index(highest(timeline))
    assert int(slider.input_value()) == top and told.inner_text().endswith("in the loss: the peak")
    mark = lambda: float(tab.locator(".calculator-mark").get_attribute("x1"))
    before = mark()
    slider.press("ArrowRight")
    assert mark() > before
    slider.press("End")
    assert int(slider.input_value()) == len(timeline) - 1
    assert told.inner_text() == f"{binary(timeline[-1].total)} in the update"
    assert slider.get_attribute("aria-valuetext") == told.inner_text()
    rows = tab.locator("table", has_text="Memory of each device").locator("tbody tr")
    shown = [row.split("\t") for row in rows.all_inner_texts()]
    by_words = {words: kind for kind, (words, _) in WORDS.items()}
    assert [by_words[words.strip()] for words, *_ in shown] == list(WORDS)[::-1]
    memory = {kind: max(moment.held[kind] for moment in timeline) for kind in WORDS}
    for words, most, now in shown:
        kind = by_words[words.strip()]
        assert most == f"{memory[kind]:,}" and now == binary(timeline[-1].held[kind])


@site
def test_the_areas_of_the_curve_are_as_high_as_the_bytes(tab):
    tab.goto(f"{PAGE.as_uri()}#model=MiniGPT&preset=fully_sharded&rows=8&across=1&batch=512"
             "&activations=checkpointed&layers=12")
    found = estimate(MiniGPTConfig(layers=12), "fully_sharded", {"batch": 8, "model": 1}, 512,
                     DEVICES["TPU v5e"], checkpointed=True)
    limit = float(tab.locator(".calculator-limit").get_attribute("y1"))
    drawn = {path.get_attribute("data-kind"): path.get_attribute("d")
             for path in tab.locator("path[data-kind]").all()}
    assert list(drawn) == list(WORDS)
    (ground,) = set(re.findall(r"V([\d.]+)h-", drawn["parameters"]))
    scale = (float(ground) - limit) / DEVICES["TPU v5e"].memory  # pixels per byte
    total = [0.0] * len(found.timeline)
    for kind, path in drawn.items():
        roof = [float(y) for y in re.findall(r"V([\d.]+)h\d", path)]
        total = [below + moment.held[kind] for below, moment in zip(total, found.timeline)]
        assert roof == pytest.approx([float(ground) - scale * each for each in total])
    assert tab.locator(".calculator-verdict").inner_text() == (
        f"Fits: {binary(found.peak)} of 16 GiB on each device")
    assert "run forward twice" in tab.locator(".calculator-output").inner_text()


@site
def test_the_other_model_has_its_own_sizes(tab):
    tab.goto(PAGE.as_uri())
    assert tab.get_by_label("Vocabulary").count() == 0
    tab.get_by_label("Model").first.select_option("MiniGPT")
    assert tab.get_by_label("Vocabulary").input_value() == "50257"
    expected = estimate(MiniGPTConfig(), "tensor_parallel", {"batch": 4, "model": 2}, 8192,
                        DEVICES["TPU v5e"])
    assert f"{expected.memory['logits']:,}" in tab.locator(".calculator-output").inner_text()


@site
@pytest.mark.parametrize("label, value, words", [
    ("Batch, all devices", "", "Batch, all devices is a whole number from 1; found nothing"),
    ("Batch, all devices", "-3", "Batch, all devices is a whole number from 1; found -3"),
    ("Mesh: batch", "3", "batch=8192 does not divide over mesh axis 'batch' of size 3"),
    ("Mesh: model", "3", "heads=8 does not divide over mesh axis 'model' of size 3")])
def test_what_cannot_be_is_said_in_the_form(tab, label, value, words):
    tab.goto(PAGE.as_uri())
    tab.get_by_label(label).fill(value)
    assert tab.locator(".calculator-output").inner_text() == words


@site
def test_a_decoder_has_its_own_presets_and_sizes_and_jaxformer_is_a_ready_choice(tab):
    tab.goto(PAGE.as_uri())
    presets = lambda: tab.get_by_label("Sharding").locator("option").count()
    choose = lambda name, value: tab.locator(f"[name={name}]").select_option(value)
    assert presets() == len(PRESETS) and tab.locator("[name=remat]").count() == 0
    choose("model", "JAXformer")
    shown = {name: tab.locator(f"[name={name}]").input_value() for name in (
        "device", "slice", "rows", "across", "batch")}
    assert shown == {"device": "TPU v4", "slice": "2x4x4", "rows": "32", "across": "1",
                     "batch": "256"}
    choose("device", "TPU v5e")
    for name, value in ("rows", "4"), ("across", "2"):
        tab.locator(f"[name={name}]").fill(value)
    assert presets() == len(DECODER_PRESETS) + 3  # stages, experts, context
    assert not tab.locator("[name=activations]").is_visible()
    assert {name: tab.locator(f"[name={name}]").input_value()
            for name in sizes_of(JAXFORMER)} == {
        name: str(value) for name, value in sizes_of(JAXFORMER).items()}
    for policy, preset in itertools.product(("all", "none"), DECODER_PRESETS):
        choose("remat", policy)
        choose("preset", preset)
        tab.get_by_label("Batch, all devices").fill("64")
        found = estimate(dataclasses.replace(JAXFORMER, remat=policy), preset,
                         {"batch": 4, "model": 2}, 64, DEVICES["TPU v5e"])
        verdict = tab.locator(".calculator-verdict").inner_text()
        assert verdict.endswith(f": {binary(found.peak)} of 16 GiB on each device")
    other = tab.context.new_page()
    other.goto(tab.url)
    shown = tab.locator(".calculator-output").inner_text()
    assert other.locator(".calculator-output").inner_text() == shown
    choose("model", "ViT")  # which has not this preset
    assert tab.get_by_label("Sharding").input_value() == "tensor_parallel"


@site
def test_none_is_a_number_where_a_size_may_be_none(tab):
    tab.goto(f"{PAGE.as_uri()}#model=Decoder&latent=16&batch=64")
    assert tab.locator(".calculator-verdict").inner_text().startswith("Fits: ")
    tab.get_by_label("Rotary P").fill("")
    assert tab.locator(".calculator-output").inner_text() == (
        "Rotary P is a whole number from 0; found nothing")
    tab.get_by_label("Rotary P").fill("8")
    assert tab.locator(".calculator-verdict").inner_text().startswith("Fits: ")
