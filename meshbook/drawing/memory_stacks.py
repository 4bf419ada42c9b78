"""Drawings of what fills the memory of a training step from its first operation to its last."""

import itertools
import math
from collections.abc import Mapping, Sequence
from numbers import Real

from meshbook.drawing import svg
from meshbook.hlo.memory_kinds import KINDS, StepMemory
from meshbook.text import sized_bytes

COLOURS = dict(zip(KINDS, (
    svg.SERIES[0], svg.KINDS[0], svg.KINDS[2], svg.SERIES[2], svg.SERIES[1], svg.SERIES[3],
    svg.KINDS[1], svg.SERIES[4]), strict=True))
LEFT, WIDE = 56.0, 338  # pixels: of the labels on the left, and that the step has
SEEN = 0.01  # of the axis: what never is as high stays out of the key


def draw_memory(steps: Mapping[str, StepMemory], high: Real = 130):
    """Draw what each device holds during a training step, a panel for each {title: StepMemory}.

    The kinds lie on each other, from the parameters upwards; all panels have one scale. The dashed
    line says where the backward pass begins, the number above is the peak. All operations are drawn
    equally wide, however long they take. high: of the highest peak, in pixels.
    """
    top = max(max(step.total) for step in steps.values())
    shown = [kind for kind in KINDS
             if any(max(step.kinds[kind]) > SEEN * top for step in steps.values())]
    body, y = svg.key({kind: COLOURS[kind] for kind in shown}, LEFT + WIDE)
    said = []
    for title, step in steps.items():
        body += _panel(title, step, y + 28, high, top)
        y += high + 62
        parts = ", ".join(f"{kind} {sized_bytes(size)}" for kind, size in step.at_peak().items()
                          if size > SEEN * top)
        said.append(f"{title}, at most {sized_bytes(max(step.total))}, of which {parts}")
    body.append(svg.text(LEFT + WIDE / 2, y, "operations, in the order in which they run"))
    alt = f"What a device holds over a training step. {'; '.join(said)}"
    return svg.picture("".join(body), LEFT + WIDE + 4, y + 6, alt, shown=640)


def _panel(title, step, y, high, top):
    """One step: its title and peak, the areas, the axis, and its two passes."""
    total, columns = step.total, columns_of(step.total, step.busy, WIDE)
    floor, body = [0] * WIDE, [svg.text(LEFT, y - 20, title, 12, "start", font_weight="600")]
    for kind, sizes in step.kinds.items():
        roof = [below + sizes[place] for below, place in zip(floor, columns, strict=True)]
        if any(sizes):
            body.append(area(LEFT, y, high, floor, roof, top, COLOURS[kind]))
        floor = roof
    for value in ticks(top):
        level = y + high * (1 - value / top)
        body.append(svg.line(LEFT - 4, level, LEFT, level))
        body.append(svg.text(LEFT - 6, level + 4, sized_bytes(value), 11, "end"))
    at, words = floor.index(max(floor)), f"peak {sized_bytes(max(total))}"
    half, level = svg.text_width(words) / 2, y + high * (1 - max(total) / top)
    near = min(max(LEFT + at, LEFT + half), LEFT + WIDE - half)
    body.append(svg.text(near, level - 5, words, 11, font_weight="600"))
    at = WIDE * sum(place < step.turn for place in step.busy) // len(step.busy)
    level, end = y + high * (1 - floor[at] / top), y + high
    body.append(svg.line(LEFT + at, level, LEFT + at, end + 15, 1.2, stroke_dasharray="4 3"))
    body.append(svg.text(LEFT + at - 5, end + 14, "← forward pass", 11, "end"))
    body.append(svg.text(LEFT + at + 5, end + 14, "backward pass, update →", 11, "start"))
    return body


def ticks(length: Real):
    """Round numbers from 0 to at most `length`, three to six of them."""
    unit = 10.0 ** math.floor(math.log10(length / 2))
    step = next(unit * by for by in (1, 2, 5, 10) if length / (unit * by) < 6)
    return [step * at for at in range(int(length / step) + 1)]


def columns_of(total: Sequence[Real], places: Sequence[int], count: int):
    """For each of so many columns the place, of those that share it, where the total is largest."""
    cuts = itertools.pairwise(len(places) * at // count for at in range(count + 1))
    return [max(places[at: max(at + 1, stop)], key=total.__getitem__) for at, stop in cuts]


def area(x: Real, y: Real, high: Real, floor: Sequence[Real], roof: Sequence[Real], top: Real,
         fill: str, wide: Real = 1):
    """The area between two curves, a column for each value; `top` is `high` pixels."""
    at = lambda size: svg.number(y + high * (1 - size / top))
    there = "".join(f"V{at(size)}h{svg.number(wide)}" for size in roof)
    back = "".join(f"V{at(size)}h-{svg.number(wide)}" for size in reversed(floor))
    return svg.element("path", d=f"M{svg.number(x)} {at(floor[0])}{there}{back}z", fill=fill)
