"""Drawings of a step's memory in a compiled program, with a formula's curve laid over it."""

import bisect
from collections.abc import Mapping
from typing import Any

from meshbook.drawing import svg
from meshbook.drawing.memory_stacks import area, columns_of, ticks
from meshbook.text import sized_bytes

COLOURS = (svg.SERIES[0], svg.SERIES[1], svg.SERIES[4])
LEFT, WIDE, HIGH, ACROSS, DOWN = 54.0, 144, 84.0, 206.0, 152.0  # of a panel, pixels


def draw_compared(steps: Mapping[str, Any], groups: Mapping[str, tuple[str, ...]]):
    """Draw {title: Comparison}, two panels in a row, each to a scale of its own.

    The areas are what the program holds, its operations equally wide, in three groups of kinds
    {words: kinds}; the dots are what the formula says at its own moments, each above the place in
    the program that corresponds to it. See `meshbook.planning.recorded_timelines.Comparison`.
    Raises ValueError for another number of groups.
    """
    if len(groups) != len(COLOURS):
        raise ValueError(f"expected {len(COLOURS)} groups of kinds; found {list(groups)}")
    body, top = svg.key(dict(zip(groups, COLOURS, strict=True)), 400)
    body += [svg.line(0, top + 5, 22, top + 5, 1.4),
             svg.element("circle", cx=11, cy=top + 5, r=2.6),
             svg.text(28, top + 9, "what the formula says", 11, "start")]
    top, said = top + 22, []
    for at, (title, step) in enumerate(steps.items()):
        x, y = at % 2 * ACROSS, top + at // 2 * DOWN
        peak, off = max(step.step.total), _off(step)
        body += [svg.text(x, y + 12, title, 11, "start", font_weight="600"),
                 svg.text(x, y + 26, f"peak {sized_bytes(peak)}, formula {off}", 11, "start"),
                 *_panel(step, groups, x + LEFT, y + 36)]
        said.append(f"{title}: the program holds at most {sized_bytes(peak)}, the formula "
                    f"differs from that by {off}")
    alt = ("What a device holds over a training step, in compiled programs and by formula. "
           + "; ".join(said))
    return svg.picture("".join(body), 2 * ACROSS - 4, top - (-len(steps) // 2) * DOWN - 8, alt,
                       shown=680)


def _off(step):
    """The formula's peak less the program's, as a share of the latter, with its sign."""
    share = max(each.total for each in step.moments) / max(step.step.total) - 1
    return f"{share:+.0%}".replace("-", "−")


def _panel(compared, groups, x, y):
    """Areas, axis, the turn to the backward pass, and the formula's dots."""
    step, total = compared.step, compared.step.total
    most = max(*total, *(each.total for each in compared.moments))
    columns = columns_of(total, step.busy, WIDE)
    floor, body = [0] * WIDE, []
    for kinds, colour in zip(groups.values(), COLOURS, strict=True):
        held = [sum(step.kinds[kind][place] for kind in kinds if kind in step.kinds)
                for place in columns]
        roof = [below + more for below, more in zip(floor, held, strict=True)]
        body.append(area(x, y, HIGH, floor, roof, most, colour))
        floor = roof
    level = lambda size: y + HIGH * (1 - size / most)
    across = lambda place: x + WIDE * bisect.bisect_left(step.busy, place) / len(step.busy)
    for value in ticks(most)[::2]:
        body += [svg.line(x - 4, level(value), x, level(value)),
                 svg.text(x - 6, level(value) + 4, sized_bytes(value), 11, "end")]
    turn, base = across(step.turn), y + HIGH
    points = [(across(place), level(each.total))
              for place, each in zip(compared.places, compared.moments, strict=True)]
    body += [svg.line(x, base, x + WIDE, base), svg.line(turn, base, turn, base + 14),
             svg.text(turn - 4, base + 13, "forward", 11, "end"),
             svg.text(turn + 4, base + 13, "backward", 11, "start"),
             svg.element("path", d="M" + "L".join(
                 f"{svg.number(left)} {svg.number(high)}" for left, high in points),
                 fill="none", stroke="currentColor", stroke_width=1.2)]
    return body + [svg.element("circle", cx=left, cy=high, r=2.6, data_moment=each.phase)
                   for (left, high), each in zip(points, compared.moments, strict=True)]
