"""Pipeline schedules as data: for each device, in order, what it does to which microbatch.

A schedule is a list of tasks per device and nothing else. Whatever is asked about it is found by
walking it: how long it takes, how long devices wait, how much they keep, what they send, and
whether it ever ends.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import accumulate, product
from numbers import Real
from operator import attrgetter
from typing import NamedTuple


class Task(NamedTuple):
    """What a device does at a time: to one microbatch, with one of the stages that it holds.

    kind: F, the forward pass; B, the gradient of the stage's input; W, the gradients of its
    weights; BW, both as one task, whose input gradient leaves when both are made. chunk: which of
    the device's stages, from 0; device d of p holds the stages d, p + d, 2p + d, ...
    """
    kind: str
    microbatch: int
    chunk: int = 0


Schedule = Sequence[Sequence[Task]]


class Costs(NamedTuple):
    """How long a task takes, in any unit of time; BW takes B + W. send: from device to device."""
    F: Real = 1
    B: Real = 1
    W: Real = 1
    send: Real = 0


class Event(NamedTuple):
    """A task, where it ran, and from when to when."""
    device: int
    task: Task
    start: Real
    end: Real


class Simulated(NamedTuple):
    """What became of a schedule.

    events: in the order of their starts. makespan: when the last one ends. bubble: the share of all
    devices' time until then in which they wait. live: per device, the most microbatches (of one
    chunk each) whose forward pass ran there and whose weights' gradients were not made yet. sent:
    activations, or their gradients, by (from device, to device).
    """
    events: list[Event]
    makespan: Real
    bubble: Real
    live: list[int]
    sent: dict[tuple[int, int], int]


class Deadlock(ValueError):
    """No device can go on: each one waits for what another has not done."""


def gpipe(stages: int, microbatches: int):
    """All forward passes, then all backward passes.

    Source: Huang et al. 2019, "GPipe".
    """
    _at_least_one(stages=stages, microbatches=microbatches)
    every = range(microbatches)
    return [[*(Task("F", i) for i in every), *(Task("BW", i) for i in every)]
            for _ in range(stages)]


def one_f_one_b(stages: int, microbatches: int):
    """One forward, one backward: a microbatch goes back as soon as it can, and frees its memory.

    Stage s starts with p - 1 - s forward passes, which is how far a microbatch is on its way.
    Source: Narayanan et al. 2019, "PipeDream"; with gradients of one step's weights, 2021.
    """
    _at_least_one(stages=stages, microbatches=microbatches)
    return [_alternate(_forward(microbatches), _backward(microbatches), stages - 1 - s)
            for s in range(stages)]


def interleaved(stages: int, microbatches: int, chunks: int):
    """1F1B in which each of `stages` devices holds `chunks` shorter stages: a smaller bubble.

    Microbatches go through in rounds of p, each round through all chunks. Raises ValueError where
    the microbatches do not divide into such rounds. Source: Narayanan et al. 2021, "Efficient
    large-scale language model training on GPU clusters using Megatron-LM".
    """
    _at_least_one(stages=stages, microbatches=microbatches, chunks=chunks)
    if microbatches % stages:
        raise ValueError(f"an interleaved schedule needs microbatches in rounds of {stages}, one "
                         f"for each device; found {microbatches}")
    forward = [Task("F", first + i, chunk) for first in range(0, microbatches, stages)
               for chunk in range(chunks) for i in range(stages)]
    backward = [Task("BW", each.microbatch, chunks - 1 - each.chunk) for each in forward]
    # a microbatch passes (v - 1)p devices more; its gradient comes back one device later each
    return [_alternate(forward, backward, (chunks - 1) * stages + 2 * (stages - 1 - device))
            for device in range(stages)]


def zero_bubble(stages: int, microbatches: int):
    """ZB-H1: 1F1B whose weights' gradients wait, at most so many that memory is stage 0's of 1F1B.

    Source: Qi et al. 2023, "Zero bubble pipeline parallelism".
    """
    _at_least_one(stages=stages, microbatches=microbatches)
    return [_w_late(one_f_one_b(stages, microbatches)[s], behind=s) for s in range(stages)]


def split_backward(schedule: Schedule):
    """The same schedule with each BW as B, then W: the input's gradient leaves before W starts."""
    return [_w_late(tasks, behind=0) for tasks in schedule]


def _forward(microbatches: int):
    return [Task("F", i) for i in range(microbatches)]


def _backward(microbatches: int):
    return [Task("BW", i) for i in range(microbatches)]


def _alternate(forward: list[Task], backward: list[Task], ahead: int):
    """`ahead` forward tasks, then one forward and one backward in turn, then what is left."""
    ahead = min(ahead, len(forward))
    pairs = zip(forward[ahead:], backward)
    return [*forward[:ahead], *(task for pair in pairs for task in pair),
            *backward[len(forward) - ahead:]]


def _w_late(tasks: Sequence[Task], behind: int):
    """Each BW as a B and a W, with the W after as many other Bs."""
    out, waiting = [], []
    for task in tasks:
        if task.kind != "BW":
            out.append(task)
            continue
        out.append(task._replace(kind="B"))
        waiting.append(task._replace(kind="W"))
        if len(waiting) > behind:
            out.append(waiting.pop(0))
    return out + waiting


