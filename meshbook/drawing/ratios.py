"""Drawings of predictions divided by what was measured, on an axis of ratios."""

import math
import statistics
from collections.abc import Mapping, Sequence
from numbers import Real

from meshbook.drawing import svg

WIDE, LANE = 230.0, 13.0  # of the axis, of one series: pixels
APART = 26.0  # of two ticks, at least


def draw_ratios(rows: Mapping[str, Mapping[str, Sequence[Real]]], axis: str, alt: str):
    """Draw {row: {series: ratios}}: a dot for each ratio, a bar at the median, a line at 1.

    The axis is logarithmic, so that half and twice are equally far from 1; axis: what is divided by
    what. A series has one colour in all rows. Raises ValueError without ratios, or for one that is
    not above 0.
    """
    every = [ratio for row in rows.values() for ratios in row.values() for ratio in ratios]
    if not every or min(every) <= 0:
        raise ValueError(f"expected rows of ratios above 0; found {rows!r}")
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    colours = {name: svg.SERIES[i % len(svg.SERIES)] for i, name in enumerate(names)}
    low, high = 0.9 * min(1.0, *every), 1.1 * max(1.0, *every)
    left = 10.0 + max(svg.text_width(row) for row in rows)
    at = lambda ratio: left + WIDE * math.log(ratio / low) / math.log(high / low)
    body, top = svg.key(colours, left + WIDE) if len(names) > 1 else ([], 2.0)
    y = top
    for row, series in rows.items():
        body.append(svg.text(0, y + LANE * len(series) / 2 + 4, row, 11, "start"))
        for name, ratios in series.items():
            body += _lane(y, sorted(ratios), at, colours[name], name)
            y += LANE
        y += 7
    body.append(svg.line(at(1), top - 2, at(1), y, 1.4))
    for tick in _ticks(low, high):
        body += [svg.line(at(tick), y, at(tick), y + 4),
                 svg.text(at(tick), y + 16, f"{tick:g}" if tick >= 1 else f"1/{1 / tick:g}")]
    body += [svg.line(left, y, left + WIDE, y), svg.text(left + WIDE / 2, y + 32, axis)]
    return svg.picture("".join(body), left + WIDE + 8, y + 38, alt, shown=620)


def _lane(y, ratios, at, colour, name):
    """The ratios of one series, in ascending order: their range, each of them, the median."""
    middle, median = y + LANE / 2, at(statistics.median(ratios))
    dots = [svg.element("circle", cx=at(ratio), cy=middle, r=3, fill=colour, fill_opacity=0.75,
                        data_series=name) for ratio in ratios]
    return [svg.line(at(ratios[0]), middle, at(ratios[-1]), middle, 0.8, stroke_opacity=0.5), *dots,
            svg.rectangle(median - 1.5, y + 1, 3, LANE - 2, fill="currentColor", data_median=name)]


def _ticks(low, high):
    """Powers of a power of two between two ratios, 1 among them, with room for their labels."""
    step = max(1, math.ceil(APART * math.log2(high / low) / WIDE))
    return [2.0**power for power in range(-20 * step, 20 * step, step) if low <= 2.0**power <= high]
