"""Records: what they hold is drawn and said, and nothing where there is none."""
import json
import math

import numpy as np
import pytest

from meshbook.data import tokens
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


def test_targets_that_were_measured_are_met_or_missed():
    rows = [["speed", "at least 2", 2.0], ["memory", "at most 0.2", 0.21],
            ["share", "at least 0.4", 0.1], ["time", "at most 1.5", None], ["bytes", "at most 3", 3]]
    assert records.targets_met({"targets": rows}) == {
        "speed": True, "memory": False, "share": False, "bytes": True}


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


LOOKS = [{"step": step, "validation": loss, "bits per byte": loss / 4, "perplexity": 2.0,
          "samples": [f" text of {step}\n", "\0 other"], "seconds": 9.0 * step}
         for step, loss in ((0, 10.0), (20, 5.0), (40, 4.0))]
RUN = {"steps": 40, "config": {"vocabulary": 50_257}, "prompts": ["One", "Two"], "looks": LOOKS,
       "losses": [[10, 7.5], [20, 5.5], [30, 4.5], [40, 4.25]]}


@pytest.fixture
def with_stories(tmp_path):
    (tmp_path / "tinystories.json").write_text(json.dumps({"training": RUN}))
    return tmp_path


def test_without_a_record_of_tinystories_nothing_is_drawn_or_said(tmp_path, with_stories):
    assert records.tinystories("stories", with_stories) is None
    empty = tmp_path / "empty"
    assert records.tinystories("training", empty) is records.draw_training(empty) is None
    assert records.written_samples(folder=empty) == ""
    assert records.accelerators(with_stories) == []


def test_the_recorded_losses_are_drawn(with_stories, monkeypatch):
    drawn = []
    monkeypatch.setattr(records, "curves", lambda *given, **more: drawn.append((given, more)))
    records.draw_training(with_stories)
    (((series, *_), more),) = drawn
    assert series == {"training": ((10, 20, 30, 40), (7.5, 5.5, 4.5, 4.25)),
                      "validation": ([0, 20, 40], [10.0, 5.0, 4.0])}
    assert more["marks"] == [("guessing", math.log(50_257))]


def test_the_picture_says_how_far_the_loss_fell(with_stories):
    assert "from 10.00 to 4.00 nats" in records.draw_training(with_stories).alt


def test_samples_are_those_of_the_looks_and_prompts_that_are_asked_for(with_stories):
    told = records.written_samples((0, -1), 0, with_stories)
    assert told.splitlines() == [
        "After 0 steps, validation 10.00 nats per token (2.50 bits per byte):", "One text of 0",
        "", "After 40 steps, validation 4.00 nats per token (1.00 bits per byte):",
        "One text of 40"]
    every = records.written_samples((0, 1, 2, 7, -1), 1, with_stories)  # 7: there is none
    assert every.count("After") == 3 and "Two· other" in every


def test_the_record_of_tinystories_in_the_repository_agrees_with_itself():
    known = records.tinystories("stories")
    lengths = np.repeat(np.arange(len(known["lengths"])), known["lengths"])
    assert known["shares"] == tokens.row_shares(lengths, known["T"])
    (steps,) = known["merges"].values()
    assert len({"".join(parts) for parts, _ in steps}) == 1
    assert (records.RESULTS / "tinystories.json").stat().st_size < 60_000


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
