"""Recorded steps: the records are those of the commands, and programs do what their Steps say."""
import dataclasses
import json
import math

import jax.numpy as jnp
import pytest

from benchmarks import aot, aot_context, aot_decoder, aot_experts, aot_pipeline, bench_experts
from meshbook.costs.devices import DEVICES, tokens_to_hide
from meshbook.costs.plans import Plan
from meshbook.costs.step import describe
from meshbook.costs.traffic import step_traffic
from meshbook.costs.work import step_work
from meshbook.models.expert_layers import ExpertSizes
from meshbook.parallel.routing import capacity
from meshbook.parallel.slots import table_of
from meshbook.planning import records
from meshbook.planning.recorded_steps import asked_step

DECODER, PIPELINE, EXPERTS, CONTEXT = (records.frame(f"tpu-{name}") for name in (
    "decoder", "pipeline", "experts", "context"))
TIMED = DECODER[DECODER.step.notna() & DECODER.ms.notna()]
NOW, UNTUNED = "v5e-8 (8, 1) 64", "v5e-8 (8, 1) 64 remat=all by_row=False"


@pytest.mark.parametrize("name", ["tpu", *(f"tpu-{name}" for name in aot.OTHERS)])
def test_a_record_has_the_programs_that_its_command_compiles(name):
    found, module = records.frame(name), aot.OTHERS.get(name.removeprefix("tpu-"), aot)
    cells = {cell.name: cell for cell in module.cells()}
    assert [each for each in cells if each in found.index] == list(found.index)
    assert {each.split()[1] for each in cells if each not in found.index} <= {"checkpointed"}
    for each, row in found.iterrows():
        if name == "tpu-meshes":
            assert row.plan == cells[each].plan and row.program.mesh == row.plan.mesh
        elif name != "tpu":
            assert row.cell == json.loads(json.dumps(dataclasses.asdict(cells[each]))), each
        assert row.device == cells[each].tpu
    assert len({tuple(program.versions.items()) for program in found.program}) == 1


def test_a_step_is_none_of_what_is_no_whole_step_or_has_no_table():
    every = records.frame()
    none = every[every.step.isna() & every.program.notna()]
    assert set(none.record) == {"tpu", "tpu-decoder", "tpu-experts"}
    words = {"tpu-decoder": "gradients ", "tpu-experts": "layer ", "tpu": "="}
    assert all(words[row.record] in row.Index for row in none.itertuples())
    assert {word for name in none.index[none.record == "tpu"] for word in ("loss=", "dtype=")
            if word in name} == {"loss=", "dtype="}


@pytest.mark.parametrize("name", ("meshes", "pipeline", "experts", "context"))
def test_what_was_compiled_in_bfloat16_is_described_so(name):
    steps = records.frame(f"tpu-{name}").step.dropna()
    assert len(steps) and {step.config.dtype for step in steps} == {jnp.bfloat16}


def test_a_context_goes_the_way_of_its_cell_and_one_device_has_blocks_or_scores():
    for row in CONTEXT.itertuples():
        plan, way, several = row.step.plan, row.cell["way"], row.cell["devices"] > 1
        assert plan.context == row.cell["devices"]
        assert plan.method == (way if several else Plan().method)
        assert plan.attention == ("blocks" if way == "blocks" and not several else "")


def test_dense_layers_multiply_as_much_as_the_active_experts():
    D, F, routed, layers = 768, 3072, 2, 6
    of_six = (layers - 1) * 2 * D * F + routed * 2 * D * F + D * 2 * D  # and two shared, D to D
    assert layers * 2 * D * aot_decoder.NOW.hidden == of_six


@pytest.mark.parametrize("name", TIMED.index)
def test_a_decoder_multiplies_what_its_step_says_and_its_parts_make_the_step(name):
    row = TIMED.loc[name]
    done, again = step_work(row.step).done, 0
    if row.device.startswith("v6e"):  # whose compiler keeps no scores of a row
        again = 2 * sum(each.flops for each in row.step.placed if "U" in each.row.made)
    assert row.flops == pytest.approx(done + again, rel=1e-3) or (
        row.program.rematerialised and row.flops > done)
    parts = row.program.seen["parts"]
    assert sum(parts.values()) == pytest.approx(row.ms, rel=1e-6)
    assert -1e-6 < parts["waiting"] >= row.exposed - 1e-6


