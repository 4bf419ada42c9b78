"""A few steps of a run are traced whenever somebody asks, and no others."""
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from meshbook.profiling.on_demand import traced_on_demand
from meshbook.profiling.traces import read_trace


@pytest.fixture
def traced(monkeypatch):
    """What is started and stopped, and what was waited for, in order."""
    found = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: found.append(("start", folder)))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: found.append(("stop",)))
    monkeypatch.setattr(jax, "block_until_ready", lambda results: found.append(("ready", results)))
    return found


def test_nobody_asks_and_nothing_is_traced(traced, tmp_path):
    after = traced_on_demand(tmp_path)
    for step in range(5):
        after(step)
    assert traced == []


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_so_many_steps_follow_the_request_each_time(traced, tmp_path, steps):
    after = traced_on_demand(tmp_path, steps)
    for step in range(20):
        if step in (4, 12):
            (tmp_path / "profile").touch()
        after(step)
        assert (tmp_path / "profile").exists() is False
    assert traced == [event for asked in (4, 12) for event in (
        ("ready", asked), ("start", tmp_path / "profiles"),  # what came before is not in it
        ("ready", asked + steps), ("stop",))]  # and all that it asked for is


def test_who_asks_during_a_trace_gets_the_next_one(traced, tmp_path):
    after = traced_on_demand(tmp_path, steps=3)
    for step in range(12):
        if step in (2, 4):
            (tmp_path / "profile").touch()
        after(step)
    assert [event for event in traced if event[0] != "ready"] == 2 * [
        ("start", tmp_path / "profiles"), ("stop",)]
    assert [step for word, *step in traced if word == "ready"] == [[2], [5], [6], [9]]


def test_a_trace_has_the_steps_that_were_asked_for(tmp_path):
    jax.config.update("jax_enable_compilation_cache", False)  # such programs are in no profile
    step = jax.jit(lambda x: jnp.tanh(x @ x))
    x, after = jnp.ones((64, 64)), traced_on_demand(tmp_path, steps=2)
    step(x)
    jax.config.update("jax_enable_compilation_cache", True)
    for at in range(6):
        if at == 2:
            (tmp_path / "profile").touch()
        x = step(x)
        after(x)
    found = Counter(each.operation for each in read_trace(tmp_path / "profiles").records)
    assert set(found.values()) == {2}
