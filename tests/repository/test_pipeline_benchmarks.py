"""Benchmarks of schedules, experts and long rows: contestants do the same, or are not timed."""
import dataclasses

import pytest

from benchmarks import bench_context, bench_experts, bench_pipelines
from benchmarks.decoder_runs import ONE, TINY
from meshbook.models.losses import language_loss


def test_each_schedule_takes_the_steps_of_one_device():
    rows = bench_pipelines.measured(*TINY, rounds=1)
    assert [row["name"] for row in rows] == [ONE, *bench_pipelines.SCHEDULES]
    assert all("MB of temporaries a device" in row["note"] for row in rows)


def test_each_way_of_attention_takes_the_steps_of_one_device():
    config = dataclasses.replace(TINY[0], heads=8, tokens=64)
    rows = bench_context.measured(config, 1, rounds=1)
    assert [row["name"] for row in rows] == [ONE, *bench_context.WAYS]
    assert all(row["value"] > 0 and row["unit"] == "ms a step" for row in rows)


def test_each_way_of_dispatch_does_what_it_notes():
    rows = bench_experts.measured(**bench_experts.TEST, rounds=1)
    assert [row["name"] for row in rows] == list(bench_experts.WAYS)
    assert all("of the useful work" in row["note"] for row in rows)


def test_a_way_that_finds_something_else_is_not_timed(monkeypatch):
    half = lambda x, *given: bench_experts.by_capacity(x, *given) / 2
    monkeypatch.setitem(bench_experts.WAYS, "slots of a capacity", half)
    with pytest.raises(AssertionError, match="slots of a capacity"):
        bench_experts.measured(**bench_experts.TEST, rounds=1)


def test_a_way_with_other_losses_is_not_timed(monkeypatch):
    config = dataclasses.replace(TINY[0], heads=8, tokens=64)
    zigzagged = bench_context.WAYS["ring in zigzag order"]
    monkeypatch.setattr(bench_context, "WAYS", {"zigzag, not told": zigzagged})
    plain = lambda context, *given: language_loss(*given)
    monkeypatch.setattr(bench_context, "in_order", plain)
    with pytest.raises(AssertionError, match="zigzag, not told"):
        bench_context.measured(config, 1, rounds=1)
