"""Drawings of the memory of a training step over time, as formulas predict it."""

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from meshbook.drawing import svg
from meshbook.drawing.memory_stacks import COLOURS, LEFT, SEEN, WIDE, area, ticks

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
WORDS = {  # what the reader is told, and the colour of the same in drawings of compiled steps
    "parameters": ("parameters", COLOURS["parameters"]),
    "moments": ("Adam's two moments", COLOURS["moments"]),
    "inputs": ("inputs", COLOURS["other"]),
    "gathered": ("gathered weights", COLOURS["gathered weights"]),
    "gradients": ("gradients", COLOURS["weight gradients"]),
    "activations": ("activations", COLOURS["activations"]),
    "logits": ("logits and loss", COLOURS["logits and loss"]),
}


def draw_timelines(timelines: Mapping[str, Sequence[Any]], limit: tuple[str, Real],
                   high: Real = 130):
    """Draw the memory of a step over time, a panel for each {title: moments}, all to one scale.

    moments: each has a `phase`, a `block`, and `held`, bytes by the keys of WORDS, drawn from the
    first upwards; all are equally wide, however long they take. limit: (words, bytes), a dashed
    line; high: pixels of what is highest. Raises ValueError for a kind that is not known.
    """
    for moments in timelines.values():
        if unknown := {kind for moment in moments for kind in moment.held} - WORDS.keys():
            raise ValueError(f"expected kinds of memory of {', '.join(WORDS)}; found {unknown}")
    top = max([limit[1], *(moment.total for moments in timelines.values() for moment in moments)])
    shown = [kind for kind in WORDS if any(moment.held[kind] > SEEN * top
                                           for moments in timelines.values() for moment in moments)]
    body, y = svg.key({WORDS[kind][0]: WORDS[kind][1] for kind in shown}, LEFT + WIDE)
    body += [svg.line(0, y + 2, 26, y + 2, 1.4, stroke_dasharray="6 4"),
             svg.text(32, y + 6, limit[0], 11, "start")]
    y, said = y + 16, []
    for title, moments in timelines.items():
        body += _panel(title, moments, y + 34, high, top, limit[1])
        y += high + 68
        peak = max(moments, key=lambda moment: moment.total)
        parts = ", ".join(f"{WORDS[kind][0]} {binary(peak.held[kind])}" for kind in shown
                          if peak.held[kind] > SEEN * top)
        said.append(f"{title}: at most {binary(peak.total)}, {place(peak)}; {parts}")
    alt = (f"Memory of a device over a training step. {'. '.join(said)}. "
           f"The dashed line is {limit[0]}.")
    return svg.picture("".join(body), LEFT + WIDE + 4, y - 12, alt, shown=640)


def _panel(title, moments, y, high, top, limit):
    """One step: title, areas, axis, the device's memory, the peak and the turn."""
    body = [svg.text(LEFT, y - 20, title, 12, "start", font_weight="600")]
    floor, wide = [0] * len(moments), WIDE / len(moments)
    for kind, (_, colour) in WORDS.items():
        roof = [below + moment.held[kind] for below, moment in zip(floor, moments, strict=True)]
        if roof != floor:
            body.append(area(LEFT, y, high, floor, roof, top, colour, wide))
        floor = roof
    level = lambda size: y + high * (1 - size / top)
    unit = 1024 ** min(_power(top), 3)
    for value in ticks(top / unit):
        body += [svg.line(LEFT - 4, level(value * unit), LEFT, level(value * unit)),
                 svg.text(LEFT - 6, level(value * unit) + 4, f"{value:g} {UNITS[_power(unit)]}", 11,
                          "end")]
    body.append(svg.line(LEFT, level(limit), LEFT + WIDE, level(limit), 1.4, stroke_dasharray="6 4",
                         data_limit=limit))
    peak = max(moments, key=lambda moment: moment.total)
    words, at = f"peak {binary(peak.total)}", wide * (moments.index(peak) + 0.5)
    half = svg.text_width(words) / 2
    near = min(max(at, half), WIDE - half)
    under = 0 <= level(peak.total) - level(limit) < 16
    above = level(limit) if under else level(peak.total)  # not across the dashed line
    body.append(svg.text(LEFT + near, above - 5, words, 11, font_weight="600"))
    phases = [moment.phase for moment in moments]
    turn = LEFT + wide * phases.index("backward")
    return [*body, svg.line(LEFT, y + high, LEFT + WIDE, y + high),
            svg.line(turn, y + high, turn, y + high + 15, 1.2),
            svg.text(turn - 5, y + high + 14, "← forward pass, loss", 11, "end"),
            svg.text(turn + 5, y + high + 14, "backward pass, update →", 11, "start")]


def place(moment: Any):
    """Where in the step a moment is, in words."""
    if moment.block is None:
        return f"in the {moment.phase}"
    part = f"block {moment.block}" if moment.block else "the embedding"
    return f"in the {moment.phase} pass of {part}"


def binary(count: Real):
    """A number of bytes with its unit, in powers of 1,024, to three significant digits."""
    power = _power(count)
    value = count / 1024**power
    return f"{value:,.0f} {UNITS[power]}" if value >= 100 else f"{value:.3g} {UNITS[power]}"


def _power(count):
    """The largest power of 1,024 with a unit that is not more than count."""
    return max(power for power in range(len(UNITS)) if count >= 1024**power or power == 0)
