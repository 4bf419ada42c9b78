"""The calculator's form says what Python says of the same fields."""
import functools
import math
import random

import pytest
from browsers import CHROMIUM
from calculator_page import asked, choose, fields_of, number, opened, rows_of, show, written

from meshbook.costs.machines import SLICES, along_all, link_seconds
from meshbook.costs.memory import size_of
from meshbook.costs.plans import PRESETS
from meshbook.costs.presets import MODELS
from meshbook.costs.ranking import COMPILED, SPARE, impossible
from meshbook.costs.seconds import bounds, likely_seconds
from meshbook.costs.step import ATTENTION, describe
from meshbook.costs.tables import table_of
from meshbook.costs.timeline import step_peak, step_timeline
from meshbook.costs.traffic import step_traffic
from meshbook.costs.turns import SCHEDULES
from meshbook.costs.work import step_work
from meshbook.drawing.memory_timelines import WORDS
from meshbook.models.decoder_config import DecoderConfig
from meshbook.parallel.context import METHODS

GPUS = ("H100", "H200", "B200", "A100")
ROUNDED = 0.0051  # three digits

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium on the PATH")


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    return written(tmp_path_factory.mktemp("calculator"))


@pytest.fixture(scope="module")
def tab(browser, address):
    with opened(browser, address) as tab:
        yield tab


@functools.cache
def choices():
    """[fields of a form]: all models, devices and plans, some of which cannot be."""
    draw, found = random.Random(5), []
    while len(found) < 70:
        of, on = draw.choice(list(MODELS)), draw.choice([*GPUS, *SLICES])
        config, fields = MODELS[of], {"of": of, "on": on, "dropout": 0}
        if on in GPUS:
            fields["gpus"] = size = draw.choice([1, 2, 4, 8, 8, 16, 64])
        else:
            shape = draw.choice([each for each in SLICES[on] if math.prod(each) <= 64])
            fields["slices"] = slices = draw.choice([1, 1, 2]) if on != "TPU v4" else 1
            fields |= {"slice": "x".join(map(str, shape)), "dropout": draw.choice([0, 0.1])}
            size = math.prod(shape) * slices
        axes = ["model"] + ["stage", "context"] * isinstance(config, DecoderConfig)
        axes += ["expert"] * bool(getattr(config, "experts", None))
        for axis in draw.sample(axes[::-1], draw.choice([0, 1, 1, min(2, len(axes))])):
            ways = draw.choice([2, 2, 4, 3])
            if size % ways == 0:
                fields[axis], size = ways, size // ways
        microbatches = draw.choice([1, 1, 2, 4])
        rules = [*PRESETS] if isinstance(config, DecoderConfig) else ["data_parallel", *COMPILED]
        kinds = [kind for kind in ATTENTION if kind != "skipped" or hasattr(config, "vocabulary")]
        found.append({name: str(value) for name, value in (fields | {
            "batch": size, "microbatches": microbatches,
            "rows": size * fields.get("expert", 1) * microbatches * draw.choice([1, 4]),
            "rules": draw.choice(rules), "schedule": draw.choice(SCHEDULES),
            "remat": draw.choice(list(table_of(config).kept)), "method": draw.choice([*METHODS]),
            "attention": draw.choice(kinds)}).items()})
    return found


def close(bytes_or_flops):
    return pytest.approx(bytes_or_flops, rel=ROUNDED)


def close_time(seconds):
    return pytest.approx(seconds if seconds >= 1e-6 else 0.0, rel=ROUNDED)


