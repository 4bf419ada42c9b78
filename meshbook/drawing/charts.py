"""Charts of an experiment on a grid: bars in groups under a limit, and what was predicted.

All are inline SVG in the style of the book (`meshbook.drawing.svg`).
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from numbers import Real

from meshbook.drawing import svg

BARS, RIGHT = 290.0, 66.0


def draw_groups(groups: Mapping[str, Mapping[str, Real | None]], unit: str, alt: str,
                limit: tuple[str, Real] | None = None):
    """Horizontal bars {group: {label: value or None}}; a label has one colour in all groups.

    limit: (words, value), a dashed line; bars beyond it are hollow past the line, since that much
    is not there. None stands for what is not known. Raises ValueError where nothing is known.
    """
    known = [value for row in groups.values() for value in row.values() if value is not None]
    if not known:
        raise ValueError("expected at least one known value to draw; found none")
    labels = list(dict.fromkeys(label for row in groups.values() for label in row))
    colours = {label: svg.SERIES[i % len(svg.SERIES)] for i, label in enumerate(labels)}
    scale = BARS / max([*known, *([limit[1]] if limit else [])])
    left = 8.0 + max(svg.text_width(group, 12) for group in groups)
    body, top = svg.key(colours, left + BARS) if len(labels) > 1 else ([], 2.0)
    y = top = top + 14.0 * bool(limit)
    for group, row in groups.items():
        body.append(svg.text(0, y + 8.5 * len(row) + 4, group, 12, "start", font_weight="600"))
        for label, value in row.items():
            body += _bar(left, y, value, unit, scale, limit, colours[label], label)
            y += 17
        y += 9
    if limit:
        x = left + scale * limit[1]
        body.append(svg.line(x, top - 2, x, y - 8, 1.2, stroke_dasharray="4 3"))
        body.append(svg.text(x, top - 5, limit[0], 11))
    reach = max(_value_beside(value, unit, scale, limit)[1] for value in known)
    return svg.picture("".join(body), left + max(BARS + RIGHT, reach), y - 6, alt, shown=640)


def _bar(left, y, value, unit, scale, limit, colour, label):
    """One bar with its value behind it; the part of it beyond the limit is an outline."""
    if value is None:
        return [svg.text(left + 4, y + 12, "not known", 11, "start")]
    line = limit[1] if limit else math.inf
    parts = [svg.rectangle(left, y + 1, scale * min(value, line), 13, fill=colour,
                           data_label=label)]
    if value > line:
        parts.append(svg.rectangle(left + scale * line, y + 1.5, scale * (value - line), 12,
                                   stroke=colour, stroke_width=1.5, stroke_dasharray="3 2"))
    words, end = _value_beside(value, unit, scale, limit)
    return [*parts, svg.text(left + end - svg.text_width(words), y + 12, words, 11, "start")]


def _value_beside(value, unit, scale, limit):
    """(a bar's value in words, where they end from the start of the bars), not across the line."""
    words, line = f"{svg.readable(value)} {unit}", scale * limit[1] if limit else math.inf
    x, wide = scale * value + 5, svg.text_width(words)
    if x < line + 4 < x + wide:
        x = line + 5
    return words, x + wide


WIDTH, HEIGHT, LEFT = 420.0, 130.0, 58.0


def draw_agreement(panels: Mapping[str, Mapping[str, Sequence[tuple[Real, Real]]]],
                   unit: str, alt: str, band: Real, axis: str = "found by the compiler"):
    """How far predictions are off, by the size of what was found, in panels under each other.

    panels: {title: {series: [(predicted, found)]}}; a series has one colour in all panels. The
    grey band is that of errors up to `band`; axis: where the true values are from. ValueError
    without points, or for values up to 0.
    """
    pairs = [pair for series in panels.values() for row in series.values() for pair in row]
    if not pairs or min(min(pair) for pair in pairs) <= 0:
        raise ValueError(f"expected points with positive values; found {panels!r}")
    names = dict.fromkeys(name for series in panels.values() for name in series)
    colours = {name: svg.SERIES[i % len(svg.SERIES)] for i, name in enumerate(names)}
    low, high = (math.log10(f(found for _, found in pairs)) + by
                 for f, by in ((min, -0.1), (max, 0.1)))
    most = max(1.4 * band, *(1.1 * abs(predicted / found - 1) for predicted, found in pairs))
    body, top = svg.key(colours, LEFT + WIDTH)
    x = lambda found: LEFT + WIDTH * (math.log10(found) - low) / (high - low)
    for title, series in panels.items():
        body.append(svg.text(LEFT, top + 10, title, 12, "start", font_weight="600"))
        body += _panel(series, colours, top + 16, x, most, band)
        top += HEIGHT + 26
    bottom = top - 10
    for tick in _decades(low, high):
        body += [svg.line(x(tick), bottom, x(tick), bottom + 4),
                 svg.text(x(tick), bottom + 16, svg.readable(tick), 11)]
    body.append(svg.text(LEFT + WIDTH / 2, bottom + 33, f"{axis}, {unit}", 12))
    turned = f"rotate(-90 8 {svg.number(bottom / 2 + 12)})"
    body.append(svg.text(8, bottom / 2 + 12, "error of prediction", 12, transform=turned))
    return svg.picture("".join(body), LEFT + WIDTH + 8, bottom + 40, alt, shown=600)


def _panel(series, colours, top, x, most, band):
    """Points by the size of what was found and the error, errors from -most to most."""
    y = lambda error: top + HEIGHT * (most - error) / (2 * most)
    body = [svg.rectangle(LEFT, y(band), WIDTH, y(-band) - y(band), fill="#858585",
                          fill_opacity=0.3)]
    body += [svg.frame(LEFT, top, WIDTH, HEIGHT), svg.line(LEFT, y(0), LEFT + WIDTH, y(0))]
    marks = (-band, 0, band) if y(0) - y(band) > 12 else range(-1, math.ceil(most))
    body += [svg.text(LEFT - 6, y(error) + 4, f"{error:+.0%}" if error else "0", 11, "end")
             for error in marks]
    return body + [svg.element("circle", cx=x(found), cy=y(predicted / found - 1), r=4.5,
                               fill=colours[name], fill_opacity=0.85, data_series=name)
                   for name, row in series.items() for predicted, found in row]


def draw_spreads(groups: Mapping[str, Mapping[str, Sequence[Real]]], alt: str):
    """How errors are spread, {group: {label: [shares]}}: a bar to what nine in ten stay under, a
    tick at the median, a line to the worst. Raises ValueError for a row without shares.
    """
    rows = [shares for group in groups.values() for shares in group.values()]
    if not rows or not all(rows):
        raise ValueError(f"expected groups of rows of at least one share; found {groups!r}")
    labels = dict.fromkeys(label for group in groups.values() for label in group)
    colours = dict(zip(labels, itertools.cycle(svg.SERIES), strict=False))
    left = 8.0 + max(svg.text_width(group, 12) for group in groups)
    scale = BARS / max(map(max, rows))
    body, y = svg.key(colours, left + BARS)
    body.append(svg.text(left, y + 4, "tick: median · bar: nine in ten · line: all", 11, "start"))
    y += 14
    for group, series in groups.items():
        body.append(svg.text(0, y + 9.5 * len(series) + 4, group, 12, "start", font_weight="600"))
        for label, shares in series.items():
            body += _spread(left, y, sorted(shares), scale, colours[label], label)
            y += 19
        y += 9
    return svg.picture("".join(body), left + BARS + 100, y - 6, alt, shown=640)


def _spread(left, y, shares, scale, colour, label):
    """One row of `draw_spreads`; shares in ascending order."""
    end = lambda share: left + scale * share
    median, most = end(statistics.median(shares)), end(shares[-1])
    nine_in_ten = scale * shares[math.ceil(0.9 * len(shares)) - 1]
    return [svg.line(left, y + 8, most, y + 8, 1.4),
            svg.rectangle(left, y + 2, nine_in_ten, 12, fill=colour, data_label=label),
            svg.line(median, y, median, y + 16, 2.4),
            svg.text(most + 5, y + 12, f"{shares[-1]:.1%} at worst", 11, "start")]


def _decades(low, high):
    """1, 2, 5 times powers of ten between two exponents, or these alone, if there are many."""
    return [by * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1)
            for by in ((1, 2, 5) if high - low < 3 else (1,))
            if low <= math.log10(by * 10.0**power) <= high]
