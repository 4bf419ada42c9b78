"""The turns of a pipeline's schedule in one program, and how often its layers run in them."""
from __future__ import annotations

from typing import NamedTuple

from meshbook.costs.plans import Plan

SCHEDULES = ("gpipe", "lockstep", "one_f_one_b", "zero_bubble")


class Turns(NamedTuple):
    """A schedule in one program.

    permutes: on each device, of one activation or its gradient; bubble: the share of the time in
    which a device has nothing to do; kept: microbatches of which the first one keeps something;
    waiting: of them, those whose gradients of weights are still to be made; factor: how often the
    useful work is executed.
    """

    permutes: int
    bubble: float
    kept: int
    waiting: int
    factor: float


def turns_of(schedule: str, stages: int, microbatches: int):
    """The Turns of a schedule, of p stages and m microbatches.

    gpipe: a loop of m + p - 1 turns, and one back; a device works in every turn, on nothing in
    p - 1. lockstep: m + 2(p - 1) turns, of a forward and a backward pass, the forward pass once
    more before the latter. No device goes back in the first p - 1 turns, and none forward in the
    last: together 4(m + p - 1) units of time, of which a device works 4m. The others are tables of
    slots, one for each of F, B and W: 1F1B takes 3m + 2(p - 1), ZB-H1 3m + p - 1 where m is p or
    more. Raises ValueError for another schedule.
    """
    p, m = stages, microbatches
    if schedule not in SCHEDULES:
        raise ValueError(f"expected a schedule, one of {', '.join(SCHEDULES)}; found {schedule!r}")
    if schedule == "gpipe":
        turns = m + p - 1
        return Turns(2 * turns, (p - 1) / turns, turns, 0, turns / m)
    if schedule == "lockstep":
        turns = m + 2 * (p - 1)
        return Turns(2 * turns, (p - 1) / (m + p - 1), 2 * p - 1, 0, 4 / 3)
    one = schedule == "one_f_one_b"
    slots = 3 * m + 2 * (p - 1) if one else max(3 * m + p - 1, 2 * (m + p) - 1)
    return Turns(2 * slots, 1 - 3 * m / slots, min(m, p), 1 if one else min(m, p), 1.0)


def passes_of(plan: Plan):
    """How often a layer goes (forward, through what remat does again, backward) for a microbatch.

    A device of a pipeline works in every turn of GPipe, also on nothing, and of the others in the
    longest of what some device does.
    """
    p, m = plan.stage, plan.microbatches
    if p == 1:
        return 1.0, 1.0, 1.0
    turns = turns_of(plan.schedule, p, m).permutes / 2 / m
    if plan.schedule == "lockstep":  # forward in m + p - 1 of its turns, and back in as many
        each = (m + p - 1) / m
        return 2 * each, each, each
    return (turns,) * 3 if plan.schedule == "gpipe" else (turns / 3,) * 3  # F, B or W


def slots_of(plan: Plan):
    """Slots of a schedule's table for a microbatch, 0 for schedules that have none.

    All devices meet at the end of a slot, so that it lasts as long as the longest of F, B and W. As
    products these are equal. Of memory and random numbers F has most.
    """
    if plan.stage == 1 or plan.schedule in ("gpipe", "lockstep"):
        return 0
    return turns_of(plan.schedule, plan.stage, plan.microbatches).permutes / 2 / plan.microbatches
