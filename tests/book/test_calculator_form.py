"""The calculator's fields: which there are, what they refuse, what they write, and the address."""
import random
import re

import pytest
from browsers import CHROMIUM
from calculator_page import asked, choose, fields_of, number, opened, rows_of, show, written

from meshbook.costs.devices import DEVICES
from meshbook.costs.machines import SLICES
from meshbook.costs.presets import MODELS
from meshbook.costs.step import describe
from meshbook.costs.timeline import step_peak, step_timeline
from meshbook.drawing.memory_timelines import WORDS

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium on the PATH")


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    return written(tmp_path_factory.mktemp("calculator"))


@pytest.fixture
def tab(browser, address):
    with opened(browser, address) as tab:
        yield tab


def said(tab):
    return tab.locator(".calculator-output").inner_text()


def is_seen(tab, name):
    return tab.locator(f"[name={name}]").is_visible()


def options(tab, name):
    return tab.locator(f"[name={name}] option").evaluate_all("all => all.map(each => each.value)")


def test_it_opens_on_a_model_that_people_know_and_that_fits(tab):
    assert said(tab).startswith("Fits: ")
    config, plan, rows, machine = asked(fields_of(tab))
    assert config == MODELS["Llama-like, 8B"] and plan.attention == "skipped"
    assert (machine.device.name, machine.size, plan.is_fully_sharded) == ("H100", 8, True)
    assert rows * config.tokens == 2**18  # tokens of a step
    assert options(tab, "of") == list(MODELS)
    numbers = tab.get_by_text("parameters", exact=False).first.inner_text()
    assert numbers == "7.5 billion parameters"


def test_what_a_machine_is_stands_under_its_fields(tab):
    note = tab.locator("fieldset p").nth(1)
    assert "One node: NVLink, 450 GB/s out of each GPU, through a switch" in note.inner_text()
    choose(tab, gpus=64)
    assert "8 nodes of 8: NVLink" in note.inner_text()
    assert "InfiniBand between nodes, 50 GB/s out of each GPU" in note.inner_text()
    choose(tab, on="A100")
    assert "switch" not in note.inner_text() and "25 GB/s out of each" in note.inner_text()
    for name, shapes in SLICES.items():
        choose(tab, on=name)
        assert options(tab, "slice") == ["x".join(map(str, each)) for each in shapes]
        assert is_seen(tab, "slices") == (DEVICES[name].network > 0) and not is_seen(tab, "gpus")
    choose(tab, on="TPU v5e", slice="8x16", slices=2)
    assert "2 slices, each a grid of 8 × 16 chips, a ring along 16, 50 GB/s over a link" in (
        note.inner_text())
    assert "between slices DCN, 3.13 GB/s out of each chip" in note.inner_text()
    choose(tab, slices=1, slice="4x8")
    assert "A grid of 4 × 8 chips, without links around" in note.inner_text()
    assert "DCN" not in note.inner_text()


def test_the_batch_axis_takes_the_devices_that_another_machine_has(tab):
    choose(tab, model=2, batch=4, gpus=64)
    assert fields_of(tab)["batch"] == "32"
    choose(tab, on="TPU v5e", slice="4x4")
    assert fields_of(tab)["batch"] == "8"
    choose(tab, slice="1x1")  # which two do not divide
    assert said(tab) == "expected a mesh of all 1 devices; found 8 · 1 · 1 · 2 = 16"


