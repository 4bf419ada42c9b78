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
    """Predicted against found, on logarithmic axes: {series: [(predicted, found)]}.

    The grey band is the line of equality, `band` to either side. Raises ValueError without points.
    """
    values = [value for pairs in points.values() for pair in pairs for value in pair]
    if not values or min(values) <= 0:
        raise ValueError(f"expected points with positive values; found {points!r}")
    colours = {name: svg.SERIES[i % len(svg.SERIES)] for i, name in enumerate(points)}
    low, high = math.log10(min(values) / 1.3), math.log10(max(values) * 1.3)
    side, left = 300.0, 52.0
    place = lambda value: side * (math.log10(value) - low) / (high - low)
    body, top = svg.key(colours, left + side)
    body.append(_band(left, top, side, band / math.log(10) / (high - low) * side))
    body.append(svg.frame(left, top, side, side))
    for tick in _decades(low, high):
        x, y = left + place(tick), top + side - place(tick)
        body += [svg.line(x, top + side, x, top + side + 4), svg.line(left - 4, y, left, y),
                 svg.text(x, top + side + 16, readable(tick), 11),
                 svg.text(left - 7, y + 4, readable(tick), 11, "end")]
    for name, pairs in points.items():
        for predicted, found in pairs:
            body.append(svg.element("circle", cx=left + place(predicted),
                                    cy=top + side - place(found), r=4.0, fill=colours[name],
                                    fill_opacity=0.8, data_series=name))
    body.append(svg.text(left + side / 2, top + side + 33, f"predicted, {unit}", 12))
    turned = f"rotate(-90 12 {svg.number(top + side / 2)})"
    body.append(svg.text(12, top + side / 2, f"found, {unit}", 12, transform=turned))
    return svg.picture("".join(body), left + side + 8, top + side + 40, alt, shown=460)


def _band(left, top, side, half):
    """The diagonal of a square, `half` wide to either side of it, inside the square."""
    corners = [(0, 0), (half, 0), (side, side - half), (side, side), (side - half, side), (0, half)]
    points = " ".join(f"{svg.number(left + x)},{svg.number(top + side - y)}" for x, y in corners)
    return svg.element("polygon", points=points, fill="#858585", fill_opacity=0.35)


def _decades(low, high):
    """1, 2, 5 times powers of ten between two exponents."""
    return [by * 10**power for power in range(math.floor(low), math.ceil(high) + 1)
            for by in (1, 2, 5) if low <= math.log10(by * 10**power) <= high]
