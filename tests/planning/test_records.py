"""Records: one table of what the files hold, in words and pictures, and nothing where there is none."""
import json

import pytest

from meshbook.planning import records
from meshbook.planning.topologies import RESULTS

FLOORS = {"compute": 0.004, "memory": 0.009, "interconnect": 0}
CELL = "vit, batch 1,024, bfloat16"
RECORD = {
    "platform": "gpu", "size": "full", "device": "NVIDIA H200", "machine": "a machine",
    "provenance": {"date": "2026-11-30T10:00:00", "versions": {"jax": "0.11.2"}, "commit": ""},
    "cells": {CELL: {"contestants": {
        "this book": {"step seconds": 0.02, "share of peak": 0.2, "floors": FLOORS,
                      "moved bytes": 1, "peak bytes": 2**31},
        "fast": {"step seconds": 0.012, "share of peak": 0.36, "moved bytes": 1,
                 "floors": FLOORS | {"memory": 0.008}, "peak bytes": 2**30},
        "PyTorch compiled": {"error": "does not fit: 150 GB"}}}},
}
SAVED = {path.stem: json.loads(path.read_text("utf8")) for path in RESULTS.glob("*.json")}
PEAKS = {"v2": 23e12, "v3": 61.5e12, "v4": 275e12, "v5e": 197e12, "v5p": 459e12, "v6e": 918e12}
OF_PROGRAM = "mesh", "fits", "peak", "live", "temporaries", "flops"
TIMES = "ms", "exposed", "computing", "copying", "copies", "mfu"


def same(found, value):
    return found is None or found != found if value is None else found == value


@pytest.mark.parametrize("record", records.COMPILED)
def test_a_compiled_row_is_what_its_file_says(record):
    found, saved = records.frame(record), SAVED[record]["cells"]
    assert list(found.index) == list(saved)
    for name, fields in saved.items():
        row, program = found.loc[name], fields.get("program", fields)
        plain = {each: program[each] for each in OF_PROGRAM} | {
            "record": record, "device": program["topology"], "cell": fields.get("cell"),
            "held": min(program["live"], program["peak"]) if program["fits"] else None}
        clock, seen = program["clock"], program.get("seen") or {}
        if clock:
            lines, kinds = seen if record == "tpu-meshes" else clock, clock["kinds"]
            plain |= {"ms": lines["step"], "exposed": lines["exposed"], "copies": kinds["copy"],
                      "computing": kinds["compute"]}
            assert row.computing + row.copying + row.exposed == pytest.approx(row.ms)
            assert row.copying >= 0
        else:
            plain |= dict.fromkeys(TIMES)
        plain["exchanges"] = seen.get("exchanges", seen or None if record == "tpu-context" else None)
        assert not {each: value for each, value in plain.items() if not same(row[each], value)}
        if row.step is not None:
            assert row.plan == row.step.plan and row.rows == row.step.rows
        if clock and row.useful == row.useful:
            most = PEAKS[row.device.partition("-")[0].partition(":")[0]] * row.ms / 1e3
            assert row.mfu == pytest.approx(row.useful / most) and 0 < row.mfu < 0.6


def test_a_row_of_a_benchmark_is_that_of_the_machines_last_run():
    found, count = records.frame(), 0
    for saved in [each for name, each in SAVED.items() if name.endswith("-cores")]:
        runs = [run["benchmarks"] for run in saved["runs"].values()]
        for name in {name for run in runs for name in run}:
            last = max((run[name] for run in runs if name in run),
                       key=lambda run: run["provenance"]["date"])
            rows = found[(found.record == name) & (found.machine == saved["machine"])]
            assert list(rows.cell) == last["rows"] and len(rows.date.unique()) <= 1
            for (label, row), plain in zip(rows.iterrows(), last["rows"], strict=True):
                assert label == plain["name"] and row.date == last["provenance"]["date"]
                assert all(same(row[each], plain.get(each)) for each in ("value", "unit", "ratio"))
            count += len(rows)
    compiled = sum(len(SAVED[name]["cells"]) for name in records.COMPILED)
    measured = [len(cell["contestants"]) for each in SAVED.values() if each.get("platform") == "gpu"
                for cell in each["cells"].values()]
    assert len(found) == compiled + count + sum(measured) and measured


def test_a_later_run_replaces_an_earlier_one(tmp_path):
    runs = {f"jax 0.{n}.0": {"benchmarks": {"learning": {
        "provenance": {"date": f"2026-11-{day}"}, "rows": [{"name": "a", "value": n}]}}}
        for n, day in ((9, 20), (10, 26), (8, 21))}
    saved = {"machine": "A, 2 cores", "runs": runs | {"jax 1.0.0": {"benchmarks": {}}}}
    (tmp_path / "a-2-cores.json").write_text(json.dumps(saved))
    found = records.frame("learning", folder=tmp_path)
    assert list(found.value) == [10] and list(found.machine) == ["A, 2 cores"]


def test_without_records_there_are_no_rows_and_no_pictures(tmp_path):
    for record in (*records.COMPILED, "learning", CELL, None):
        found = records.frame(record, "way", folder=tmp_path)
        assert found.empty and [*found.columns] == [*records.FIELDS[:1], *records.FIELDS[2:], "way"]
        assert records.spent(found, "all-to-all") == {}
        assert records.draw_ms(records.spent(found)) is None
    assert records.draw_steps(CELL, tmp_path) is records.draw_peaks(CELL, tmp_path) is None


