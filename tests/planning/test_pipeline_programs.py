"""The pipelines compiled for TPUs: the record agrees with the schedules and with itself."""
import dataclasses
import json

import pytest

from benchmarks import aot_pipeline
from meshbook.costs.plans import Plan
from meshbook.costs.step import describe
from meshbook.costs.work import step_work
from meshbook.models.decoder import DecoderConfig
from meshbook.parallel.slots import table_of
from meshbook.planning import pipeline_programs
from meshbook.planning.pipeline_programs import (
    draw_pipelines, of_tpu, recorded_pipelines, table_of_pipelines
)

RECORD = recorded_pipelines()


def test_the_record_has_the_programs_that_the_command_compiles_each_as_it_says():
    cells = {cell.name: cell for cell in aot_pipeline.cells()}
    assert list(RECORD) == [name for name in cells if name in RECORD] and RECORD
    for name, found in RECORD.items():
        assert found.cell == json.loads(json.dumps(dataclasses.asdict(cells[name]))), name
        assert found.program.fits and found.program.topology == found.cell["tpu"]


@pytest.mark.parametrize("name", RECORD)
def test_a_schedule_sends_what_its_turns_send(name):
    cell, program = RECORD[name].cell, RECORD[name].program
    (_, p), m = cell["shape"], cell["microbatches"]
    turns = dict.fromkeys(aot_pipeline.EVERY_TURN, m + p - 1) | {"lockstep 1F1B": m + 2 * (p - 1)}
    turns = turns.get(cell["schedule"])
    if turns is None:
        turns = len(table_of(aot_pipeline.TABLES[cell["schedule"]](p, m)).part)
    moved = program.traffic["collective-permute", ("stage",)]
    assert moved.count == 2 * turns
    assert moved.bytes == moved.count * cell["rows"] * cell["tokens"] * cell["embed"] * 2  # bf16


@pytest.mark.parametrize("name", RECORD)
def test_the_clock_plays_no_less_than_the_useful_work(name):
    found = RECORD[name]
    config = DecoderConfig(**{each: found.cell[each] for each in pipeline_programs.SIZES})
    rows = 2 * found.cell["rows"] * found.cell["microbatches"]
    assert found.useful * 8 == step_work(describe(config, Plan(), rows)).useful
    assert 0 < found.utilisation < 0.5
    clock = found.program.clock
    assert clock["step"] > clock["kinds"]["compute"] + clock["exposed"]


def test_a_table_of_a_topology_and_its_bars_say_what_the_record_says():
    text, picture = table_of_pipelines("v5e-8"), draw_pipelines("v5e-8", 8).html
    for (schedule, count), each in of_tpu("v5e-8").items():
        (line,) = [line for line in text.splitlines()
                   if f"{count} microbatches, {schedule} " in line]
        assert f"{each.program.clock['step']:.0f} ms" in line and f"{each.utilisation:.1%}" in line
        if count == 8:
            assert f"{schedule}: MFU {each.utilisation:.0%}, {each.program.clock['step']:.0f} ms" in picture


def test_nothing_is_recorded_where_there_is_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline_programs, "RESULTS", tmp_path)
    assert recorded_pipelines() == {}
