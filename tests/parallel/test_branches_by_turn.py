"""What a schedule says of its conditionals, turn by turn, against the schedule's own events."""
from fractions import Fraction

import pytest

from meshbook.parallel import schedules
from meshbook.parallel.pipeline import by_tick
from meshbook.parallel.slots import SLOT_PARTS, table_of


@pytest.mark.parametrize("p, m", [(4, 8), (2, 3), (3, 1)])
def test_a_table_says_which_branches_are_taken_in_each_slot(p, m):
    schedule = schedules.zero_bubble(p, m)
    table = table_of(schedule)
    slots = table.by_turn
    done = [set() for _ in table.part]
    for event in schedules.simulate(schedule).events:
        done[int(event.start)].add((event.device, event.task.kind))
    for at, devices in enumerate(done):
        parts = {kind for _, kind in devices} | ({"-"} if len(devices) < p else set())
        assert {SLOT_PARTS[part] for part in slots["part"][at]} == parts
        for scope, device, kind in (("enter", 0, "F"), ("leave", p - 1, "F"), ("returned", 0, "B")):
            assert slots[scope][at] == (int((device, kind) in devices),)
    for scope in ("enter", "leave", "returned"):
        share = Fraction(sum(each for (each,) in slots[scope]), len(done))
        assert table.taken[scope][1] == share == Fraction(m, len(done))


@pytest.mark.parametrize("p, m", [(4, 8), (2, 3), (3, 1)])
def test_ticks_of_lockstep_1f1b_say_which_branches_are_taken(p, m):
    begin = {"enter": 0, "forward": 0, "leave": p - 1, "back": p - 1, "returned": 2 * (p - 1)}
    ticks = by_tick(p, m)
    assert ticks.keys() == begin.keys()
    for scope, taken in ticks.items():
        devices = p if scope in ("forward", "back") else 1
        assert len(taken) == m + 2 * (p - 1)
        busy = [tick for tick, branches in enumerate(taken) if 1 in branches]
        assert busy == list(range(begin[scope], begin[scope] + m + devices - 1))
        everybody = [tick for tick, branches in enumerate(taken) if branches == {1}]
        assert len(everybody) == max(m - devices + 1, 0)