def few():
    found = records.frame("tpu-experts").loc[["step 8 1.25", "step 0 1.25"]].set_axis(["a", "b"])
    return found.assign(
        ms=[100.0, 1234.5], exposed=[30.0, 34.5], computing=[60.0, 1000.0], copying=[10.0, 200.0],
        mfu=[0.5, 0.25], peak=[2**30, 3 * 2**29], said=["words", ""],
        exchanges=[{"all-to-all": [25.0, 20.0], "all-reduce": [9.0, 3.0]}, {}])


def test_chosen_columns_are_said_in_their_units():
    assert records.as_table(few(), ("ms", "exposed", "mfu", "peak", "said"), "a step of").splitlines() == [
        "a step of    a step  exposed    MFU      peak   said",
        "a            100 ms  30.0 ms  50.0%  1.00 GiB  words",
        "b          1,234 ms  34.5 ms  25.0%  1.50 GiB"]
    assert records.as_table(few().assign(ms=float("nan")), ["ms"]).split() == ["a", "step", "a", "b"]


def test_a_step_is_spent_on_work_and_on_waiting_for_kinds():
    assert records.waits(few(), "all-to-all", "all-reduce") == ([34.0, 0.0], [23.0, 0.0])
    assert records.spent(few()) == {
        "a: MFU 50%": {"computing": 60.0, "copying": 10.0, "waiting for transfers": 30.0},
        "b: MFU 25%": {"computing": 1000.0, "copying": 200.0, "waiting for transfers": 34.5}}
    assert records.spent(few(), "all-to-all")["a: MFU 50%"] == {
        "computing": 60.0, "copying": 10.0, "waiting for all-to-alls": 20.0,
        "waiting for other transfers": 10.0}
    drawn = records.draw_ms(records.spent(few()))
    assert "Milliseconds of a step by the compiler's clock. a: MFU 50%, 100 ms; b:" in drawn.alt
    assert "waiting for transfers" in drawn.html
    refused = few().assign(ms=[float("nan"), 1234.5])
    assert [*records.spent(refused)] == ["b: MFU 25%"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "nvidia-h200.json").write_text(json.dumps(RECORD))
    return tmp_path


@pytest.mark.parametrize("other", [{"platform": "cpu"}, {"size": "test"}, {"platform": None}])
def test_what_is_no_accelerator_at_full_size_is_not_drawn(tmp_path, other):
    (tmp_path / "other.json").write_text(json.dumps(RECORD | other))
    assert records.accelerators(tmp_path) == [] and records.frame(folder=tmp_path).empty
    assert records.draw_steps(CELL, tmp_path) is records.draw_peaks(CELL, tmp_path) is None


def test_steps_are_drawn_with_their_floors(folder):
    html = records.draw_steps(CELL, folder).html
    for word in ("this book: 20% of peak", "20 ms", "12 ms", "floor: compute", "floor: memory",
                 "8 ms", "NVIDIA H200"):
        assert word in html, word
    assert "PyTorch" not in html and "9 ms" not in html


def test_contestants_are_rows_and_their_peaks_are_drawn(folder):
    html = records.draw_peaks(CELL, folder).html
    assert "2 GiB" in html and "1 GiB" in html
    row = records.frame(CELL, "floors", folder=folder).loc["fast"]
    assert (row.device, row.value, row.unit, row.mfu, row.peak) == (
        "NVIDIA H200", 12.0, "ms a step", 0.36, 2**30)
    assert (row.machine, row.date, row.floors["memory"]) == (
        "a machine", "2026-11-30T10:00:00", 0.008)


def test_targets_that_were_measured_are_met_or_missed():
    rows = [["speed", "at least 2", 2.0], ["memory", "at most 0.2", 0.21],
            ["share", "at least 0.4", 0.1], ["time", "at most 1.5", None], ["bytes", "at most 3", 3]]
    assert records.targets_met({"targets": rows}) == {
        "speed": True, "memory": False, "share": False, "bytes": True}


def test_an_unknown_cell_is_refused_with_the_known_ones(folder):
    with pytest.raises(KeyError, match="no cell 'vit' was measured; there are vit, batch 1,024"):
        records.draw_steps("vit", folder)


def test_chosen_rows_of_a_benchmark_are_drawn_and_said(tmp_path):
    rows = [{"name": name, "value": value, "unit": "ms a step"}
            for name, value in (("quick", 20.5), ("slow", 41.0), ("broken", None))]
    steps = {"provenance": {"date": "2026-11-26"}, "rows": rows}
    record = {"machine": "a machine", "runs": {"one": {"benchmarks": {"steps": steps}}}}
    (tmp_path / "a-machine-2-cores.json").write_text(json.dumps(record))
    draw = lambda labels, name="steps", machine="a machine": records.draw_benchmark(
        name, machine, labels, "A step", tmp_path)
    drawn = draw({"slow": "the slow one", "quick": "the quick one"}).html
    for words in ("the slow one 41, the quick one 20.5", "recorded on a machine", "41 ms a step"):
        assert words in drawn
    for missing in ("broken", "none"):
        with pytest.raises(KeyError, match=missing):
            draw({missing: "missing"})
    with pytest.raises(KeyError, match="another"):
        draw({"slow": "slow"}, machine="another")
