"""The longest rows compiled for a TPU: the record agrees with the command that writes it."""
import dataclasses
import json

import pytest

from benchmarks import aot_context
from meshbook.costs.devices import DEVICES, tokens_to_hide
from meshbook.costs.plans import Plan
from meshbook.costs.step import describe
from meshbook.costs.work import causal_work, step_work
from meshbook.planning import context_programs
from meshbook.planning.context_programs import (
    draw_rows, longest_rows, table_of_rows, table_of_times, timed_rows
)
from meshbook.planning.topologies import RESULTS

RECORD = json.loads((RESULTS / context_programs.RECORD).read_text("utf8"))["cells"]


def test_the_record_has_the_programs_that_the_command_compiles():
    cells = {cell.name: cell for cell in aot_context.cells()}
    assert list(RECORD) == list(cells)
    for name, found in RECORD.items():
        assert found["cell"] == dataclasses.asdict(cells[name]), name


@pytest.mark.parametrize("each", longest_rows(), ids=lambda each: f"{each.way}-{each.devices}")
def test_the_next_longer_row_was_tried_and_refused(each):
    assert each.too_long[0] == 2 * each.fits[0]
    for tokens, fits in ((each.fits[0], True), (each.too_long[0], False)):
        assert RECORD[f"{each.way} {each.devices} {tokens}"]["program"]["fits"] is fits
    assert each.fits[1] < 15.75 * 2**30 < each.too_long[1]


def test_a_way_of_which_no_row_was_refused_is_left_out(tmp_path, monkeypatch):
    record = {"cells": {name: found for name, found in RECORD.items() if found["program"]["fits"]}}
    (tmp_path / context_programs.RECORD).write_text(json.dumps(record))
    monkeypatch.setattr(context_programs, "RESULTS", tmp_path)
    assert longest_rows() == []


def test_the_table_and_the_bars_say_the_same():
    text, picture = table_of_rows(), draw_rows().html
    for each in longest_rows():
        assert f"{each.fits[0]:,}" in text and f"{each.too_long[0]:,}" in text
        assert f"{each.fits[0] / 1024:,.0f}" in picture


def test_each_way_with_eight_devices_is_timed_with_what_it_exchanges():
    """A ring's n - 1 trips: keys and values twice, in bfloat16, and sums of gradients, float32."""
    assert {each.way for each in timed_rows()} == {"gather", "ring", "ulysses"}
    for each in timed_rows():
        assert each.tokens == aot_context.TIMED and 0 <= each.exposed <= each.links < each.ms
        program = RECORD[f"{each.way} 8 {each.tokens} timed"]["program"]
        clock, other = program["clock"], program["seen"]["all-reduce"]
        assert each.links + other[0] == pytest.approx(clock["kinds"]["collective"])
        assert each.exposed + other[1] == pytest.approx(clock["exposed"])
    cell = aot_context.Cell("ring", 8, aot_context.TIMED, True)
    config, moved = cell.config, dict(
        ((kind, tuple(axes)), (count, size)) for kind, axes, count, size in
        RECORD[cell.name]["program"]["traffic"])["collective-permute", ("context",)]
    u = config.tokens // 8 * config.groups * config.head_size * 2
    assert moved == (6 * 7 * config.layers, (4 + 2 * 2) * 7 * u * config.layers)


def test_the_table_of_times_has_every_way():
    lines = table_of_times().splitlines()
    for each in timed_rows():
        (line,) = [line for line in lines if line.startswith(each.way)]
        assert f"{each.ms:,.0f} ms" in line and f"{each.exposed:.1f} ms" in line


def test_what_was_compiled_is_what_the_benchmark_compiles():
    assert context_programs.recorded_config(65_536) == aot_context.Cell("ring", 8, 65_536).config
    step = describe(context_programs.recorded_config(4), Plan(), 2)
    assert step_work(step).useful - causal_work(step) == 3 * 4 * 1024 * 12 * 2 * (16 - 10)  # 10 of 16 scores are seen


def test_a_link_is_hidden_by_as_many_tokens_as_groups_share():
    chip = DEVICES["TPU v5e"]
    assert round(tokens_to_hide(chip, 16, 16)) == 7_880
    assert round(tokens_to_hide(chip, 16, 2)) == 985
