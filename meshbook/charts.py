"""Charts of an experiment on a grid: bars in groups under a limit, and what was predicted.

All are inline SVG in the style of the book (`meshbook.svg`).
"""

import math

from meshbook import svg

BARS, RIGHT = 290.0, 66.0


def draw_groups(groups, unit, alt, limit=None):
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
    return svg.picture("".join(body), left + BARS + RIGHT, y - 6, alt, shown=640)


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
    words, x = f"{readable(value)} {unit}", left + scale * value + 5
    if x < left + scale * line + 4 < x + svg.text_width(words):
        x = left + scale * line + 5  # not across the line
    return [*parts, svg.text(x, y + 12, words, 11, "start")]


def readable(value):
    """A number to three significant digits, with commas."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def draw_agreement(points, unit, alt, band=0.05):
    """How far predictions are off, by the size of what was found: {series: [(predicted, found)]}.

    The grey band is that of errors up to `band` of what was found. ValueError without points.
    """
    pairs = [pair for row in points.values() for pair in row]
    if not pairs or min(min(pair) for pair in pairs) <= 0:
        raise ValueError(f"expected points with positive values; found {points!r}")
    colours = {name: svg.SERIES[i % len(svg.SERIES)] for i, name in enumerate(points)}
    low, high = (math.log10(f(found for _, found in pairs)) + by
                 for f, by in ((min, -0.1), (max, 0.1)))
    most = max(1.4 * band, *(1.1 * abs(predicted / found - 1) for predicted, found in pairs))
    width, height, left = 420.0, 170.0, 58.0
    body, top = svg.key(colours, left + width)
    x = lambda found: left + width * (math.log10(found) - low) / (high - low)
    y = lambda error: top + height * (most - error) / (2 * most)
    body.append(svg.rectangle(left, y(band), width, y(-band) - y(band), fill="#858585",
                              fill_opacity=0.3))
    body += [svg.frame(left, top, width, height), svg.line(left, y(0), left + width, y(0))]
    body += [svg.text(left - 6, y(error) + 4, f"{error:+.0%}" if error else "0", 11, "end")
             for error in (-band, 0, band)]
    for tick in _decades(low, high):
        body += [svg.line(x(tick), top + height, x(tick), top + height + 4),
                 svg.text(x(tick), top + height + 16, readable(tick), 11)]
    for name, row in points.items():
        body += [svg.element("circle", cx=x(found), cy=y(predicted / found - 1), r=4.5,
                             fill=colours[name], fill_opacity=0.85, data_series=name)
                 for predicted, found in row]
    body.append(svg.text(left + width / 2, top + height + 33, f"found, {unit}", 12))
    turned = f"rotate(-90 12 {svg.number(top + height / 2)})"
    body.append(svg.text(12, top + height / 2, "error of prediction", 12, transform=turned))
    return svg.picture("".join(body), left + width + 8, top + height + 40, alt, shown=600)


def _decades(low, high):
    """1, 2, 5 times powers of ten between two exponents."""
    return [by * 10**power for power in range(math.floor(low), math.ceil(high) + 1)
            for by in (1, 2, 5) if low <= math.log10(by * 10**power) <= high]