def test_a_model_has_the_axes_and_choices_that_it_can_have(tab):
    axes = lambda: {name for name in ("expert", "stage", "context") if is_seen(tab, name)}
    assert axes() == {"stage", "context"}
    assert options(tab, "remat") == ["none", "products", "attention", "all"]
    choose(tab, of="OLMoE-like, 7B in 64 experts")
    assert axes() == {"stage", "expert"}
    choose(tab, count=0)
    assert axes() == {"stage", "context"}
    choose(tab, latent=128)
    assert axes() == {"stage"} and not is_seen(tab, "schedule")
    choose(tab, latent=0, stage=2, context=2, batch=2)
    assert is_seen(tab, "schedule") and is_seen(tab, "method")
    choose(tab, of="this book's ViT")
    assert axes() == set() and not is_seen(tab, "schedule") and not is_seen(tab, "method")
    assert fields_of(tab)["batch"] == "8" and said(tab).startswith("Fits: ")
    assert options(tab, "remat") == ["none", "all"]
    assert "skipped" not in options(tab, "attention")  # no mask


def test_it_says_what_its_memory_is_not(tab):
    limit = "The backward pass of PyTorch needs about half of it"
    assert limit not in said(tab)
    choose(tab, remat="none")
    assert limit in said(tab)
    choose(tab, of="this book's MiniGPT", remat="none")
    assert limit not in said(tab)


def test_attention_is_fused_on_gpus_and_of_large_models_on_tpus(tab):
    kind = lambda: fields_of(tab)["attention"]
    choose(tab, on="TPU v5p")
    assert kind() == "skipped"
    choose(tab, of="this book's decoder")
    assert kind() == "scores"
    choose(tab, on="H100")
    assert kind() == "skipped"
    choose(tab, of="this book's ViT")
    assert kind() == "fused"


@pytest.mark.parametrize("changes, words", [
    ({"rows": ""}, "Batch, all devices is a whole number from 1 to 1,000,000,000; found nothing"),
    ({"rows": -3}, "Batch, all devices is a whole number from 1 to 1,000,000,000; found -3"),
    ({"rows": 1.5}, "Batch, all devices is a whole number from 1 to 1,000,000,000; found 1.5"),
    ({"layers": 1001}, "Layers L is a whole number from 1 to 1,000; found 1001"),
    ({"dropout": 2}, "Dropout is a number from 0 to 1; found 2"),
    ({"dropout": 0.001}, "dropout is a share in [0, 1), rounded to a 256th, and not to 0; found "
                         "0.001"),
    ({"gpus": 12}, "expected whole nodes of 8 H100; found 12"),
    ({"batch": 4}, "expected a mesh of all 8 devices; found 4 · 1 · 1 · 1 = 4"),
    ({"rows": 12}, "rows of a microbatch=12 does not divide over 8 devices"),
    ({"heads": 3}, "embed D=4096 does not divide into 3 heads"),
    ({"groups": 3}, "32 heads do not divide into 3 groups"),
    ({"batch": 1, "model": 8, "groups": 4}, "groups=4 does not divide over 8 devices"),
    ({"rotary": 2}, "rotary=2 is for latent attention; found latent=0"),
    ({"batch": 2, "stage": 2, "context": 2}, "a context in stages has no program here"),
    ({"count": 4, "active": 5}, "a token goes to 1 to 4 of 4 experts; found active=5"),
    ({"batch": 4, "context": 2, "attention": "scores"},
     "a context has attention in blocks, or fused; found 'scores'"),
    ({"on": "TPU v5e", "slice": "2x4", "slices": 4, "rows": 32, "batch": 2, "stage": 2,
      "model": 8}, ""),
    ({"on": "TPU v6e", "slice": "2x2", "slices": 8, "batch": 4, "stage": 4, "model": 2}, (
        "no axis of the mesh divides over 8 slices: batch=4, stage=4, model=2"))])
def test_what_cannot_be_is_said_at_once_in_a_sentence(tab, changes, words):
    choose(tab, **changes)
    assert said(tab) == words if words else "Memory of each device" in said(tab)


