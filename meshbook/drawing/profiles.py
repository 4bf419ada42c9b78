"""Drawings of a profile: who did what when, what took the time, and what filled the memory."""

import itertools
import math

from meshbook.drawing import svg
from meshbook.drawing.memory_stacks import area, columns_of, ticks
from meshbook.hlo.liveness import Liveness
from meshbook.hlo.module import Shape
from meshbook.profiling.traces import Trace
from meshbook.text import sized_bytes

KINDS = dict(zip(("compute", "collective", "copy"), svg.KINDS, strict=True))
ROLES = {"argument": svg.SERIES[2], "output": svg.SERIES[3], "temporary": svg.SERIES[0]}
WIDE = 400  # pixels that time, or the schedule, has


def draw_gantt(trace: Trace, steps: int = 2):
    """Draw a few steps from the middle of a run: a lane for each device, blank where it is idle.

    steps: how many. A pixel has the colour of what took the most of its time; "compute" is the part
    of the time drawn in which a device computed. Raises ValueError where the trace has fewer steps.
    """
    spans = trace.spans()
    if not 0 < steps <= len(spans):
        raise ValueError(f"expected 1 to {len(spans)} steps to draw, as many as the trace has; "
                         f"found {steps}")
    first = (len(spans) - steps) // 2
    shown = dict(list(spans.items())[first: first + steps])
    begin, end = min(start for start, _ in shown.values()), max(end for _, end in shown.values())
    scale, lanes, left = WIDE / (end - begin), sorted(trace.by_device()), 62.0
    body, top = svg.key(KINDS, WIDE)
    body.append(svg.text(left + WIDE + 50, 11, "blank: idle", 11, "end"))
    for step, (start, _) in shown.items():
        x = left + scale * (start - begin)
        body.append(svg.line(x, top + 4, x, top + 20 + 20 * len(lanes), 1, stroke_opacity=0.5))
        body.append(svg.text(x + 3, top + 12, f"step {step}", 11, "start"))
    body.append(svg.text(left + WIDE + 50, top + 12, "compute", 11, "end"))
    said, records = [], [each for each in trace.records if each.start < end and each.end > begin]
    for row, device in enumerate(lanes):
        y, columns = top + 18 + 20.0 * row, _columns(records, device, begin, scale)
        own = sum(column["compute"] for column in columns) / (end - begin)
        body.append(svg.rectangle(0, y + 4, 10, 10, fill=svg.device_colour(device), rx=2))
        body.append(svg.text(15, y + 13, f"device {device}", 11, "start"))
        body.append(svg.text(left + WIDE + 50, y + 13, f"{own:.0%}", 11, "end"))
        body += _lane(columns, 1 / scale, left, y + 2)
        held = {kind: sum(column[kind] for column in columns) / (end - begin) for kind in KINDS}
        parts = ", ".join(f"{kind} {share:.0%}" for kind, share in held.items())
        said.append(f"device {device}: {parts}")
    low = top + 20 + 20.0 * len(lanes)
    body += _time_axis(left, low, end - begin)
    alt = (f"{steps} step{'s' * (steps > 1)} of a run, {_figure(end - begin)} ms, a lane for each "
           f"of {len(lanes)} devices. Of that time: {'; '.join(said)}")
    return svg.picture("".join(body), left + WIDE + 52, low + 34, alt, shown=700)


def _columns(records, device, begin, scale):
    """For each pixel of a lane the time that each kind of operation takes of it, in ms."""
    columns = [dict.fromkeys(KINDS, 0.0) for _ in range(WIDE)]
    for record in records:
        low, high = (scale * (at - begin) for at in (record.start, record.end))
        if record.device == device:
            for at in range(max(0, int(low)), min(WIDE, math.ceil(high))):
                columns[at][record.kind] += (min(high, at + 1) - max(low, at)) / scale
    return columns


def _lane(columns, pixel, x, y):
    """One path for each kind: the pixels, of so many ms, in which it took most of the time."""
    most = [max(column, key=column.get) for column in columns]
    most = [kind if sum(column.values()) > pixel / 2 else "" for kind, column in zip(most, columns)]
    paths = dict.fromkeys(KINDS, "")
    at = 0
    for kind, run in itertools.groupby(most):
        wide = len(list(run))
        if kind:
            paths[kind] += f"M{svg.number(x + at)} {svg.number(y)}h{wide}v14h-{wide}z"
        at += wide
    return [svg.element("path", d=path, fill=KINDS[kind], data_kind=kind)
            for kind, path in paths.items() if path]


def _time_axis(x, y, length):
    """A line from 0 to `length` ms with marks at round numbers."""
    marks = [svg.line(x, y, x + WIDE, y)]
    for value in ticks(length):
        at = x + WIDE * value / length
        marks += [svg.line(at, y, at, y + 4), svg.text(at, y + 16, _figure(value), 11)]
    return [*marks, svg.text(x + WIDE / 2, y + 31, "ms", 11)]


