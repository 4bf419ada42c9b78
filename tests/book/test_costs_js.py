"""The costs of the calculator: its JavaScript reads the tables of Python, and gives its numbers."""
import dataclasses
import functools
import math
import random
from dataclasses import replace

import pytest
from browsers import CHROMIUM
from costs_in_js import CONFIGS, DENSE, DROPLESS, answers_of, close, load, opened, said, sizes_of

from meshbook.costs import page, tables
from meshbook.costs.devices import DEVICES
from meshbook.costs.memory import step_memory
from meshbook.costs.places import spans
from meshbook.costs.plans import AXES, PRESETS, Plan
from meshbook.costs.ranking import impossible, rank
from meshbook.costs.seconds import bytes_moved, numbers_drawn, step_seconds
from meshbook.costs.step import describe
from meshbook.costs.timeline import step_peak, step_timeline
from meshbook.costs.traffic import sent, step_traffic
from meshbook.costs.turns import SCHEDULES
from meshbook.costs.work import step_work
from meshbook.models.decoder import DecoderConfig
from meshbook.models.expert_layers import ExpertSizes
from meshbook.parallel.context import METHODS

ASKED = [  # config, rows, device, torus
    (DENSE, 16, "TPU v5e", (2, 2, 1)), (CONFIGS[15], 32, "TPU v4", (2, 2, 1)),
    (replace(CONFIGS[12], layers=6, embed=3072, hidden=12_288), 8, "TPU v5e", (2, 4)),
    (CONFIGS[0], 8, "TPU v2", (2,)),
    (replace(DENSE, experts=ExpertSizes(capacity=1e-12)), 4, "TPU v4", (2, 1, 1)),
    (DENSE, 4, "H100", (2, 1, 1))]
COUNTED = """asked => asked.map(([model, sizes, plan, rows, device, options]) => {
  const c = costs.configOf(model, sizes), why = costs.impossible(c, plan, rows);
  if (why) return {why};
  const step = costs.describe(c, plan, rows), {tiles, number, clipped, balanced} = options;
  return {
    numbers: step.numbers, work: costs.stepWork(step), moved: costs.bytesMoved(step, tiles),
    drawn: costs.numbersDrawn(step), memory: costs.stepMemory(step, tiles),
    peak: costs.stepPeak(step, tiles),
    timeline: costs.stepTimeline(step, tiles).map(({phase, block, held}) => [phase, block, held]),
    sent: costs.sent(step, number, clipped, balanced).map(Object.values),
    traffic: costs.stepTraffic(step, number, clipped, balanced).map(Object.values),
    seconds: said(() => costs.stepSeconds(step, device, costs.placeOf([options.chips], plan))),
    words: [costs.where(plan), costs.how(plan)]};
})"""
RANKED = """asked => asked.map(([model, sizes, rows, device, torus]) =>
  said(() => costs.rank(costs.configOf(model, sizes), rows, device, torus)))"""

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium on the PATH")


@functools.cache
def plans():
    """[(config, plan, rows, device, options)], some of them impossible."""
    draw, found = random.Random(0), []
    while len(found) < 1500:
        config, sizes = draw.choice([*CONFIGS, DROPLESS]), dict.fromkeys(AXES, 1)
        for axis in draw.sample(AXES, draw.choice([0, 1, 2, 2, 3, 3, 4])):
            if axis != "expert" or getattr(config, "experts", None) or draw.random() < 0.05:
                sizes[axis] = draw.choice([2, 2, 2, 3, 4, 4, 6, 8])
        if not isinstance(config, DecoderConfig) and draw.random() < 0.9:
            sizes |= {"stage": 1, "context": 1}
        if math.prod(sizes.values()) > 64:
            continue
        policies = [*(tables.table_of(config) if draw.random() < 0.9 else tables.DECODER).kept, ""]
        plan = Plan(
            **sizes, rules=draw.choice(list(PRESETS)), schedule=draw.choice(SCHEDULES),
            microbatches=draw.choice([1, 1, 2, 3, 4, 8]), remat=draw.choice(policies),
            method=draw.choice(list(METHODS)),
            attention=draw.choice(["", "", "scores", "rows", "blocks", "fused"]))
        if sizes["stage"] > 1 and plan.schedule != "gpipe" and draw.random() < 0.8:
            plan = replace(plan, remat="none")
        rows = sizes["batch"] * sizes["expert"] * plan.microbatches * draw.choice([1, 2, 3, 8])
        rows += draw.random() < 0.05
        device = draw.choice(list(DEVICES.values()))
        found.append((config, plan, rows, device, {
            "tiles": draw.random() < 0.8, "number": draw.choice([2, 4]),
            "clipped": draw.random() < 0.5, "balanced": draw.random() < 0.5,
            "chips": math.prod(sizes.values())}))
    return found


