"""Schedules as data: closed formulas, an independent simulator, deadlocks, and bad input."""
import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from properties import examples

from meshbook.parallel.schedules import (
    Costs, Deadlock, Task, gpipe, interleaved, one_f_one_b, simulate, split_backward, zero_bubble)

SIZES = [(p, m) for p in (1, 2, 3, 4, 6, 8) for m in (1, 2, 3, 4, 6, 8, 13, 16, 32)]
DIVIDING = [(p, m, v) for p, m in SIZES if m % p == 0 for v in (1, 2, 3, 4)]
UNEQUAL = Costs(F=2, B=3, W=1, send=Fraction(1, 4))


def all_schedules(p, m):
    found = {"gpipe": gpipe(p, m), "1f1b": one_f_one_b(p, m), "zero bubble": zero_bubble(p, m),
             "split": split_backward(one_f_one_b(p, m))}
    if m % p == 0:
        found |= {"interleaved": interleaved(p, m, 2),
                  "split interleaved": split_backward(interleaved(p, m, 3))}
    return found


def longest_paths(schedule, costs):
    """When each task ends, by recursion: {(device, position): the longest path to its end}."""
    p, ends = len(schedule), {}
    made = {(part, task.microbatch, task.chunk * p + device): (device, position)
            for device, tasks in enumerate(schedule) for position, task in enumerate(tasks)
            for part in task.kind}

    def before(device, position):
        task = schedule[device][position]
        stage = task.chunk * p + device
        keys = {"F": [("F", stage - 1)], "W": [("B", stage)]}.get(
            task.kind, [("F", stage), ("B", stage + 1)])
        found = [made.get((part, task.microbatch, other)) for part, other in keys]
        return [each for each in found if each]

    def end_of(device, position):
        if (device, position) not in ends:
            start = end_of(device, position - 1) if position else 0
            for other in before(device, position):
                start = max(start, end_of(*other) + costs.send * (other[0] != device))
            cost = sum(getattr(costs, part) for part in schedule[device][position].kind)
            ends[device, position] = start + cost
        return ends[device, position]

    for device, tasks in enumerate(schedule):
        for position in range(len(tasks)):
            end_of(device, position)
    return ends


@pytest.mark.parametrize("p, m", SIZES)
def test_closed_formulas(p, m):
    sent = {pair: m for s in range(p - 1) for pair in ((s, s + 1), (s + 1, s))}
    for schedule in gpipe(p, m), one_f_one_b(p, m):
        found = simulate(schedule)
        assert found.makespan == 3 * (m + p - 1)
        assert found.bubble == pytest.approx((p - 1) / (m + p - 1))
        assert found.sent == sent
    assert simulate(gpipe(p, m)).live == [m] * p
    assert simulate(one_f_one_b(p, m)).live == [min(m, p - s) for s in range(p)]
    for schedule in gpipe(p, m), one_f_one_b(p, m):
        assert simulate(split_backward(schedule)).makespan == 3 * m + 2 * (p - 1)
    found = simulate(zero_bubble(p, m))
    assert found.makespan == max(3 * m + p - 1, 2 * m + 2 * p - 1)  # the first for m >= p
    assert found.live == [min(m, p)] * p
    assert found.sent == sent


@pytest.mark.parametrize("p, m, v", DIVIDING)
def test_closed_formulas_of_interleaved_schedules(p, m, v):
    found = simulate(interleaved(p, m, v))
    assert found.makespan == 3 * (v * m + p - 1)
    assert found.bubble == pytest.approx((p - 1) / (v * m + p - 1))
    assert found.live == [min(v * m, v * p + p - 1 - 2 * d) for d in range(p)]
    assert sum(found.sent.values()) == 2 * m * (v * p - 1) * (p > 1)
    if p > 2:
        assert found.sent[0, 1] == found.sent[1, 0] == v * m
        assert found.sent.get((p - 1, 0), 0) == (v - 1) * m


@examples(40)
@given(st.integers(1, 9), st.integers(1, 24),
       st.builds(Costs, *[st.fractions(0, 4, max_denominator=4)] * 4))