def _figure(value):
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def draw_shares(trace: Trace, top: int = 10):
    """Draw what took the time of the devices: the longest operations as bars, the rest as one."""
    rows = trace.operations(top)
    longest = max(each.share for each in rows)
    body, y = svg.key({**KINDS, "several": svg.SERIES[4]}, WIDE)
    for each in rows:
        words = f"{each.share:.1%}  ·  {each.ms:,.1f} ms  ·  × {each.count:,}"
        room = WIDE + 60 - svg.text_width(words, 11)
        body.append(svg.text(0, y + 11, _shortened(each.operation, room), 12, "start"))
        body.append(svg.text(WIDE + 60, y + 11, words, 11, "end"))
        fill, wide = KINDS.get(each.kind, svg.SERIES[4]), (WIDE + 60) * each.share / longest
        body.append(svg.rectangle(0, y + 16, wide, 9, fill=fill, rx=1, data_kind=each.kind))
        y += 33
    said = "; ".join(f"{each.operation}{f' ({each.kind})' if each.kind else ''} {each.share:.1%}"
                     for each in rows)
    alt = f"What the devices spent their time with, of {sum(e.ms for e in rows):,.1f} ms: {said}"
    return svg.picture("".join(body), WIDE + 60, y, alt, shown=640)


def _shortened(words, room, size=12, end=True):
    """As much of a text as there is room for, its beginning or its end."""
    most = max(int(room / (0.6 * size)), 2)
    if len(words) <= most:
        return words
    return words[: most - 1] + "…" if end else "…" + words[1 - most:]


def draw_buffers(liveness: Liveness, top: int = 6):
    """Draw what a device holds at each instruction of a program, and what that is at the peak.

    liveness: what `live_bytes` found. The dashed line is the peak; below stand the `top` largest
    buffers that are live there, those of one kind together, by what they are in the program.
    """
    left, high, count = 62.0, 150.0, len(liveness.schedule)
    body, y = svg.key(ROLES, WIDE)
    y += 18
    places = columns_of(liveness.bytes, range(count), WIDE)
    floor = [0] * WIDE
    for role, own in liveness.by_role().items():
        roof = [below + own[place] for below, place in zip(floor, places, strict=True)]
        body.append(area(left, y, high, floor, roof, liveness.peak, ROLES[role]))
        floor = roof
    body.append(svg.line(left, y + high, left + WIDE, y + high))
    for part in (0, 0.5, 1):
        words = sized_bytes(part * liveness.peak)
        body.append(svg.text(left - 5, y + high * (1 - part) + 4, words, 11, "end"))
    x = left + WIDE * (liveness.at + 0.5) / count
    body.append(svg.line(x, y - 4, x, y + high, 1.4, stroke_dasharray="4 3"))
    words = f"peak {sized_bytes(liveness.peak)}, instruction {liveness.at + 1:,}"
    half = svg.text_width(words) / 2
    near = min(max(x, left + half), left + WIDE - half)
    body.append(svg.text(near, y - 8, words, 11, font_weight="600"))
    caption = f"{count:,} instructions, in the order in which they run"
    body.append(svg.text(left + WIDE / 2, y + high + 16, caption))
    rows, y = _alike(liveness.largest())[:top], y + high + 26
    for each in rows:
        body += _buffer_row(*each, y, left + WIDE)
        y += 20
    said = "; ".join(f"{sized_bytes(size)} in {number} × {shape_text(each.shape)} ({each.role}, "
                     f"{each.source or each.name})" for each, number, size in rows)
    parts = ", ".join(f"{role} {sized_bytes(own[liveness.at])}"
                      for role, own in liveness.by_role().items())
    alt = f"What a device holds over {count} instructions: {liveness}: {parts}. Most: {said}"
    return svg.picture("".join(body), left + WIDE + 4, y + 2, alt, shown=680)


def _alike(buffers):
    """[(buffer, how many like it, their bytes)]: those of one role, shape and source together."""
    groups = {}
    for each in buffers:
        groups.setdefault((each.role, each.shape, each.source), []).append(each)
    rows = [(own[0], len(own), sum(each.bytes for each in own)) for own in groups.values()]
    return sorted(rows, key=lambda row: -row[2])


def _buffer_row(buffer, number, size, y, width):
    """Some of the largest buffers: their colour, bytes and shape, and what they are."""
    shape = f"{number} × {shape_text(buffer.shape)}" if number > 1 else shape_text(buffer.shape)
    at = 84 + svg.text_width(shape)
    source = buffer.source.partition("/")[2] or buffer.source or buffer.name
    words = _shortened(source, width - at - 8, 11, end=False)
    return [svg.rectangle(0, y + 3, 10, 10, fill=ROLES[buffer.role], rx=2),
            svg.text(72, y + 12, sized_bytes(size), 11, "end"),
            svg.text(82, y + 12, shape, 11, "start"), svg.text(at + 4, y + 12, words, 11, "start")]


def shape_text(shape: Shape):
    """A shape as XLA writes it: f32[64,128]."""
    return f"{shape.dtype}[{','.join(map(str, shape.dims))}]"
