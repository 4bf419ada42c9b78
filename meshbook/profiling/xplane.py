"""Read a profile's file: what ran on each device, when, and in which step.

A profile is an XSpace: planes (a host, a device) of lines (a thread, a stream) of events, which
JAX's own reader gives. A CPU device's operations are events of the host's threads; a GPU has a
line for each stream; a TPU has one line for its core's operations and one for its programs.

Source: openxla/xla, `xla/tsl/profiler/utils/xplane_schema.cc` (names of planes, lines and stats).
"""

import bisect
import collections
import functools
import pathlib
import re
import warnings
from collections.abc import Iterable
from typing import NamedTuple

from jax.profiler import ProfileData

from meshbook.hlo import opcodes
from meshbook.profiling import hlo_protos

DEVICE = re.compile(r"/device:(GPU|TPU):(\d+)")
LINES = {"GPU": "Stream", "TPU": "XLA Ops"}  # other lines say the same again
CONTROL = ("while", "conditional", "call")
# Where the program is not in the file: how XLA, CUDA and NCCL usually call these.
NAMED_COLLECTIVE = re.compile(
    rf"nccl|psum|\b(?:{'|'.join(sorted(opcodes.COLLECTIVE))})", re.IGNORECASE)
NAMED_MOVE = re.compile(
    r"(?:wrapped_)?(?:copy|transpose|slice|concatenate|pad|broadcast|bitcast|memcpy|memset|"
    r"dynamic-slice|dynamic-update-slice|data formatting|"
    r"\[?(?:cuda |hip|cu|xpu|ze)_?mem(?:cpy|set)|__amd_rocclr_(?:copy|fill))", re.IGNORECASE)


class Event(NamedTuple):
    """One execution of an operation, in ns; `run` tells those of the program apart, if known."""

    device: int
    program: str
    operation: str
    start: float
    end: float
    run: float | None
    line: str
    kernel: str


class Profile(NamedTuple):
    """What a file holds: events by time, {run: step}, the steps, and opcodes of instructions."""

    events: list
    runs: dict
    steps: list
    opcodes: dict


def read_profile(path: pathlib.Path):
    """Read a profile's file; ValueError where JAX cannot read it, or no operation ran in it."""
    contents = path.read_bytes()
    try:
        profile = ProfileData.from_serialized_xspace(contents)  # its parts do not keep it alive
        planes = list(profile.planes)
    except RuntimeError:
        raise ValueError(f"{path}: expected a profile (an XSpace) from start to end; found "
                         f"{len(contents):,} bytes of something else, or a part of one") from None
    host, runs, steps = [], {}, []
    with warnings.catch_warnings():  # as an error, what jaxlib 0.12 warns of ends the process
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in planes:
            if plane.name == "/host:CPU":
                for line in plane.lines:
                    _host_line(line, host, runs, steps)
        events = [event for plane in planes for event in _device_plane(plane)] or host
    if not events:
        raise ValueError(f"{path}: expected operations that ran on devices; found none in the "
                         f"planes {[plane.name for plane in planes]}")
    events.sort(key=lambda event: (event.start, -event.end))
    numbers = [number for _, number in sorted(steps)]
    return Profile(events, runs, numbers, hlo_protos.opcodes(contents))


def _host_line(line, events, runs, steps):
    """One thread of the host: CPU devices' operations, and which step sent off which run."""
    own, sent, plain = [], [], set()
    for event in line.events:
        name = event.name
        if name in plain:
            continue  # reading an event's stats takes ten times as long as its name
        stats, start = dict(event.stats), event.start_ns
        if "hlo_op" in stats:
            events.append(Event(
                int(stats.get("device_ordinal", 0)), _program(stats), stats["hlo_op"],
                start, start + event.duration_ns, stats.get("run_id"), line.name, ""))
        elif "step_num" in stats:
            own.append((start, start + event.duration_ns, int(stats["step_num"])))
        elif "run_id" in stats:
            sent.append((start, stats["run_id"]))
        else:
            plain.add(name)
    for at, run in sent if own else ():
        inside = [number for start, end, number in own if start <= at <= end]
        runs[run] = inside[-1] if inside else None
    steps += [(start, number) for start, _, number in own]


