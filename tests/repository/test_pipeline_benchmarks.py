"""Benchmarks of schedules and of long rows: each contestant takes the steps of one device."""
import dataclasses

import pytest

from benchmarks import bench_context, bench_pipelines
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


def test_a_way_with_other_losses_is_not_timed(monkeypatch):
    config = dataclasses.replace(TINY[0], heads=8, tokens=64)
    zigzagged = bench_context.WAYS["ring in zigzag order"]
    monkeypatch.setattr(bench_context, "WAYS", {"zigzag, not told": zigzagged})
    plain = lambda context, *given: language_loss(*given)
    monkeypatch.setattr(bench_context, "in_order", plain)
    with pytest.raises(AssertionError, match="zigzag, not told"):
        bench_context.measured(config, 1, rounds=1)
