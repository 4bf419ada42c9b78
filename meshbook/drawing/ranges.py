"""Predicted ranges beside what was found: a row for each, as shares of what was found."""
from collections.abc import Mapping
from numbers import Real

from meshbook.drawing import svg

WIDE, PITCH = 230.0, 21.0  # pixels


def draw_ranges(rows: Mapping[str, tuple[Real, Real, Real]], words: tuple[str, str], alt: str):
    """Draw {what: (bound, low, high)}, all as shares of what was found, which is a line at 1.

    A bar reaches from low to high, a tick is the bound; words: what these two are. Raises
    ValueError without rows, and for a range whose low is above its high.
    """
    if not rows or any(low > high for _, low, high in rows.values()):
        raise ValueError(f"expected rows (bound, low, high), low up to high; found {rows}")
    left = 10.0 + max(svg.text_width(name, 11) for name in rows)
    scale = WIDE / max(1.1, *(high for *_, high in rows.values()))
    body, top = svg.key({words[1]: svg.SERIES[0]}, left + WIDE)
    body += [svg.line(left, top - 4, left, top + 10, 2.4), svg.text(left + 6, top + 7, words[0], 11,
                                                                  "start")]
    top += 34
    end = top + PITCH * len(rows)
    for place, (name, (bound, low, high)) in enumerate(rows.items()):
        y = top + PITCH * place
        body += [svg.text(0, y + 12, name, 11, "start"),
                 svg.rectangle(left + scale * low, y + 3, scale * (high - low), 11,
                               fill=svg.SERIES[0], data_range=name),
                 svg.line(left + scale * bound, y, left + scale * bound, y + 17, 2.4)]
    body.append(svg.line(left + scale, top - 6, left + scale, end, 1.2, stroke_dasharray="4 3"))
    body.append(svg.text(left + scale, top - 9, "as found", 11))
    return svg.picture("".join(body), left + WIDE + 6, end + 2, alt, shown=640)
