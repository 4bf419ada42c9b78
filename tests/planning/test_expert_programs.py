"""Experts compiled for a TPU: the record agrees with the command, the formulas and itself."""
import dataclasses
import json

import pytest

from benchmarks import aot_experts, bench_experts
from meshbook.costs.plans import Plan
from meshbook.costs.step import describe
from meshbook.costs.work import step_work
from meshbook.models.expert_layers import ExpertSizes
from meshbook.parallel.routing import capacity
from meshbook.planning import expert_programs
from meshbook.planning.expert_programs import (
    draw_steps, layers_by_dispatch, recorded_experts, steps_by_chips, table_of_layers,
    table_of_steps
)

RECORD = recorded_experts()
STEPS = {key: each for key, each in steps_by_chips().items() if key[0]}


def test_the_record_has_the_programs_that_the_command_compiles():
    cells = {cell.name: cell for cell in aot_experts.cells()}
    assert list(RECORD) == list(cells)
    for name, found in RECORD.items():
        assert found.cell == json.loads(json.dumps(dataclasses.asdict(cells[name]))), name
        assert found.program.seen["useful"] == cells[name].useful


def test_the_work_of_a_layer_is_that_of_its_way():
    """Slots: those of the capacity. One-hot: twice as many tokens by slots by D besides."""
    sizes = bench_experts.FULL
    B, T, D, F, E = (sizes[name] for name in "BTDFE")
    C = capacity(bench_experts.FACTOR, T, bench_experts.ACTIVE, E)
    padded, router = E * C / (T * bench_experts.ACTIVE), 2 * B * T * D * E
    for (way, gradients), each in layers_by_dispatch().items():
        passes = 3 if gradients else 1
        choices = each.program.seen["useful"] / passes - router
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
            assert 1 < each.work < 1 + E * bench_experts.BLOCK / (B * T * bench_experts.ACTIVE)
            continue
        assert each.program.flops == pytest.approx(expected, rel=2e-3), (way, gradients)


@pytest.mark.parametrize("key", STEPS, ids=str)
def test_six_all_to_alls_of_all_slots_travel_in_each_layer(key):
    across, factor = key
    cell, moved = STEPS[key].cell, STEPS[key].program.traffic.along("expert", kind="all-to-all")
    C = capacity(factor, cell["tokens"], cell["active"], cell["experts"])
    slots = cell["rows"] * cell["experts"] * C
    assert moved.count == 6 * cell["layers"]
    assert moved.bytes == moved.count * slots * cell["embed"] * 2  # bfloat16


def test_useful_work_of_a_step_is_that_of_the_dense_one_and_of_the_routers():
    dense = steps_by_chips()[0, 0]
    step = aot_experts.Step(0)
    planned = step_work(describe(step.config, Plan(), step.rows))
    assert dense.program.seen["useful"] == planned.useful
    spread = aot_experts.Step(8)
    assert spread.config.experts == ExpertSizes(16, 2, capacity=1.25, auxiliary=0.01)
    routed = step_work(describe(spread.config, Plan(), spread.rows))
    assert spread.useful == routed.useful > step.useful == planned.useful


def test_the_tables_and_the_bars_say_what_the_record_says():
    text = table_of_layers()
    for (way, gradients), each in layers_by_dispatch().items():
        (line,) = [line for line in text.splitlines() if line.startswith(way)
                   and ("gradients" if gradients else "forward") in line]
        assert f"{each.work:.2f}" in line and f"{each.program.clock['step']:.1f} ms" in line
    text, picture = table_of_steps(), draw_steps().html
    for (across, factor), each in steps_by_chips().items():
        label = f"{across} chips share, capacity {factor}" if across else "dense"
        (line,) = [line for line in text.splitlines() if line.startswith(label)]
        assert f"{each.utilisation:.1%}" in line and f"{each.exposed('all-to-all'):.1f} ms" in line
        assert f"MFU {each.utilisation:.0%}, {each.program.clock['step']:.0f} ms" in picture


def test_nothing_is_recorded_where_there_is_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(expert_programs, "RESULTS", tmp_path)
    assert recorded_experts() == layers_by_dispatch() == steps_by_chips() == {}
