"""The parts of the calculator's costs, and what they refuse: JavaScript beside Python."""
import dataclasses

import pytest
from browsers import CHROMIUM
from costs_in_js import CONFIGS, DROPLESS, answers_of, opened, said, sizes_of

from meshbook.costs import tables
from meshbook.costs.devices import DEVICES
from meshbook.costs.memory import step_memory
from meshbook.costs.machines import Group, Machine, along_all, link_seconds
from meshbook.costs.places import spans
from meshbook.costs.plans import Plan
from meshbook.costs.ranking import meshes, plans_on
from meshbook.costs.step import describe
from meshbook.costs.traffic import sent
from meshbook.costs.turns import SCHEDULES, passes_of, slots_of, turns_of
from meshbook.costs.work import step_work
from meshbook.hlo.wire import wire_bytes, wire_seconds
from meshbook.models import MiniGPTConfig, ViTConfig
from meshbook.models.decoder import DecoderConfig
from meshbook.models.expert_layers import ExpertSizes

WIRED = """({device, kinds, turned, plans}) => ({
  wire: kinds.map(([kind, sizes, moved, ring]) => [
    costs.wireBytes(kind, sizes[0], moved[1]),
    costs.wireSeconds(kind, sizes, moved, device, ring)]),
  turns: turned.map(each => Object.values(costs.turnsOf(...each))),
  passes: plans.map(plan => [...costs.passesOf(plan), costs.slotsOf(plan)])})"""


pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium on the PATH")


@pytest.fixture(scope="module")
def tab(browser):
    with opened(browser) as tab:
        yield tab


def test_the_script_gives_all_ways_to_train_on_so_many_chips(tab):
    every = answers_of(
        tab, "chips => costs.meshes(chips).map(mesh => [mesh, costs.plansOn(mesh, 9)])", 6)
    assert every == [
        [dataclasses.asdict(mesh), [dataclasses.asdict(plan) for plan in plans_on(mesh, 9)]]
        for mesh in meshes(6)]


@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
def test_dimensions_and_kinds_of_layers_are_those_of_the_table(tab, config):
    sizes, kinds = answers_of(tab, """given => {
      const c = costs.configOf(...given);
      return [costs.sizesOf(c), costs.kindsOf(c).map(([count, flags]) => [count, flags.sort()])];
    }""", sizes_of(config))
    assert sizes == tables.sizes_of(config)
    assert kinds == [[count, sorted(flags)] for count, flags in tables.kinds_of(config)]


@pytest.mark.parametrize("kind, sizes", [
    (ViTConfig, {"patch": 5}), (ViTConfig, {"layers": 0}), (MiniGPTConfig, {"tokens": 0}),
    (MiniGPTConfig, {"heads": 3}), (MiniGPTConfig, {"dropout": 0.999}),
    (DecoderConfig, {"period": 0}), (DecoderConfig, {"groups": -1}), (DecoderConfig, {"groups": 3}),
    (DecoderConfig, {"latent": 8, "groups": 2}), (DecoderConfig, {"rotary": 2}),
    (DecoderConfig, {"latent": 8, "rotary": 3}), (DecoderConfig, {"heads": 256}),
    (DecoderConfig, {"remat": "some"}), (DecoderConfig, {"period": 3}),
    (ExpertSizes, {"active": 9}), (ExpertSizes, {"capacity": -0.5})])
def test_sizes_that_make_no_sense_are_refused_in_the_same_words(tab, kind, sizes):
    with pytest.raises(ValueError) as refused:
        kind(**sizes)
    model, own = (("Decoder", {"experts": sizes}) if kind is ExpertSizes
                  else (kind.__name__.removesuffix("Config"), sizes))
    assert answers_of(tab, "given => said(() => costs.configOf(...given))", [model, own]) == str(
        refused.value)


@pytest.mark.parametrize("name", ["TPU v5e", "TPU v4", "H100"])
def test_wire_bytes_seconds_and_turns_are_those_of_python(tab, name):
    device = DEVICES[name]
    kinds = [(kind, sizes, [3, 1 << 20], ring) for ring in (True, False)
             for sizes in ([2], [4], [3, 8], [2, 2, 4])
             for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all",
                          "collective-permute")]
    turned = [(schedule, p, m) for schedule in SCHEDULES for p in (1, 2, 4) for m in (1, 4, 7)]
    staged = [Plan(stage=p, microbatches=m, schedule=schedule) for schedule, p, m in turned]
    found = answers_of(tab, WIRED, {
        "device": dataclasses.asdict(device), "kinds": kinds, "turned": turned,
        "plans": [dataclasses.asdict(plan) for plan in staged]})
    assert found == {
        "wire": [[wire_bytes(kind, sizes[0], moved[1]),
                  wire_seconds(kind, sizes, tuple(moved), device, ring)]
                 for kind, sizes, moved, ring in kinds],
        "turns": [list(turns_of(*each)) for each in turned],
        "passes": [[*passes_of(plan), slots_of(plan)] for plan in staged]}