def test_the_address_keeps_the_fields_and_an_old_one_begins_anew(tab, address):
    choose(tab, of="OLMoE-like, 7B in 64 experts", on="TPU v5p", slice="2x4x4", expert=4, batch=8,
           capacity=1.5, dropout=0.1, rules="zero1", attention="fused", rows=256)
    before, words, url = fields_of(tab), said(tab), tab.url
    assert before["capacity"] == "1.5" and words.startswith("Fits: ")
    tab.goto("about:blank")
    tab.goto(url)
    assert fields_of(tab) == before and said(tab) == words
    tab.goto("about:blank")
    tab.goto(address)
    first = fields_of(tab)
    for old in ("model=JAXformer&preset=fully_sharded_kept&device=TPU+v4&slice=2x4x4&rows=32",
                "of=no+such+model&rows=7", "%E0%A4%A"):
        tab.goto("about:blank")
        tab.goto(f"{address}#{old}")
        assert fields_of(tab) == first
    show(tab, address, {"of": "this book's ViT", "on": "TPU v9", "rules": "none", "remat": "none",
                        "slice": "9x9", "rows": "x", "layers": "3"})
    assert fields_of(tab) == fields_of(tab) | {
        "on": "H100", "rules": "fully_sharded", "remat": "none", "layers": "3"}
    assert said(tab).endswith("found nothing")


def test_the_slider_goes_through_the_moments_by_keyboard(tab):
    config, plan, rows, machine = asked(fields_of(tab))
    timeline = step_timeline(describe(config, plan, rows), machine.device.tiles)
    slider, told = tab.get_by_label("Moment of the step"), tab.locator(".calculator-told").first
    top = max(range(len(timeline)), key=lambda at: timeline[at].total)
    assert int(slider.input_value()) == top
    assert told.inner_text().endswith("in the backward pass of layer 32: the peak")
    mark = lambda: float(tab.locator(".calculator-mark").get_attribute("x1"))
    before = mark()
    slider.press("ArrowRight")
    assert mark() > before and told.inner_text().endswith("of layer 31")
    slider.press("End")
    assert int(slider.input_value()) == len(timeline) - 1
    assert slider.get_attribute("aria-valuetext") == told.inner_text()
    shown = rows_of(tab, "Memory of each device")
    assert list(shown) == [WORDS[kind][0] for kind in reversed(WORDS)]
    for kind, (words, _) in WORDS.items():
        assert number(shown[words][1]) == pytest.approx(timeline[-1].held[kind], rel=0.0051)


def test_the_areas_of_the_curve_are_as_high_as_the_bytes(tab):
    choose(tab, of="this book's MiniGPT", layers=12, rows=512, dropout=0)
    config, plan, rows, machine = asked(fields_of(tab))
    step = describe(config, plan, rows)
    found = step_timeline(step, machine.device.tiles)
    limit = float(tab.locator(".calculator-limit").get_attribute("y1"))
    drawn = {path.get_attribute("data-kind"): path.get_attribute("d")
             for path in tab.locator("path[data-kind]").all()}
    assert list(drawn) == list(WORDS)
    (ground,) = set(re.findall(r"V([\d.]+)h-", drawn["parameters"]))
    scale = (float(ground) - limit) / machine.device.memory  # pixels per byte
    total = [0.0] * len(found)
    for kind, path in drawn.items():
        roof = [float(y) for y in re.findall(r"V([\d.]+)h\d", path)]
        total = [below + moment.held[kind] for below, moment in zip(total, found, strict=True)]
        assert roof == pytest.approx([float(ground) - scale * each for each in total])
    assert max(total) == step_peak(step, machine.device.tiles)


def test_every_field_has_a_label_and_all_is_reached_by_keyboard(tab):
    tab.locator("details").first.evaluate("each => { each.open = true; }")
    shown = [name for name in tab.locator("select, input:not([type=range])").evaluate_all(
        "all => all.filter(each => each.checkVisibility()).map(each => each.name)")]
    labels = [tab.locator(f"[name={name}]").evaluate("each => each.labels[0].innerText")
              for name in shown]
    assert all(labels) and len(set(labels)) == len(labels) > 20
    reached = []
    tab.locator("[name=of]").focus()
    for _ in range(60):
        reached.append(tab.evaluate("document.activeElement.name"))
        tab.keyboard.press("Tab")
        if tab.evaluate("document.activeElement.type") == "range":
            break
    assert [name for name in reached if name] == shown
    tab.locator("[name=on]").focus()
    tab.keyboard.type("TPU v5p")
    assert fields_of(tab)["on"] == "TPU v5p"
    assert tab.locator("[aria-live=polite] .calculator-verdict").count() == 1


