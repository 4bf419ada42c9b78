"""The canvas of every drawing: one palette, theme-aware inline SVG, alt text.

Text and lines are drawn in `currentColor` on a transparent ground, so that one output reads on a
light page, on a dark page and in Colab. Fills come from one palette, the same in both themes.
"""

import html
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real

FONT = "font-family:system-ui,-apple-system,'Segoe UI',Roboto,sans-serif"
# Okabe and Ito's palette (distinguishable for colour-blind readers), black replaced by a grey.
DEVICES = (
    "#0072b2", "#56b4e9", "#d55e00", "#e69f00", "#009e73", "#f0e442", "#cc79a7", "#686868",
)
# Those of them that keep a contrast of 3:1 as a thin line on white and on a dark page.
SERIES = ("#0072b2", "#d55e00", "#009e73", "#c2689a", "#858585")
# Kinds of operations stand beside devices, so their colours are no device's: violet, crimson, teal.
KINDS = ("#7b5cc6", "#c8333f", "#1b8a9e")


def device_colour(device_id: int):
    """The colour of a device in every figure; colours repeat after eight, ids do not."""
    return DEVICES[device_id % len(DEVICES)]


def luminance(colour: str):
    """The relative luminance of "#rrggbb", from 0 to 1 (WCAG 2.2)."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def ink(fill: str):
    """Black or white, whichever reads better on the fill."""
    return "#111111" if luminance(fill) > 0.18 else "#ffffff"


def number(value: Real):
    """A coordinate with at most two decimals, the same text on every machine.

    Raises ValueError for one that is not finite: a browser draws nothing there, and says nothing.
    """
    if not math.isfinite(value):
        raise ValueError(f"expected a finite coordinate of a picture; found {value}")
    return f"{value:.2f}".rstrip("0").rstrip(".")


def readable(value: Real):
    """A number with commas: in full from 100 on, below it to three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def element(tag: str, body: str = "", **attributes: str | Real):
    """One SVG element; `_` in an attribute's name becomes `-`, numbers are rounded."""
    parts = [
        f'{name.rstrip("_").replace("_", "-")}="'
        + html.escape(value if isinstance(value, str) else number(value))
        + '"'
        for name, value in attributes.items()
    ]
    return f"<{' '.join([tag, *parts])}>{body}</{tag}>"


def text(x: Real, y: Real, words: str, size: Real = 11, anchor: str = "middle",
         fill: str = "currentColor", **attributes: str | Real):
    """One line of text whose baseline starts, ends or is centred at (x, y)."""
    place = {"x": x, "y": y, "font_size": size, "text_anchor": anchor, "fill": fill}
    return element("text", html.escape(words), **place, **attributes)


def text_width(words: str, size: Real = 11):
    """About how wide a line of text is; generous, so that what is laid out by it fits."""
    return 0.6 * size * len(words)


