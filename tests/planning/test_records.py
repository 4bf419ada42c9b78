"""Records of accelerators: drawn where there are some, and said where there is none."""
import json

import pytest

from meshbook.planning import records

FLOORS = {"compute": 0.004, "memory": 0.009, "interconnect": 0}
CELL = "vit, batch 1,024, bfloat16"
RECORD = {
    "platform": "gpu", "size": "full", "device": "NVIDIA H200",
    "provenance": {"date": "2026-11-30T10:00:00", "versions": {"jax": "0.11.2"}, "commit": ""},
    "cells": {CELL: {"contestants": {
        "this book": {"step seconds": 0.02, "share of peak": 0.2, "floors": FLOORS,
                      "moved bytes": 1, "peak bytes": 2**31},
        "fast": {"step seconds": 0.012, "share of peak": 0.36, "moved bytes": 1,
                 "floors": FLOORS | {"memory": 0.008}, "peak bytes": 2**30},
        "PyTorch compiled": {"error": "does not fit: 150 GB"}}}},
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "nvidia-h200.json").write_text(json.dumps(RECORD))
    return tmp_path


@pytest.mark.parametrize("other", [{"platform": "cpu"}, {"size": "test"}, {"platform": None}])
def test_what_is_no_accelerator_at_full_size_is_not_drawn(tmp_path, other):
    (tmp_path / "other.json").write_text(json.dumps(RECORD | other))
    assert records.accelerators(tmp_path) == []
    assert records.draw_steps(CELL, tmp_path) is records.draw_peaks(CELL, tmp_path) is None


def test_steps_are_drawn_with_their_floors(folder):
    html = records.draw_steps(CELL, folder).html
    for word in ("this book: 20% of peak", "20 ms", "12 ms", "floor: compute", "floor: memory",
                 "8 ms", "NVIDIA H200"):
        assert word in html, word
    assert "PyTorch" not in html and "9 ms" not in html


def test_peaks_are_drawn(folder):
    html = records.draw_peaks(CELL, folder).html
    assert "2 GiB" in html and "1 GiB" in html


def test_an_unknown_cell_is_refused_with_the_known_ones(folder):
    with pytest.raises(KeyError, match="no cell 'vit' was measured; there are vit, batch 1,024"):
        records.draw_steps("vit", folder)


def test_the_records_of_the_repository_can_be_read():
    for record in records.accelerators():
        assert record["cells"] and record["provenance"]["date"]


def test_a_benchmark_is_read_as_each_machine_recorded_it_last(tmp_path):
    runs = {f"jax 0.{n}.0": {"benchmarks": {"learning": {
        "provenance": {"date": f"2026-11-{day}"}, "rows": [{"value": n}]}}}
        for n, day in ((9, 20), (10, 26), (8, 21))}
    record = {"machine": "A, 2 cores", "runs": runs | {"jax 1.0.0": {"benchmarks": {}}}}
    (tmp_path / "a-2-cores.json").write_text(json.dumps(record))
    (tmp_path / "tpu.json").write_text("{}")
    assert records.benchmarked("learning", tmp_path) == {"A, 2 cores": [{"value": 10}]}
    assert records.benchmarked("loading", tmp_path) == {}