def simulate(schedule: Schedule, costs: Costs = Costs()):
    """Run a schedule on paper: each device starts its next task as soon as what it needs is there.

    Sending takes costs.send from the end of a task, and no time of either device. costs are those
    of one task: with v chunks, of a stage that is v times as short. Returns a Simulated. Raises
    ValueError for what is no schedule (see check_schedule) and for costs below 0, and Deadlock for
    a schedule that does not end.
    """
    check_schedule(schedule)
    if min(costs) < 0:
        raise ValueError(f"expected costs of 0 or more; found {costs}")
    p, left = len(schedule), [deque(tasks) for tasks in planned(schedule)]
    free, done, events = [0] * p, {}, []  # done: {(part, microbatch, stage): when}
    while any(left):
        able = [device for device, tasks in enumerate(left) if tasks and done.keys() >= tasks[0][2]]
        if not able:
            raise Deadlock(_who_waits(left, done))
        for device in able:
            task, stage, needs = left[device].popleft()
            there = [done[need] + costs.send * (need[2] % p != device) for need in needs]
            start = max([free[device], *there])
            free[device] = start + sum(getattr(costs, part) for part in task.kind)
            done |= {(part, task.microbatch, stage): free[device] for part in task.kind}
            events.append(Event(device, task, start, free[device]))
    return _summed_up(schedule, sorted(events, key=attrgetter("start")))


def _summed_up(schedule: Schedule, events: list[Event]):
    makespan = max(event.end for event in events)
    busy = sum(event.end - event.start for event in events)
    bubble = 1 - busy / (len(schedule) * makespan) if makespan else 0
    return Simulated(events, makespan, bubble, [live_of(tasks) for tasks in schedule],
                     sent_by(schedule))


def live_of(tasks: Sequence[Task]):
    """The most forward passes of one device whose weights' gradients are still to be made."""
    change = ((task.kind == "F") - ("W" in task.kind) for task in tasks)
    return max(accumulate(change))


def sent_by(schedule: Schedule):
    """How many activations, or gradients of one, go {(from device, to device): count}."""
    pairs = ((need[2] % len(schedule), device) for device, tasks in enumerate(planned(schedule))
             for _, _, needs in tasks for need in needs)
    return dict(Counter(pair for pair in pairs if len({*pair}) == 2))


def stage_of(device: int, task: Task, devices: int):
    """The stage of the model, from 0, that a task of one of so many devices works on."""
    return task.chunk * devices + device


def stages_of(schedule: Schedule):
    """How many stages a schedule cuts the model into."""
    return len(schedule) * (1 + max(task.chunk for task in schedule[0]))


def planned(schedule: Schedule):
    """For each device (task, its stage, what must be done before: {(part, microbatch, stage)})."""
    p, stages = len(schedule), stages_of(schedule)
    return [[(task, stage := stage_of(device, task, p), needs_of(task, stage, stages))
             for task in tasks] for device, tasks in enumerate(schedule)]


def needs_of(task: Task, stage: int, stages: int):
    """What must be done before a task: {(part, microbatch, stage)}, each part one of F, B and W."""
    i = task.microbatch
    if task.kind == "F":
        return {("F", i, stage - 1)} if stage else set()
    if task.kind == "W":
        return {("B", i, stage)}
    return {("F", i, stage)} | ({("B", i, stage + 1)} if stage + 1 < stages else set())


def _who_waits(left: Sequence[Sequence[tuple]], done: Mapping):
    waits = []
    for device, tasks in enumerate(left):
        task, _, needs = tasks[0] if tasks else (None, None, set())
        waits += [f"device {device} waits at {_said(*task)} for {part} of microbatch {i} on device "
                  f"{stage % len(left)}" for part, i, stage in sorted(needs - {*done})]
    return f"the schedule deadlocks: {'; '.join(waits)}"


def _said(kinds: str, microbatch: int, chunk: int):
    return f"{kinds} of microbatch {microbatch}{f', chunk {chunk}' if chunk else ''}"


def check_schedule(schedule: Schedule):
    """Raises ValueError unless every device does F, B and W of every microbatch once, in order."""
    tasks = [task for tasks in schedule for task in tasks]
    if not tasks:
        raise ValueError("expected a schedule with tasks; found none")
    wanted = {*product(range(1 + max(task.microbatch for task in tasks)),
                       range(1 + max(task.chunk for task in tasks)))}
    for device, tasks in enumerate(schedule):
        _check_device(f"device {device}", tasks, wanted)


def _check_device(name: str, tasks: Sequence[Task], wanted: set[tuple[int, int]]):
    parts = {each: "" for each in sorted(wanted)}  # what was done to each microbatch, in order
    for task in tasks:
        if task.kind not in ("F", "B", "W", "BW") or task[1:] not in parts:
            raise ValueError(f"{name}: expected tasks F, B, W or BW of microbatches from 0; "
                             f"found {task}")
        parts[task[1:]] += task.kind
    for each, found in parts.items():
        if found != "FBW":
            raise ValueError(f"{name}: expected {_said('F, B and W', *each)}, each once and in "
                             f"this order; found {found or 'nothing'}")


def _at_least_one(**counts: int):
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"expected 1 or more {name}; found {count}")
