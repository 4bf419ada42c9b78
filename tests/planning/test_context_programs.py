"""The longest rows compiled for a TPU: the record agrees with the command that writes it."""
import dataclasses
import json

import pytest

from benchmarks import aot_context
from meshbook.planning import context_programs
from meshbook.planning.context_programs import draw_rows, longest_rows, table_of_rows
from meshbook.planning.topologies import RESULTS

RECORD = json.loads((RESULTS / context_programs.RECORD).read_text("utf8"))["cells"]


def test_the_record_has_the_programs_that_the_command_compiles():
    cells = {cell.name: cell for cell in aot_context.cells()}
    assert list(RECORD) == [name for name in cells if name in RECORD] and RECORD
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
