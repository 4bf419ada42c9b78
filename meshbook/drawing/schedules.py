"""Pipeline schedules as the field draws them: a row per device, a box per task, idle time empty.

An event is (device, task, start, end) and a task (kind, microbatch, chunk), as
`meshbook.parallel.schedules` makes them. Kinds are "F" (forward), "B" (the gradient of the stage's
input), "W" (the gradient of its weights) and "BW" (both in one task). Time has no unit.
"""

import json
from collections.abc import Mapping, Sequence
from html import escape
from numbers import Real
from operator import itemgetter
from typing import NamedTuple

from meshbook.drawing import svg
from meshbook.drawing.memory_stacks import ticks

KINDS = dict(zip("FWB", svg.KINDS, strict=True))
WORDS = {"F": "F: forward", "B": "B: gradient of the input", "W": "W: gradient of the weights",
         "BW": "BW: both gradients in one task"}
SHADES = (0.0, 0.35, 0.55, 0.7)  # of white in the colours of chunks 0, 1, 2, and all after
LEFT, WIDE, RIGHT = 26.0, 366.0, 32.0  # before the time axis, along it, after it: pixels
ACROSS = LEFT + WIDE + RIGHT
HIGH, PITCH = 16.0, 20.0  # of a device's row, from row to row
LEAST = 5.5  # the smallest number that is worth drawing


class Facts(NamedTuple):
    """What the events of a schedule amount to.

    makespan: when the last task ends; bubble: the share of the devices' time until then in which
    they are idle; live: {device: [(time, count)]}, how many microbatches wait there from a time on,
    in parts of a device's layers, so that one of two chunks counts a half.
    """

    makespan: float
    bubble: float
    live: dict


def facts(events: Sequence[tuple]):
    """The Facts of a schedule. A microbatch waits from the end of its F to that of its W or BW.

    Raises ValueError without events that take time, for a kind that is not known, and for an event
    that ends before it starts.
    """
    for device, task, start, end in events:
        if task[0] not in WORDS or end < start:
            raise ValueError(f"expected a kind of {', '.join(WORDS)} that ends after it starts; "
                             f"found {tuple(task)} from {start} to {end} on device {device}")
    makespan = max((end for *_, end in events), default=0)
    if not makespan:
        raise ValueError(f"expected events that take time; found {len(events)} of no duration")
    live = {device: [(0, 0)] for device in sorted({device for device, *_ in events})}
    chunks = 1 + max(_chunk_of(task) for _, task, _, _ in events)
    busy = sum(end - start for *_, start, end in events)
    waiting = dict.fromkeys(live, 0)
    for device, task, _, end in sorted(events, key=itemgetter(3)):
        if task[0] != "B":
            waiting[device] += 1 if task[0] == "F" else -1
            live[device].append((end, waiting[device] / chunks))
    return Facts(makespan, 1 - busy / (len(live) * makespan), live)


def _chunk_of(task: tuple):
    """The chunk of a device's layers that a task belongs to; 0 where it names none."""
    return task[2] if len(task) > 2 else 0


def colours(kind: str):
    """[(fill, ink)] of a kind's boxes, for each of SHADES; BW has those of B."""
    base = KINDS[kind[0]]
    channels = [int(base[i : i + 2], 16) for i in (1, 3, 5)]
    mixed = ["#" + "".join(f"{round(each + share * (255 - each)):02x}" for each in channels)
             for share in SHADES]
    return [(fill, svg.ink(fill)) for fill in mixed]


def draw_schedules(schedules: Mapping[str, Sequence[tuple]]):
    """Draw {title: events} below each other at one scale of time.

    Beside a title stand the makespan and the bubble, at the end of a row the most microbatches that
    are live on its device. A number in a box is the microbatch's; chunks after the first are paler,
    and a BW has the colour of W along its foot. Raises ValueError as `facts` does.
    """
    found = {title: facts(events) for title, events in schedules.items()}
    whole = max(each.makespan for each in found.values())
    kinds = {task[0] for events in schedules.values() for _, task, _, _ in events}
    body, y = _key([kind for kind in WORDS if kind in kinds])
    said = []
    for title, events in schedules.items():
        makespan, bubble, live = found[title]
        most = {device: max(count for _, count in steps) for device, steps in live.items()}
        words = f"makespan {makespan:g}, bubble {bubble:.1%}"
        body += [svg.text(0, y + 11, title, 12, "start", font_weight="600"),
                 svg.text(LEFT + WIDE, y + 11, words, 11, "end"),
                 svg.text(LEFT + WIDE + RIGHT / 2, y + 11, "live", 11)]
        rows = {device: y + 17 + PITCH * row for row, device in enumerate(live)}
        body += [part for device, top in rows.items()
                 for part in _lane(device, top, WIDE * makespan / whole, f"{most[device]:g}")]
        body += _boxes(events, rows, WIDE / whole)
        y += 24 + PITCH * len(rows)
        held = ", ".join(f"{count:g}" for count in most.values())
        said.append(f"{title}: {words}, at most {held} microbatches live on the devices in order")
    alt = f"Pipeline schedules, a row per device, time to the right. {'. '.join(said)}"
    return svg.picture("".join([*body, *_axis(y, whole)]), ACROSS, y + 18, alt, shown=700)