MACHINES = [  # device, shape, slices, mesh
    ("TPU v4", (4, 4, 8), 1, {"batch": 32, "model": 4}),
    ("TPU v4", (2, 4, 4), 1, {"batch": 8, "stage": 2, "model": 2}),
    ("TPU v5e", (8, 16), 1, {"batch": 8, "model": 16}),
    ("TPU v5e", (16, 16), 4, {"batch": 64, "context": 4, "model": 4}),
    ("TPU v6e", (4, 4), 2, {"batch": 1, "stage": 2, "model": 16}),
    ("TPU v5p", (16, 16, 24), 1, {"batch": 384, "model": 16}),
    ("H100", (4,), 1, {"batch": 2, "model": 2}), ("H100", (16,), 1, {"batch": 4, "model": 4}),
    ("A100", (64,), 1, {"batch": 2, "stage": 4, "model": 8}),
    ("B200", (24,), 1, {"batch": 8, "model": 3}), ("H200", (16,), 1, {"batch": 1, "model": 16})]


def test_groups_of_a_machine_and_their_links_are_those_of_python(tab):
    kinds = ["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"]
    found = answers_of(tab, """([machines, kinds]) => machines.map(
      ([device, shape, slices, mesh]) => {
        const machine = costs.machineOf(device, shape, slices);
        const groups = costs.groupsOf(machine, mesh);
        const all = [...Object.values(groups), costs.alongAll(Object.values(groups))];
        return all.map(group => [group, kinds.map(
          kind => costs.linkSeconds(kind, group, 2 ** 30, machine.device))]);
      })""", [MACHINES, kinds])
    for (name, shape, slices, mesh), answers in zip(MACHINES, found, strict=True):
        groups = Machine(DEVICES[name], shape, slices).groups(mesh).values()
        for group, (said_of_it, seconds) in zip([*groups, along_all([*groups])], answers, strict=True):
            assert Group(**{key: tuple(each) if isinstance(each, list) else each
                            for key, each in said_of_it.items()}) == group
            assert seconds == pytest.approx(
                [link_seconds(kind, group, 2**30, DEVICES[name]) for kind in kinds], rel=1e-12)


@pytest.mark.parametrize("script, refused", [
    ("costs.turnsOf('some', 2, 2)", lambda: turns_of("some", 2, 2)),
    ("costs.spans([2, 2, 2, 2], {batch: 16})", lambda: spans((2, 2, 2, 2), {"batch": 16})),
    ("costs.machineOf('TPU v4', [2, 0, 2])", lambda: Machine(DEVICES["TPU v4"], (2, 0, 2))),
    ("costs.machineOf('H100', [2, 4])", lambda: Machine(DEVICES["H100"], (2, 4))),
    ("costs.machineOf('H100', [12])", lambda: Machine(DEVICES["H100"], (12,))),
    ("costs.machineOf('TPU v4', [4], 2)", lambda: Machine(DEVICES["TPU v4"], (4,), 2)),
    ("costs.groupsOf(costs.machineOf('TPU v5e', [3], 2), {batch: 3, model: 1})",
     lambda: Machine(DEVICES["TPU v5e"], (3,), 2).groups({"batch": 3, "model": 1})),
    ("on({context: 2, method: 'some'})", lambda: on(context=2, method="some")),
    ("on({attention: 'some'})", lambda: on(attention="some")),
    ("on({remat: 'some'})", lambda: on(remat="some")),
    ("costs.stepWork(on({batch: 2}))", lambda: step_work(on(batch=2))),
    ("costs.sent(on({batch: 2}))", lambda: list(sent(on(batch=2)))),
    ("costs.stepMemory(on({batch: 2}))", lambda: step_memory(on(batch=2)))])
def test_what_has_no_answer_is_refused_in_the_same_words(tab, script, refused):
    found = answers_of(tab, '''given => {
      const on = plan => costs.describe(costs.configOf(...given), costs.planOf(plan), 4);
      return said(() => %s);
    }''' % script, sizes_of(DROPLESS))
    assert found == said(refused) and isinstance(found, str)


def on(**plan):
    return describe(DROPLESS, Plan(**plan), 4)
