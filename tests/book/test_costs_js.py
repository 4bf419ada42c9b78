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
from meshbook.costs.machines import Machine
from meshbook.costs.plans import AXES, PRESETS, Plan
from meshbook.costs.ranking import impossible, rank
from meshbook.costs.seconds import (
    bounds, bytes_at_least, bytes_moved, likely_seconds, numbers_drawn, step_seconds
)
from meshbook.costs.step import describe
from meshbook.costs.timeline import step_peak, step_timeline
from meshbook.costs.traffic import sent, step_traffic
from meshbook.costs.turns import SCHEDULES
from meshbook.costs.work import least_work, step_work
from meshbook.models.decoder import DecoderConfig
from meshbook.models.expert_layers import ExpertSizes
from meshbook.parallel.context import METHODS

ASKED = [  # config, rows, device, shape, slices
    (DENSE, 16, "TPU v5e", (2, 2), 1), (CONFIGS[15], 32, "TPU v4", (2, 2, 1), 1),
    (replace(CONFIGS[12], layers=6, embed=3072, hidden=12_288), 8, "TPU v5e", (2, 2), 2),
    (CONFIGS[0], 8, "TPU v2", (2,), 1), (replace(CONFIGS[6], dropout=0.0), 32, "H100", (16,), 1),
    (replace(DENSE, experts=ExpertSizes(capacity=1e-12)), 4, "TPU v4", (2, 1, 1), 1),
    (DENSE, 4, "H100", (2,), 1),
    (replace(CONFIGS[12], embed=24), 16, "TPU v5e", (2, 2), 4)]  # slices, and embed, not divided
COUNTED = """asked => asked.map(([model, sizes, plan, rows, options]) => {
  const c = costs.configOf(model, sizes), why = costs.impossible(c, plan, rows);
  if (why) return {why};
  const step = costs.describe(c, plan, rows), {tiles, number, clipped, balanced} = options;
  return {
    numbers: step.numbers, work: costs.stepWork(step), least: [
      costs.leastWork(step), costs.bytesAtLeast(step, tiles)], moved: costs.bytesMoved(step, tiles),
    drawn: costs.numbersDrawn(step), memory: costs.stepMemory(step, tiles),
    peak: costs.stepPeak(step, tiles),
    timeline: costs.stepTimeline(step, tiles).map(({phase, block, held}) => [phase, block, held]),
    sent: costs.sent(step, number, clipped, balanced).map(Object.values),
    traffic: costs.stepTraffic(step, number, clipped, balanced).map(Object.values),
    seconds: said(() => {
      const {device, shape, slices, mesh} = options;
      const machine = costs.machineOf(device, shape, slices);
      return [costs.stepSeconds, costs.bounds, costs.likelySeconds].map(
        of => of(step, machine.device, costs.groupsOf(machine, mesh)));
    }),
    words: [costs.where(plan), costs.how(plan)]};
})"""
RANKED = """asked => asked.map(([model, sizes, rows, ...machine]) => said(
  () => costs.rank(costs.configOf(model, sizes), rows, costs.machineOf(...machine), "fused")))"""

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium on the PATH")


@functools.cache
def plans():
    """[(config, plan, rows, device, options)], some of them impossible."""
    draw, found = random.Random(0), []
    while len(found) < 1700:
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
            attention=draw.choice(["", "", "scores", "rows", "blocks", "fused", "skipped"]))
        if sizes["stage"] > 1 and plan.schedule != "gpipe" and draw.random() < 0.8:
            plan = replace(plan, remat="none")
        rows = sizes["batch"] * sizes["expert"] * plan.microbatches * draw.choice([1, 2, 3, 8])
        rows += draw.random() < 0.05
        chips, slices = math.prod(sizes.values()), draw.choice([1, 1, 2, 4])
        shape = draw.choice([(chips,), (chips // slices,)])
        found.append((config, plan, rows, {
            "tiles": draw.random() < 0.8, "number": draw.choice([2, 4]),
            "clipped": draw.random() < 0.5, "balanced": draw.random() < 0.5,
            "device": draw.choice(list(DEVICES)), "mesh": sizes, "shape": shape,
            "slices": chips // math.prod(shape) if shape[0] else 0}))
    return found


def in_python(config, plan, rows, options):
    """What the script says of a plan, in Python."""
    if why := impossible(config, plan, rows):
        return {"why": why}
    step, tiles = describe(config, plan, rows), options["tiles"]
    sends = [step, *map(options.get, ("number", "clipped", "balanced"))]
    spent = said(seconds_of, step, options)
    return {
        "numbers": step.numbers, "work": close(step_work(step)._asdict()),
        "least": pytest.approx([least_work(step), bytes_at_least(step, tiles)], rel=1e-12),
        "moved": close(bytes_moved(step, tiles)),
        "drawn": pytest.approx(numbers_drawn(step), rel=1e-12),
        "memory": step_memory(step, tiles)._asdict(), "peak": step_peak(step, tiles),
        "timeline": [list(each) for each in step_timeline(step, tiles)],
        "sent": [[*each[:4], list(each.axes), *each[5:]] for each in sent(*sends)],
        "traffic": [[kind, list(axes), each.count, each.bytes]
                    for (kind, axes), each in step_traffic(*sends).items()],
        "seconds": spent if isinstance(spent, str) else [
            *map(close, spent[:2]), pytest.approx(list(spent[2]), rel=1e-12)],
        "words": [plan.where, plan.how]}


@pytest.fixture(scope="module")
def tab(browser):
    with opened(browser) as tab:
        yield tab


def seconds_of(step, options):
    """Of a step, and the least, on a machine; or why there is no such one."""
    device = DEVICES[options["device"]]
    groups = Machine(device, options["shape"], options["slices"]).groups(options["mesh"])
    return [of(step, device, groups) for of in (step_seconds, bounds, likely_seconds)]


def asked(config, plan, rows, options):
    return [*sizes_of(config), dataclasses.asdict(plan), rows, options]


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
        [*sizes_of(config), rows, *machine] for config, rows, *machine in ASKED])
    fits = set()
    for (config, rows, name, *machine), answer in zip(ASKED, answers, strict=True):
        expected = said(rank, config, rows, Machine(DEVICES[name], *machine), "fused")
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
            other = [7, 8] if name.startswith("OF_") else 7
            yield name, changed(lambda data: data["constants"].update({name: other}))
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
