"""How far two runs are apart, and how far they may be."""

import math
from collections.abc import Mapping
from numbers import Real

from meshbook.drawing import svg

LEFT, WIDE = 118.0, 190.0  # before the axis, of the axis: pixels


def draw_margins(rows: Mapping[str, tuple[Real, Real]]):
    """Bars {what: (found, allowed)} on a logarithmic axis: green below what is allowed, else red.

    Raises ValueError without rows, where a difference is negative or not finite, or where nothing
    is allowed.
    """
    values = [value for row in rows.values() for value in row]
    if not rows or not all(map(math.isfinite, values)) or min(values) < 0 or not all(
            allowed for _, allowed in rows.values()):
        raise ValueError(f"expected differences of at least 0 and bounds above 0, found {rows!r}")
    low = math.floor(math.log10(min([v for v in values if v]) / 3))
    high = math.ceil(math.log10(1.5 * max(values)))
    place = lambda value: WIDE * (math.log10(value) - low) / (high - low) if value else 0.0
    body, told, y = [], [], 20.0
    for power in range(low, high + 1):
        x = LEFT + WIDE * (power - low) / (high - low)
        body.append(svg.line(x, 16, x, 18 + 25 * len(rows), 0.5, stroke_opacity=0.4))
        if (high - power) % 2 == 0:
            body.append(svg.text(x, 11, f"1e{power}", 10.5))
    for what, (found, allowed) in rows.items():
        fits = found <= allowed
        x = LEFT + place(allowed)
        body.append(svg.text(LEFT - 6, y + 14, what, 11, "end"))
        body.append(svg.rectangle(LEFT, y + 4, place(found), 13, data_row=what, rx=1,
                                  fill=svg.SERIES[2] if fits else svg.KINDS[1]))
        body.append(svg.line(x, y, x, y + 21, 2.4))
        words = f"{found:.1e}" if found else "0"
        body.append(svg.text(LEFT + WIDE + 8, y + 14, words, 11, "start"))
        told.append(f"{what} {words}, allowed {allowed:.0e}")
        y += 25
    body.append(svg.text(LEFT, y + 14, "bar: difference found · tick: allowed", 11, "start"))
    alt = "Differences between two runs: " + "; ".join(told)
    return svg.picture("".join(body), LEFT + WIDE + 68, y + 20, alt, shown=480)