def _device_plane(plane):
    """The operations on a GPU's or a TPU's plane."""
    found = DEVICE.fullmatch(plane.name)
    if not found:
        return
    ran = sorted(_program_run(event) for line in plane.lines if line.name == "XLA Modules"
                 for event in line.events)
    for line in plane.lines:
        if not line.name.startswith(LINES[found[1]]):
            continue
        for event in line.events:
            start, stats = event.start_ns, dict(event.stats)
            at = bisect.bisect_right(ran, start, key=lambda run: run[0]) - 1
            program, run = ran[at][1:] if at >= 0 else (_program(stats), stats.get("run_id"))
            name, kernel = _names(event.name)
            yield Event(int(found[2]), program, stats.get("hlo_op", name), start,
                        start + event.duration_ns, run, line.name, kernel)


def _program_run(event):
    """(start, program, run) of an event that is a whole program."""
    return event.start_ns, event.name, dict(event.stats).get("run_id", event.start_ns)


def _names(text):
    """(instruction, opcode) of an event that is called by its HLO text, else its name twice."""
    found = re.match(r"%?([\w.\-]+) = (?:\(.*?\)|\S+) ([\w\-]+)\(", text)
    return found.groups() if found else (text, text)


def _program(stats):
    """The program of an event, as the file names it: jit_train_step(4)."""
    number = f"({stats['program_id']})" if "program_id" in stats else ""
    return f"{stats.get('hlo_module', '')}{number}"


def leaves(profile: Profile):
    """Events without those that only contain others, such as a loop around its body's events."""
    together = collections.defaultdict(list)
    for event in profile.events:  # a CPU device's program may run on several threads
        together[event.device, event.run or event.line].append(event)
    outer = {id(event) for events in together.values()
             for at, event in enumerate(events) if _contains(profile, events, at)}
    return [event for event in profile.events if id(event) not in outer]


def _contains(profile, events, at):
    event = events[at]
    opcode, inside = profile.opcodes.get((event.program, event.operation), (None, {}))
    if opcode is not None and opcode not in CONTROL:
        return False
    for other in events[at + 1:]:
        if other.start >= event.end:
            return False
        own = other.operation in inside if opcode else other.line == event.line
        if own and other.end <= event.end:  # others may run on another thread at the same time
            return True
    return False


def kinds(profile: Profile, events: Iterable[Event]):
    """What each operation does: "compute", "collective", or "copy" where it only moves numbers.

    On TPU a product's fusion may carry a collective along: that is "compute".
    """
    known = functools.cache(functools.partial(_kind, profile))
    return [known(event.program, event.operation, event.kernel) for event in events]


def _kind(profile, program, operation, kernel):
    opcode, inside = profile.opcodes.get((program, operation), (None, {}))
    if opcode is None or (opcode.startswith("async") and not inside):
        return _kind_by_name(operation, kernel)
    return opcodes.kind(inside.values() or {opcode})


def _kind_by_name(operation, kernel):
    if NAMED_COLLECTIVE.search(f"{operation} {kernel}"):
        return "collective"
    return "copy" if NAMED_MOVE.match(kernel or operation) else "compute"


def step_of(profile: Profile):
    """A function that says in which step an event was, None where that is unknown.

    On a CPU mesh the host notes under which step it sent off which run of a program. Where it does
    not, the turn decides: what runs n times in s steps runs n / s times in each of them.
    """
    units = collections.defaultdict(dict)
    for event in profile.events:
        group, unit = _turn(event)
        units[group].setdefault(unit, len(units[group]))

    def step(event):
        if event.run in profile.runs:
            return profile.runs[event.run]
        group, unit = _turn(event)
        if not profile.steps or len(units[group]) % len(profile.steps):
            return None
        return profile.steps[units[group][unit] * len(profile.steps) // len(units[group])]

    return step


def _turn(event):
    """What is counted to find an event's step: runs of its program, or itself."""
    if event.run is not None:
        return (event.device, event.program), event.run
    return (event.device, event.program, event.operation, event.kernel), event.start