def is_shown(tab, config, plan, rows, machine):
    """Whether the form says of a plan what Python says."""
    device, groups = machine.device, machine.groups(plan.sizes)
    step = describe(config, plan, rows)
    peak, moments = step_peak(step, device.tiles), step_timeline(step, device.tiles)
    verdict = tab.locator(".calculator-verdict").inner_text()
    word = "Does not fit" if peak > device.memory else (
        "Tight" if peak > (1 - SPARE) * device.memory else "Fits")
    said, _, of = verdict.partition(" of ")
    assert said.startswith(f"{word}: ") and number(said.partition(": ")[2]) == close(peak)
    assert number(of.partition(" on ")[0]) == device.memory
    likely = tab.locator(".calculator-likely").inner_text().partition("take ")[2].split(" to ")
    assert list(map(number, likely)) == [close_time(each) for each in likely_seconds(
        step, device, groups)][:len(likely)]
    assert {what: number(least) for what, (least, _) in rows_of(
        tab, "Lower bounds of a step").items()} == {what: close_time(each) for what, each in zip(
            ("compute", "traffic to memory", "links of its busiest axis"),
            bounds(step, device, groups).values(), strict=True)}
    width = size_of(step, False).number if step.table.stacked else config.dtype.itemsize
    assert {what: list(map(number, cells)) for what, cells in rows_of(
        tab, "Collectives of a step").items()} == {
            f"{kind} along {', '.join(axes)}": [close(each.bytes), close_time(link_seconds(
                kind, along_all([groups[axis] for axis in axes]), each.bytes, device))]
            for (kind, axes), each in step_traffic(step, width).items()}
    work = step_work(step)
    useful, done, factor = [cells[0] for cells in rows_of(tab, "Work of a step").values()]
    assert number(useful) == close(work.useful * machine.size)
    assert number(done) == close(work.done)
    assert float(factor.removesuffix(" ×")) == close(work.factor)
    at = max(range(len(moments)), key=lambda at: moments[at].total)
    assert {what: list(map(number, cells)) for what, cells in rows_of(
        tab, "Memory of each device").items()} == {
            WORDS[kind][0]: [close(max(each.held[kind] for each in moments)),
                             close(moments[at].held[kind])]
            for kind in WORDS if any(each.held[kind] for each in moments)}


def test_the_form_says_what_python_says_of_every_kind_of_plan(tab, address):
    shown, words, sentences = [], set(), set()
    for fields in choices():
        show(tab, address, fields)
        verdict = tab.locator(".calculator-verdict").inner_text()
        given = fields_of(tab)
        config, plan, rows, machine = asked(given)
        if why := impossible(config, plan, rows):
            assert verdict == why
            sentences.add(why)
            continue
        is_shown(tab, config, plan, rows, machine)
        shown.append(given)
        words.add(verdict.partition(":")[0])
    assert len(shown) >= 40 and len(sentences) >= 5
    assert words >= {"Fits", "Does not fit"}
    for name, every in (("of", MODELS), ("on", [*GPUS, *SLICES]), ("rules", PRESETS),
                        ("attention", ATTENTION)):
        assert {each[name] for each in shown} == set(every), name
    for axis in ("expert", "stage", "context", "model", "microbatches", "slices"):
        assert any(int(each.get(axis, 1)) > 1 for each in shown), axis


def test_what_is_typed_is_what_is_shown(tab, address):
    show(tab, address, {})
    config, plan, rows, machine = asked(fields_of(tab))
    assert (config, plan.batch, machine.size) == (MODELS["Llama-like, 8B"], 8, 8)
    is_shown(tab, config, plan, rows, machine)
    verdict, words = tab.locator(".calculator-verdict"), []
    changes = [
        {"rows": 16, "remat": "products"}, {"rows": 64}, {"remat": "all"},
        {"gpus": 64, "rows": 128, "rules": "zero1", "model": 8, "batch": 8}, {"heads": 64},
        {"stage": 2, "batch": 4, "microbatches": 8, "schedule": "lockstep", "remat": "none"},
        {"on": "TPU v5p", "slice": "4x4x4"},
        {"of": "OLMoE-like, 7B in 64 experts", "stage": 1, "batch": 8, "microbatches": 1},
        {"expert": 8, "model": 1, "batch": 8, "rows": 512, "capacity": 1.5, "shared": 512},
        {"of": "this book's ViT", "rules": "tensor_parallel"}]
    for change in changes:
        choose(tab, **change)
        config, plan, rows, machine = asked(fields_of(tab))
        is_shown(tab, config, plan, rows, machine)
        words.append(verdict.inner_text().partition(":")[0])
    assert words[:3] == ["Tight", "Does not fit", "Fits"]
    assert plan.expert == 1 and plan.batch == 64  # whose devices a model without experts has