def in_python(config, plan, rows, device, options):
    """What the script says of a plan, in Python."""
    if why := impossible(config, plan, rows):
        return {"why": why}
    step, tiles = describe(config, plan, rows), options["tiles"]
    sends = [step, *map(options.get, ("number", "clipped", "balanced"))]
    spent = said(step_seconds, step, device, spans((options["chips"],), plan.sizes))
    return {
        "numbers": step.numbers, "work": close(step_work(step)._asdict()),
        "moved": close(bytes_moved(step, tiles)),
        "drawn": pytest.approx(numbers_drawn(step), rel=1e-12),
        "memory": step_memory(step, tiles)._asdict(), "peak": step_peak(step, tiles),
        "timeline": [list(each) for each in step_timeline(step, tiles)],
        "sent": [[*each[:2], list(each.axes), *each[3:]] for each in sent(*sends)],
        "traffic": [[kind, list(axes), each.count, each.bytes]
                    for (kind, axes), each in step_traffic(*sends).items()],
        "seconds": spent if isinstance(spent, str) else close(spent),
        "words": [plan.where, plan.how]}


@pytest.fixture(scope="module")
def tab(browser):
    with opened(browser) as tab:
        yield tab


def asked(config, plan, rows, device, options):
    return [*sizes_of(config), dataclasses.asdict(plan), rows, dataclasses.asdict(device), options]


def test_the_script_gives_every_number_of_a_plan_and_why_it_is_impossible(tab):
    answers = answers_of(tab, COUNTED, [asked(*each) for each in plans()])
    counted, sentences = [], set()
    for each, answer in zip(plans(), answers, strict=True):
        expected = in_python(*each)
        assert answer == expected, each
        if "why" in expected:
            sentences.add(expected["why"])
        else:
            counted.append(each)
            sentences |= {expected["seconds"]} if isinstance(expected["seconds"], str) else set()
    assert len(counted) > 600 and len(sentences) > 100
    assert {config for config, *_ in counted} == set(CONFIGS)
    for name, all_of in (("rules", PRESETS), ("schedule", SCHEDULES), ("method", METHODS)):
        assert {getattr(plan, name) for _, plan, *_ in counted} == set(all_of)


def test_the_script_ranks_as_python_does(tab):
    answers = answers_of(tab, RANKED, [
        [*sizes_of(config), rows, dataclasses.asdict(DEVICES[name]), torus]
        for config, rows, name, torus in ASKED])
    fits = set()
    for (config, rows, name, torus), answer in zip(ASKED, answers, strict=True):
        expected = said(rank, config, rows, DEVICES[name], torus)
        if isinstance(expected, str):
            assert answer == expected
            continue
        found, refused = expected
        fits |= {each.fits for each in found}
        assert answer["found"] == [{
            "plan": dataclasses.asdict(each.plan), "peak": each.peak, "fits": each.fits,
            "step": pytest.approx(each.step, rel=1e-12), "seconds": close(each.seconds),
            "wire": pytest.approx(each.wire, rel=1e-12)} for each in found]
        assert answer["refused"] == [
            {"mesh": dataclasses.asdict(mesh), "why": why} for mesh, why in refused.items()]
    assert fits == {True, False}


def planted():
    """[(what is changed, data with that)]"""
    def changed(change):
        data = page.data()
        change(data)
        return data

    for name in page.data()["constants"]:
        if name != "PADDED":
            yield name, changed(lambda data: data["constants"].update({name: 7}))
    for name in page.data()["tables"]:
        table = lambda data: data["tables"][name]
        yield f"{name}: row", changed(lambda data: table(data)["layer"][0].update(count=2))
        yield f"{name}: kept", changed(lambda data: table(data)["kept"]["none"][0].update(bytes=1))
    yield "rules", changed(
        lambda data: data["rules"]["zero1"][""]["moments"].update(D=["model"]))
    yield "policies", changed(lambda data: next(
        row for row in data["tables"]["Decoder"]["layer"] if row["letters"] == "HK>HU").update(
            again=""))


def test_a_wrong_number_in_the_data_is_found(tab):
    some = [each for each in plans() if not impossible(*each[:3])][:80]
    given = [asked(*each) for each in some]
    right, missed = answers_of(tab, COUNTED, given), []
    for what, data in planted():
        load(tab, data)
        if answers_of(tab, COUNTED, given) == right:
            missed.append(what)
    load(tab, page.data())
    assert answers_of(tab, COUNTED, given) == right and not missed