NONSENSE = re.compile(r"NaN|Infinity|undefined|null")
UNREADABLE = re.compile(rf"{NONSENSE.pattern}|\de[+-]?\d|\d[\d,.]{{9,}}|0\.000|(?<!\w)-\d")


def test_whatever_is_typed_numbers_can_be_read(tab, address):
    of = lambda what, given: tab.evaluate(f"meshbookForm.{what}({given})")
    assert of("memoryOf", 1.86e19) == "16.1 EiB" and of("memoryOf", 2**30) == "1 GiB"
    assert of("memoryOf", 1023.6 * 2**20) == "1,020 MiB" and of("memoryOf", 0) == "0 B"
    assert of("timeOf", 8.59e-12) == "under 1 µs" and of("timeOf", 0) == "0"
    assert of("timeOf", 0.99996) == "1 s" and of("timeOf", 0.0125) == "12.5 ms"
    assert of("timeOf", 3.6e6) == "1,000 hours" and of("timeOf", 4e9) == "127 years"
    assert of("memoryOf", 1e60) == "over 10,000 QiB" and of("flopsOf", 3e15) == "3 PFLOPs"
    draw, odd = random.Random(0), [
        "", "0", "1", "2", "7", "64", "1000", "65536", "1e9", "999999999", "1e300", "-1", "0.5"]
    sentences, answers = 0, 0
    for _ in range(60):
        show(tab, address, {"of": draw.choice(list(MODELS)), "on": draw.choice(["H100", "TPU v5e"]),
                            "slice": "2x4", "dropout": 0})
        for name in draw.sample([each for each in fields_of(tab) if each not in ("of", "on")], 3):
            field = tab.locator(f"[name={name}]")
            if field.count() and field.is_enabled():
                is_number = field.evaluate("each => each.tagName") == "INPUT"
                power = str(2 ** draw.randrange(0, 29))
                choose(tab, **{name: draw.choice([*odd, *[power] * 9]) if is_number
                               else draw.choice(options(tab, name))})
            text = said(tab)
            sentences, answers = sentences + ("\n" not in text), answers + ("\n" in text)
            found = (UNREADABLE if "\n" in text else NONSENSE).search(text)  # which repeats numbers
            assert not found, (found, text)
            figures = tab.locator("svg text").all_text_contents()
            assert not any(UNREADABLE.search(each) or len(each) > 26 for each in figures)
    assert sentences > 20 and answers > 20
    for fields in ({"vocabulary": 10**9, "tokens": 10**9, "embed": 10**9, "hidden": 10**9,
                    "layers": 1000, "rows": 10**9, "heads": 1, "groups": 0, "gpus": 1, "batch": 1,
                    "attention": "scores", "remat": "none"}, {"rows": 10**9, "tokens": 1}):
        choose(tab, of="Llama-like, 1B", on="H100", **fields)
        assert not UNREADABLE.search(said(tab)) and said(tab).startswith("Does not fit: ")


@pytest.mark.parametrize("width", (390, 1200))
def test_nothing_is_wider_than_the_page(tab, width):
    tab.set_viewport_size({"width": width, "height": 800})
    choose(tab, of="JAXformer, with 16 experts", on="TPU v5p", slice="2x4x4", slices=2)
    tab.wait_for_selector(".calculator-ranking[aria-busy=false] details", timeout=120_000)
    for summary in tab.locator("summary").all():
        summary.click()
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