@example(8, 16, UNEQUAL)
@example(4, 4, Costs(F=1, B=0, W=2, send=3))
def test_simulation_is_that_of_longest_paths(p, m, costs):
    for name, schedule in all_schedules(p, m).items():
        ends = longest_paths(schedule, costs)
        found = simulate(schedule, costs)
        assert [event.start for event in found.events] == sorted(
            event.start for event in found.events)
        positions = [itertools.count() for _ in schedule]
        for event in found.events:
            at = next(positions[event.device])
            assert schedule[event.device][at] == event.task
            assert ends[event.device, at] == event.end, name
        assert found.makespan == max(ends.values())


def test_costs_of_half_a_stage():
    half = Costs(Fraction(1, 2), Fraction(1, 2), Fraction(1, 2))
    assert simulate(interleaved(4, 8, 2), half).makespan == 3 * 8 + Fraction(3 * 3, 2)
    assert simulate(one_f_one_b(4, 8)).makespan == 3 * (8 + 3)


def test_sending_takes_time_between_devices_only():
    assert simulate(gpipe(1, 2), Costs(send=5)).makespan == 6
    assert simulate(gpipe(2, 1), Costs(send=5)).makespan == 6 + 2 * 5
    assert simulate(interleaved(1, 2, 3), Costs(send=5)).makespan == 18


def test_a_step_without_costs_has_no_bubble():
    assert simulate(gpipe(2, 2), Costs(0, 0, 0)).bubble == 0


def test_a_deadlock_names_who_waits_for_what():
    schedule = [[Task("F", 0), Task("BW", 0), Task("F", 1), Task("BW", 1)],
                [Task("F", 1), Task("BW", 1), Task("F", 0), Task("BW", 0)]]
    with pytest.raises(Deadlock, match="device 0 waits at BW of microbatch 0 for B of microbatch 0 "
                                       "on device 1; device 1 waits at F of microbatch 1 for F of "
                                       "microbatch 1 on device 0"):
        simulate(schedule)


def random_order(random, p, m):
    """On each device a random order of a few microbatches, each in the order F, B, W."""
    schedule = []
    for _ in range(p):
        kinds = {i: iter("FBW") for i in range(m)}
        order = random.permutation(np.repeat(np.arange(m), 3))
        schedule.append([Task(next(kinds[i]), int(i)) for i in order])
    return schedule


def test_random_orders_end_or_deadlock_as_their_graph_has_a_cycle():
    random, ended = np.random.default_rng(0), 0
    for _ in range(60):
        schedule = random_order(random, 2, 2)
        try:
            expected = max(longest_paths(schedule, UNEQUAL).values())
        except RecursionError:
            with pytest.raises(Deadlock):
                simulate(schedule, UNEQUAL)
        else:
            ended += 1
            assert simulate(schedule, UNEQUAL).makespan == expected
    assert 10 < ended < 50


def without(schedule, device, at):
    return [tasks[:at] + tasks[at + 1:] if d == device else tasks
            for d, tasks in enumerate(map(list, schedule))]


@pytest.mark.parametrize("make, message", [
    (lambda: gpipe(0, 4), "expected 1 or more stages; found 0"),
    (lambda: one_f_one_b(2, 0), "expected 1 or more microbatches; found 0"),
    (lambda: zero_bubble(-1, 2), "expected 1 or more stages; found -1"),
    (lambda: interleaved(2, 4, 0), "expected 1 or more chunks; found 0"),
    (lambda: interleaved(4, 6, 2), "rounds of 4, one for each device; found 6"),
    (lambda: simulate([]), "expected a schedule with tasks; found none"),
    (lambda: simulate(gpipe(2, 2), Costs(F=-1)), "expected costs of 0 or more"),
    (lambda: simulate(without(gpipe(2, 2), 1, 0)),
     "device 1: expected F, B and W of microbatch 0, each once and in this order; found BW"),
    (lambda: simulate(gpipe(2, 2)[:1] + [[]]), "device 1: .* found nothing"),
    (lambda: simulate([gpipe(1, 1)[0] * 2]), "found FBWFBW"),
    (lambda: simulate([[Task("F", 0), Task("W", 0), Task("B", 0)]]), "found FWB"),
    (lambda: simulate([[Task("F", 0), Task("G", 0)]]), "found Task.*'G'"),
    (lambda: simulate([[Task("F", -1), Task("BW", 0)]]), "microbatches from 0"),
    (lambda: simulate(without(interleaved(2, 2, 2), 0, 1)), "microbatch 1: expected|chunk 0|of "
     "microbatch 1"),
])
def test_what_is_no_schedule_is_said(make, message):
    with pytest.raises(ValueError, match=message):
        make()