def draw_live(schedules: Mapping[str, Sequence[tuple]]):
    """Draw the live microbatches of each device over time, for {title: events}, at one scale.

    A row is a device's, in its colour; the number at its end is the most. Raises ValueError as
    `facts` does.
    """
    found = {title: facts(events) for title, events in schedules.items()}
    whole = max(each.makespan for each in found.values())
    top = max(count for each in found.values() for steps in each.live.values()
              for _, count in steps)
    body, y, said = [], 0.0, []
    for title, (_, _, live) in found.items():
        body.append(svg.text(0, y + 11, title, 12, "start", font_weight="600"))
        body.append(svg.text(LEFT + WIDE + RIGHT / 2, y + 11, "most", 11))
        y, most = y + 17, {}
        for device, steps in live.items():
            most[device] = max(count for _, count in steps)
            body += _lane(device, y, WIDE * steps[-1][0] / whole, f"{most[device]:g}", framed=False)
            body.append(_staircase(device, y, steps, WIDE / whole, HIGH / top))
            y += PITCH
        y += 7
        held = ", ".join(f"{count:g}" for count in most.values())
        said.append(f"{title}: at most {held} on the devices in order")
    alt = f"Live microbatches of each device over time. {'. '.join(said)}"
    return svg.picture("".join([*body, *_axis(y, whole)]), ACROSS, y + 18, alt, shown=700)


def with_sliders(picture: svg.Picture):
    """A picture of schedules in a figure of the page, to which a script of the site adds sliders.

    Elsewhere it stays as it is. The script (`schedules-form.js`) draws as `draw_schedules` does.
    """
    style = json.dumps({"colours": {kind: colours(kind) for kind in WORDS}, "words": WORDS,
                        "devices": [(fill, svg.ink(fill)) for fill in svg.DEVICES]})
    html = f'<figure class="schedules" data-style="{escape(style)}">{picture.html}</figure>'
    return svg.Picture(html, picture.alt)


def _key(kinds: Sequence[str]):
    """(SVG elements, height): what the colours of these kinds mean."""
    body, x, y = [], 0.0, 2.0
    for kind in kinds:
        wide = 26 + svg.text_width(WORDS[kind], 10)
        if x and x + wide > ACROSS:
            x, y = 0.0, y + 17
        body.append(_filled(kind, 0, x, y, 11, 11))
        body.append(svg.text(x + 15, y + 9.5, WORDS[kind], 11, "start"))
        x += wide
    return body, y + 20


def _lane(device: int, y: Real, wide: Real, words: str, framed: bool = True):
    """The device's number, the outline of its time, and words at the end."""
    colour = svg.device_colour(device)
    outline = svg.rectangle(LEFT, y, wide, HIGH, stroke="currentColor", stroke_opacity=0.3)
    return [svg.element("circle", cx=9, cy=y + HIGH / 2, r=8, fill=colour),
            svg.text(9, y + HIGH / 2 + 4, str(device), 11, fill=svg.ink(colour)),
            outline if framed else "",
            svg.text(LEFT + WIDE + RIGHT / 2, y + HIGH / 2 + 4, words, 11)]


def _boxes(events: Sequence[tuple], rows: Mapping[int, Real], scale: Real):
    """The tasks of a schedule, all with numbers or, where one has no room, none; rows: {device: y}.

    A pointer is told all about a task.
    """
    sizes = [1.45 * scale * (end - start) / len(str(task[1])) for _, task, start, end in events]
    size, body = min(9.0, *sizes), []  # of the numbers, pixels
    for device, task, start, end in events:
        kind, microbatch, chunk = task[0], task[1], _chunk_of(task)
        x, y, wide = LEFT + scale * start, rows[device], scale * (end - start)
        told = f"device {device}: {kind} of microbatch {microbatch}"
        told += f", chunk {chunk}" * (len(task) > 2) + f", from {start:g} to {end:g}"
        drawn = svg.element("title", told) + _filled(kind, chunk, x, y, wide, HIGH)
        if size >= LEAST:
            ink = _shade(kind, chunk)[1]
            drawn += svg.text(x + wide / 2, y + 11, str(microbatch), size, fill=ink)
        body.append(svg.element("g", drawn, data_device=str(device), data_start=f"{start:g}",
                                data_end=f"{end:g}", data_task=f"{kind} {microbatch} {chunk}"))
    return body


def _shade(kind: str, chunk: int):
    """(fill, ink) of a task."""
    return colours(kind)[min(chunk, len(SHADES) - 1)]


def _filled(kind: str, chunk: int, x: Real, y: Real, wide: Real, high: Real):
    """A box in a kind's colour, with a gap to the next one; of a BW, the foot has that of W."""
    wide -= min(0.8, 0.15 * wide)
    body = svg.rectangle(x, y, wide, high, fill=_shade(kind, chunk)[0])
    if kind == "BW":
        body += svg.rectangle(x, y + 0.75 * high, wide, 0.25 * high, fill=_shade("W", chunk)[0])
    return body


def _staircase(device: int, y: Real, steps: Sequence[tuple], scale: Real, unit: Real):
    """The area under counts that change at times, on the floor of a row."""
    path = f"M{svg.number(LEFT)} {svg.number(y + HIGH)}"
    for time, count in steps:
        path += f"H{svg.number(LEFT + scale * time)}V{svg.number(y + HIGH - unit * count)}"
    return svg.element("path", d=f"{path}V{svg.number(y + HIGH)}z", data_device=str(device),
                       fill=svg.device_colour(device)) + svg.line(
        LEFT, y + HIGH, LEFT + scale * steps[-1][0], y + HIGH, 0.7)


def _axis(y: Real, whole: Real):
    """The axis of time."""
    body = [svg.line(LEFT, y, LEFT + WIDE, y)]
    for time in ticks(whole):
        x = LEFT + WIDE * time / whole
        body += [svg.line(x, y, x, y + 4), svg.text(x, y + 15, f"{time:g}", 10)]
    return body
