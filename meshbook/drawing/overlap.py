"""Drawings of communication beside work: which of it is hidden, which is exposed, which could be.

Two lanes for each program: what a device's core does, and what its links do at the same time.
"""

from collections.abc import Iterable, Mapping

from meshbook.drawing import svg
from meshbook.drawing.memory_stacks import ticks
from meshbook.hlo import schedule
from meshbook.profiling.estimated_runs import EstimatedRun
from meshbook.profiling.overlap import Part, exchanges

WORK, COMMUNICATION = svg.KINDS[:2]
LEFT, WIDE, HIGH = 66.0, 330.0, 13.0
FAINT = 0.45  # of the colour of what is hidden


def draw_overlap(runs: Mapping[str, EstimatedRun], window: tuple[float, float] | None = None):
    """Draw {name: run} under each other on one scale of time: cores at work, and communication.

    window: the ms between which to draw; without it, all of the longest run. A collective is drawn
    as exposed or as hidden, whichever it is for the longer time. Raises ValueError for a window
    in which no run does anything.
    """
    first, last = window or (0.0, max(run.step for run in runs.values()))
    if not any(each.start < last and each.end > first for run in runs.values()
               for each in run.records):
        raise ValueError(f"expected a window of time in which a run does something; found "
                         f"{first} to {last} ms")
    body, y = _key("exposed communication", hidden=True)
    said = []
    for name, run in runs.items():
        found = exchanges(run)
        hidden, exposed = (sum(getattr(each, what) for each in found)
                           for what in ("hidden", "exposed"))
        words = f"{run.step:.1f} ms, {exposed:.2f} exposed, {hidden:.2f} hidden"
        said.append(f"{name}: {words}")
        body += [svg.text(0, y + 11, name, 12, "start", font_weight="600"),
                 svg.text(LEFT + WIDE, y + 11, words, 11, "end")]
        body += _lane(y + 17, "core", _worked(run, (last - first) / WIDE), first, last)
        body += _lane(y + 33, "links", [
            (each.start, each.end, COMMUNICATION, 1 if each.exposed >= each.hidden else FAINT)
            for each in found], first, last)
        y += 58
    body += _axis(y - 2, first, last)
    alt = ("Time goes from left to right, one lane for the work of the core and one for its links. "
           + "; ".join(said))
    return svg.picture("".join(body), LEFT + WIDE + 8, y + 30, alt, shown=680)


def draw_sent_when_ready(run: EstimatedRun, parts: Iterable[Part]):
    """Draw the core, the collectives as compiled, and the parts of one sent as they are ready."""
    parts, found = list(parts), exchanges(run)
    last, ready = max(run.step, parts[-1].end), max(each.ready for each in parts)
    body, y = _key("communication")
    lanes = {
        "core": _worked(run, last / WIDE),
        "compiled": [(each.start, each.end, COMMUNICATION, 1) for each in found],
        "when ready": [(each.start, each.end, COMMUNICATION, 1) for each in parts]}
    for name, spans in lanes.items():
        body += _lane(y, name, spans, 0.0, last)
        y += 19
    body += _axis(y + 2, 0.0, last)
    alt = (f"The core of a device, and its links in two ways. As compiled, they send from "
           f"{found[-1].start:.2f} to {found[-1].end:.2f} ms. If each of {len(parts)} gradients "
           f"were sent when it is ready, from {parts[0].start:.2f} to {parts[-1].end:.2f} ms, "
           f"{max(0.0, parts[-1].end - ready):.2f} ms longer than the last of them takes to make")
    return svg.picture("".join(body), LEFT + WIDE + 8, y + 34, alt, shown=680)


def _key(communication, hidden=False):
    body, y = svg.key({"core at work": WORK, communication: COMMUNICATION}, LEFT + WIDE)
    if hidden:
        x = 52 + svg.text_width("core at work") + svg.text_width(communication)
        body += [svg.rectangle(x, 2, 10, 10, fill=COMMUNICATION, rx=2, fill_opacity=FAINT),
                 svg.text(x + 14, 11, "hidden", 11, "start")]
    return body, y + 2


def _worked(run, pixel):
    """The times in which the core works; pauses of less than a pixel are left out."""
    found = []
    for each in run.played:
        if each.where == schedule.CORE:
            start, end = 1e3 * each.start, 1e3 * each.end
            if found and start - found[-1][1] < pixel:
                start, end = found[-1][0], max(end, found.pop()[1])
            found.append((start, end, WORK, 1))
    return found


def _lane(y, name, spans, first, last):
    """A lane with its name, and rectangles for (start, end, colour, opacity) in the window."""
    scale, body = WIDE / (last - first), [svg.text(0, y + 10.5, name, 11, "start")]
    for start, end, colour, opacity in spans:
        low, high = max(start, first), min(end, last)
        if low < high:
            body.append(svg.rectangle(
                LEFT + scale * (low - first), y, max(scale * (high - low), 0.8), HIGH, fill=colour,
                fill_opacity=opacity, data_lane=name))
    return body


def _axis(y, first, last):
    scale, body = WIDE / (last - first), [svg.line(LEFT, y, LEFT + WIDE, y)]
    for after in ticks(last - first):
        x = LEFT + scale * after
        body += [svg.line(x, y, x, y + 4), svg.text(x, y + 15, f"{first + after:.3g}", 11)]
    return [*body, svg.text(LEFT + WIDE, y + 27, "ms", 11, "end")]