@pytest.mark.parametrize("name", [
    row.Index for row in TIMED.itertuples() if row.cell["shape"] == [8, 1]
    and (row.cell["row"], row.cell["regather"], row.cell["dtype"]) == (
        "fully_sharded", None, "bfloat16")])
def test_weights_are_gathered_in_bfloat16_by_the_formula(name):
    row, key = TIMED.loc[name], ("all-gather", ("batch",))
    times = 1 / 2 if row.cell["parts"] else 1  # gathered once, before the first of the parts
    plan = Plan(8, rules="fully_sharded")
    expected = step_traffic(describe(row.step.config, plan, row.step.rows), 2, True)[key].bytes
    assert row.program.traffic[key].bytes == pytest.approx(expected * times, rel=2e-3)


def test_useful_work_is_that_of_one_device_and_nothing_is_counted_twice():
    T, D, V, H = 1024, 768, 100_277, 12
    turned = 2 * 2 * 128 * 128 * (1 + H)  # two matrices each, from the latents to the turned parts
    layer = 2 * D * 256 + 2 * 128 * 3 * D + 2 * D * D + 2 * 2 * D * 3712 + 2 * T * 2 * D
    forward = 48 * layer + 40 * (turned + 2 * T * H * 128) + 2 * D * V
    assert DECODER.useful[NOW] == DECODER.useful[UNTUNED] == 3 * forward * 8 * T
    assert DECODER.mfu[NOW] > max(0.3, 1.5 * DECODER.mfu[UNTUNED])
    for row in PIPELINE.itertuples():
        rows = 2 * row.cell["rows"] * row.cell["microbatches"]
        assert row.useful * 8 == step_work(describe(row.step.config, Plan(), rows)).useful
    row = CONTEXT.loc["ring 8 65536 timed"]
    hidden = 3 * 4 * 1024 * 12 * (row.cell["tokens"] * (row.cell["tokens"] - 1) // 2)
    whole = step_work(describe(row.step.config, Plan(), 1)).useful
    assert row.useful * 8 == whole - hidden  # by the mask


@pytest.mark.parametrize("name", PIPELINE.index)
def test_a_schedule_sends_what_its_turns_send(name):
    cell, program = PIPELINE.cell[name], PIPELINE.program[name]
    (_, p), m = cell["shape"], cell["microbatches"]
    turns = dict.fromkeys(aot_pipeline.EVERY_TURN, m + p - 1) | {"lockstep 1F1B": m + 2 * (p - 1)}
    turns = turns.get(cell["schedule"])
    if turns is None:
        turns = len(table_of(aot_pipeline.TABLES[cell["schedule"]](p, m)).part)
    moved = program.traffic["collective-permute", ("stage",)]
    assert program.fits and moved.count == 2 * turns
    assert moved.bytes == moved.count * cell["rows"] * cell["tokens"] * cell["embed"] * 2  # bf16


def test_the_work_of_a_layer_is_that_of_its_way():
    """Slots: those of the capacity. One-hot: twice as many tokens by slots by D besides."""
    sizes = bench_experts.FULL
    B, T, D, F, E = (sizes[name] for name in "BTDFE")
    C = capacity(bench_experts.FACTOR, T, bench_experts.ACTIVE, E)
    padded, router = E * C / (T * bench_experts.ACTIVE), 2 * B * T * D * E
    layers = EXPERTS[EXPERTS.step.isna()]
    assert len(layers) == 2 * len(bench_experts.WAYS)
    for each in layers.itertuples():
        way, gradients = each.cell["way"], each.cell["gradients"]
        passes = 3 if gradients else 1
        choices = each.useful / passes - router
        if way == "slots of a capacity":
            expected = passes * (padded * choices + router)
        elif way == "one-hot dispatch":
            trips = 2 * 2 * B * T * E * C * D
            expected = passes * (padded * choices + router + trips)
            if gradients:  # of a mask there is no gradient, of the gates there is
                expected -= 2 * B * T * E * C * D
        elif way.startswith("ragged") and not gradients:
            expected = choices + router
        elif way.startswith("ragged"):  # the third part, of the weights, is dense
            expected = (2 + E) * choices + passes * router
        else:
            most = 1 + E * bench_experts.BLOCK / (B * T * bench_experts.ACTIVE)
            assert 1 < each.flops / each.useful < most
            continue
        assert each.flops == pytest.approx(expected, rel=2e-3), (way, gradients)


@pytest.mark.parametrize("name", [name for name in EXPERTS.index if name.startswith("step ")])
def test_experts_six_all_to_alls_of_all_slots_and_work_that_is_the_routers_too(name):
    row = EXPERTS.loc[name]
    cell, moved = row.cell, row.program.traffic.along("expert", kind="all-to-all")
    sized = aot_experts.Step(0).step
    dense = step_work(describe(sized.config, Plan(), cell["rows"])).useful
    routers = 3 * 2 * cell["embed"] * cell["experts"] * cell["tokens"] * cell["rows"] * cell["layers"]
    across = cell["across"]
    assert row.useful == row.program.seen["useful"] == dense + (across > 0) * routers
    assert row.step.config.experts == (
        ExpertSizes(16, 2, capacity=cell["capacity"], auxiliary=0.01) if across else None)
    C = capacity(cell["capacity"], cell["tokens"], cell["active"], cell["experts"])
    assert moved.count == (across > 0) * 6 * cell["layers"]
    assert moved.bytes == moved.count * cell["rows"] * cell["experts"] * C * cell["embed"] * 2


@pytest.mark.parametrize("name", [each for each in CONTEXT.index if CONTEXT.fits[each]
                                  and not each.endswith("timed")])
def test_of_rows_that_fit_the_longest_is_followed_by_one_that_was_refused(name):
    way, devices, tokens = name.rsplit(" ", 2)
    longer = CONTEXT.loc[f"{way} {devices} {2 * int(tokens)}"]
    assert CONTEXT.live[name] < 15.75 * 2**30 and (longer.fits or longer.peak > 15.75 * 2**30)


def test_what_a_ring_exchanges_and_what_the_clock_says_of_it():
    """A ring's n - 1 trips: keys and values twice, in bfloat16, and sums of gradients, float32."""
    timed = CONTEXT[CONTEXT.ms.notna()]
    assert {each["way"] for each in timed.cell} == {"gather", "ring", "ulysses"}
    for row in timed.itertuples():
        links, exposed = map(math.fsum, zip(*row.exchanges.values()))
        assert row.cell["tokens"] == aot_context.TIMED and exposed == pytest.approx(row.exposed)
        assert exposed <= links == pytest.approx(row.program.clock["kinds"]["collective"])
    config = timed.step["ring 8 65536 timed"].config
    moved = timed.program["ring 8 65536 timed"].traffic["collective-permute", ("context",)]
    u = config.tokens // 8 * config.groups * config.head_size * 2
    assert moved == (6 * 7 * config.layers, (4 + 2 * 2) * 7 * u * config.layers)
    chip = DEVICES["TPU v5e"]
    assert round(tokens_to_hide(chip, 16, 16)) == 7_880
    assert round(tokens_to_hide(chip, 16, 2)) == 985


def test_a_cell_that_is_asked_for_is_the_step_of_its_record():
    for cell in (aot_decoder.NOW, dataclasses.replace(aot_decoder.NOW, row="zero1", parts=4)):
        asked = asked_step("tpu-decoder", dataclasses.asdict(cell))
        assert asked.config == cell.config and asked.layout.rules == cell.rules
        assert asked.plan.microbatches == (cell.parts or 1) and asked.plan.rules == cell.row