def size_text(count: Real):
    """A number of bytes with its unit, in powers of 1,000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000


def rectangle(x: Real, y: Real, width: Real, height: Real, fill: str = "none",
              stroke: str = "none", body: str = "", **attributes: str | Real):
    """One rectangle; `body` may hold its `title`, which a pointer shows.

    Raises ValueError for a negative width or height: a browser draws nothing there.
    """
    if min(width, height) < 0:
        raise ValueError(f"expected a rectangle of a width and a height from 0; found {width} and "
                         f"{height}")
    box = {"x": x, "y": y, "width": width, "height": height, "fill": fill, "stroke": stroke}
    return element("rect", body, **box, **attributes)


def frame(x: Real, y: Real, width: Real, height: Real):
    """A thin outline in the colour of the text."""
    return rectangle(x, y, width, height, stroke="currentColor", rx=2, stroke_opacity=0.55)


def line(x1: Real, y1: Real, x2: Real, y2: Real, width: Real = 1.0, **attributes: str | Real):
    """One straight line in the colour of the text."""
    ends = {"x1": x1, "y1": y1, "x2": x2, "y2": y2, "stroke": "currentColor"}
    return element("line", stroke_width=width, **ends, **attributes)


def arrow(x1: Real, y1: Real, x2: Real, y2: Real):
    """A horizontal or vertical arrow from (x1, y1) to (x2, y2)."""
    head = 4.0  # half of the tip's width, pixels
    along = (x2 > x1) - (x2 < x1), (y2 > y1) - (y2 < y1)
    back = x2 - 1.6 * head * along[0], y2 - 1.6 * head * along[1]
    side = head * along[1], head * along[0]
    wings = [(back[0] + sign * side[0], back[1] + sign * side[1]) for sign in (1, -1)]
    points = [(x2, y2), *wings]
    tip = " ".join(f"{number(x)},{number(y)}" for x, y in points)
    return line(x1, y1, *back, width=1.4) + element("polygon", points=tip, fill="currentColor")


def key(colours: Mapping[str, str], width: Real):
    """(SVG elements, height) of coloured squares with the names of the parts, in as many lines."""
    body, x, y = [], 0.0, 2.0
    for part, colour in colours.items():
        wide = 26 + text_width(part)
        if x and x + wide > width:
            x, y = 0.0, y + 18
        body.append(rectangle(x, y, 10, 10, fill=colour, rx=2))
        body.append(text(x + 14, y + 9, part, 11, "start"))
        x += wide
    return body, y + 24


@dataclass(frozen=True, repr=False)
class Picture:
    """A finished figure: HTML that a notebook shows as it is, and the words that replace it."""

    html: str
    alt: str

    def _repr_html_(self):
        return self.html

    def __repr__(self):
        return self.alt


# Of a dict, a list of strings, an array or its scalar, an object without a text of its own.
REPR = re.compile(r"\{[^{}]*:[^{}]*\}|\[['\"]|\bnp\.\w+\(|\b[Aa]rray\(|\bdtype=| at 0x[0-9a-f]")


def checked_alt(alt: str | None):
    """The alternative text, in one line: somebody hears it in place of the picture.

    Raises ValueError where it is missing, and where it has what Python prints of a dict, of a list
    of strings, of an array or of a NumPy scalar: those are no words.
    """
    if not isinstance(alt, str) or not alt.strip():
        raise ValueError(f"a figure needs alt text: expected a sentence, found {alt!r}")
    if found := REPR.search(alt):
        raise ValueError(f"alt text is heard: expected words and numbers, found {found[0]!r}, "
                         f"which is Python's, in {alt!r}")
    return " ".join(alt.split())


def root(body: str, width: Real, height: Real, alt: str | None, shown: Real | None = None):
    """The whole `<svg>`; `shown` is its width on a wide page, a narrow page shrinks it to fit."""
    label = html.escape(checked_alt(alt))
    size = f"width:100%;max-width:{number(shown or width)}px;height:auto"
    style = f"display:block;margin:8px 0;{size};{FONT}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{label}" '
        f'viewBox="0 0 {number(width)} {number(height)}" fill="currentColor" '
        f'style="{html.escape(style)}">{body}</svg>'
    )


def picture(body: str, width: Real, height: Real, alt: str | None, shown: Real | None = None):
    """A Picture from SVG elements drawn in a box of width × height pixels."""
    return Picture(root(body, width, height, alt, shown), checked_alt(alt))


def side_by_side(*pictures: Picture):
    """Pictures in a row, which becomes a column where the page is narrow."""
    if not pictures:
        raise ValueError("side_by_side expected at least one picture, found none")
    cells = "".join(
        f'<div style="flex:1 1 260px;min-width:0">{each._repr_html_()}</div>' for each in pictures
    )
    row = "display:flex;flex-wrap:wrap;gap:4px 20px;align-items:flex-start"
    return Picture(f'<div style="{row}">{cells}</div>', "; ".join(each.alt for each in pictures))
