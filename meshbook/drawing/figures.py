"""Every figure of the book: plots, images, and the drawings of meshes, arrays and programs.

All are inline SVG in one style and one palette, readable in light and dark mode and in Colab.
"""

import base64
import hashlib
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real

import matplotlib
import numpy as np
from jaxtyping import Array, Int, Num, UInt8
from matplotlib import image as matplotlib_image
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from meshbook.drawing import svg
from meshbook.drawing.arrays import assert_tiles, describe, draw_mesh, draw_sharding, draw_tile
from meshbook.drawing.diagrams import draw_flow, draw_product, draw_values, draw_weights, moved
from meshbook.drawing.lowering import draw_stages
from meshbook.drawing.profiles import draw_buffers, draw_gantt, draw_shares
from meshbook.drawing.svg import Picture, device_colour, side_by_side
from meshbook.drawing.tiles import tiles_of
from meshbook.drawing.documents import draw_attention, draw_rows, draw_tokens

__all__ = [  # what a chapter uses, wherever it is defined
    *("Picture", "assert_tiles", "bars", "curves", "device_colour", "display", "draw_attention"),
    *("draw_batch", "draw_buffers", "draw_flow", "draw_gantt", "draw_mesh", "draw_product"),
    *("draw_rows", "draw_sharding", "draw_shares", "draw_stages", "draw_tokens", "draw_values"),
    *("draw_weights", "histogram", "image_grid", "side_by_side"),
]

STYLE = {
    "svg.fonttype": "none",  # text stays text: it takes the page's font and colour
    "svg.hashsalt": "meshbook",  # ids, and so bytes, are the same in every run
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": matplotlib.cycler(color=svg.SERIES),
    "legend.frameon": False,
}


def display(fig: Figure, alt: str | None):
    """A matplotlib figure as inline SVG in the colours of the page; black becomes `currentColor`.

    Raises ValueError without alt text. The figure is closed: nothing is shown twice.
    """
    svg.checked_alt(alt)
    out = io.StringIO()
    with matplotlib.rc_context(STYLE):
        fig.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    pyplot.close(fig)
    width, height, body = take_apart(out.getvalue())
    return svg.picture(recolour(body), width, height, alt, shown=1.5 * width)


def take_apart(document: str):
    """(width, height, body) of an SVG document that matplotlib wrote; units are points."""
    width, height = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', document).groups()
    body = document[document.index(">", document.index("<svg")) + 1 : document.rindex("</svg>")]
    return float(width), float(height), re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.S)


def recolour(body: str):
    """Black as `currentColor`, the page's font, and ids that no other figure on the page has."""
    body = body.replace("#000000", "currentColor")
    body = re.sub(r"(font(?:-family)?: ?(?:[\w.]+px )?)'DejaVu Sans'[^;\"]*", r"\1sans-serif", body)
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', body))
    body = re.sub(r' id="([^"]+)"', lambda m: m[0] if m[1] in used else "", body)
    mark = hashlib.sha256(body.encode()).hexdigest()[:8]
    return re.sub(r'( id="|href="#|url\(#)', rf"\g<1>f{mark}-", body)


def curves(series: Mapping[str, tuple], xlabel: str, ylabel: str, alt: str,
           marks: Sequence[tuple[str, Real]] = (), half: bool = False):
    """Lines {label: (x, y)}, each labelled at its end; `marks` are (label, y) of level lines.

    half: for a place beside another, with letters as large as in a whole one. Lines that lie on
    each other are drawn from wide to narrow, so that each of them is seen.
    """
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(3.1, 2.6) if half else (5.2, 3.0), layout="constrained")
        axes = fig.subplots()
        axes.set(xlabel=xlabel, ylabel=ylabel)
        ends = []
        for (label, (x, y)), width in zip(series.items(), line_widths(series), strict=True):
            (drawn,) = axes.plot(x, y, linewidth=width, solid_capstyle="round")
            ends.append((float(np.asarray(y)[-1]), label, drawn.get_color()))
        for label, level in marks:
            axes.axhline(level, color="#000000", linewidth=0.8, linestyle=(0, (4, 3)))
            ends.append((level, label, "#000000"))
        label_ends(axes, ends)
        return display(fig, alt)


def histogram(values: Sequence[int] | Int[np.ndarray, "N"], xlabel: str, ylabel: str, alt: str,
              marks: Sequence[tuple[str, Real]] = ()):
    """How often whole numbers lie in each of at most forty bins; `marks` are (label, x) lines."""
    low, high = min(values), max(values)
    bins = np.arange(low, high + 1 + (step := -(-(high + 1 - low) // 40)), step) - 0.5
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(5.2, 2.6), layout="constrained")
        axes = fig.subplots()
        axes.set(xlabel=xlabel, ylabel=ylabel)
        axes.hist(values, bins=bins, color=svg.SERIES[0])
        axes.set_xlim(0, 1.05 * max([high, *(x for _, x in marks)]))
        for label, x in marks:
            axes.axvline(x, color="#000000", linewidth=0.8, linestyle=(0, (4, 3)))
            place = {"xycoords": ("data", "axes fraction"), "va": "top", "annotation_clip": False}
            axes.annotate(f" {label}", (x, 1.0), **place)
        return display(fig, alt)


def line_widths(series: Mapping[str, tuple]):
    """1.8 for every line, or wide to narrow where all of them coincide to one per cent."""
    values = [np.asarray(y, float) for _, y in series.values()]
    alike = len({y.shape for y in values}) == 1 and len(values) > 1
    if alike and all(np.allclose(values[0], y, rtol=1e-2, atol=0) for y in values):
        return [1.5 + 2.0 * (len(values) - 1 - i) for i in range(len(values))]
    return [1.8] * len(values)


def label_ends(axes: Axes, ends: Iterable[tuple[Real, str, str]]):
    """Write each label beside the end of its line, moved apart where two would overlap.

    The colour is on a dash before the label: as text it would be too faint to read.
    """
    low, high = axes.get_ylim()
    step = 0.075  # of the height of the axes: one line of text
    places, at = [], -1.0
    for value, label, colour in sorted(ends, key=lambda end: end[0]):
        at = max((value - low) / (high - low), at + step)
        places.append((at, label, colour))
    excess = max(0.0, at - 1.0)
    for at, label, colour in places:
        place = {"xycoords": "axes fraction", "va": "center", "annotation_clip": False}
        dash = {"transform": axes.transAxes, "clip_on": False, "color": colour, "linewidth": 2}
        axes.plot([1.02, 1.05], [at - excess] * 2, **dash)
        axes.annotate(label, (1.07, at - excess), **place)


def bars(values: Mapping[str, Real | dict[str, Real]], unit: str, alt: str | None):
    """Horizontal bars {label: value}, or {label: {part: value}} for bars made of parts."""
    rows = {label: v if isinstance(v, dict) else {"": v} for label, v in values.items()}
    parts = list(dict.fromkeys(part for row in rows.values() for part in row))
    colours = {part: svg.SERIES[i % len(svg.SERIES)] for i, part in enumerate(parts)}
    longest = max(sum(row.values()) for row in rows.values()) or 1
    totals = {label: f"{svg.readable(sum(row.values()))} {unit}".strip()
              for label, row in rows.items()}
    width = max(360.0, *(svg.text_width(label, 12) + 12 + svg.text_width(total, 12)
                         for label, total in totals.items()))
    body, top = svg.key(colours, width) if parts != [""] else ([], 4.0)
    for i, (label, row) in enumerate(rows.items()):
        y, x = top + 40.0 * i, 0.0
        body.append(svg.text(0, y + 12, label, 12, "start"))
        body.append(svg.text(width, y + 12, totals[label], 12, "end"))
        for part, value in row.items():
            wide = width * value / longest
            body.append(svg.rectangle(x, y + 18, wide, 12, fill=colours[part], rx=1))
            x += wide
    return svg.picture("".join(body), width, top + 40.0 * len(rows), alt, shown=440)


def image_grid(
    images: Num[Array | np.ndarray, "N H W 3"] | Sequence[Num[Array | np.ndarray, "H W 3"]],
    titles: Iterable | None = None, *, alt: str, columns: int = 8,
):
    """A grid of images (N, height, width, 3), uint8 or float in [0, 1], each under its title."""
    images = [as_uint8(image) for image in images]
    titles = [str(title) for title in titles] if titles is not None else [""] * len(images)
    if len(titles) != len(images):
        raise ValueError(f"expected one title an image, found {len(titles)} for {len(images)}")
    side, gap, head = 64.0, 8.0, 15.0 if any(titles) else 0.0
    body = []
    for i, (image, title) in enumerate(zip(images, titles, strict=True)):
        x, y = i % columns * (side + gap), i // columns * (side + gap + head)
        place = {"x": x, "y": y + head, "width": side, "height": side, "href": png(image)}
        body.append(svg.element("image", style="image-rendering:pixelated", **place))
        if title:
            body.append(svg.text(x + side / 2, y + 11, title, 11))
    rows = -(-len(images) // columns)
    width = min(columns, len(images)) * (side + gap) - gap
    return svg.picture("".join(body), width, rows * (side + gap + head) - gap, alt)


def draw_batch(array: Num[Array, "B H W 3"], name: str):
    """Draw a batch of uint8 images (B, height, width, 3) as the devices hold it: their shards."""
    tiles, images = tiles_of(array), {}
    for shard in array.addressable_shards:
        images[shard.device.id] = np.asarray(shard.data)
    body, side, wide, y = [svg.text(0, 11, name, 12, "start", font_weight="600")], 30.0, 0.0, 20.0
    for tile, devices in tiles.items():
        chips = 26.0 * len(devices)
        body.append(moved(draw_tile(0, 0, chips, side, tile, devices), 0, y))
        for at, image in enumerate(images[devices[0]]):
            place = {"x": chips + 8 + (side + 4) * at, "y": y, "width": side, "height": side}
            style = "image-rendering:pixelated"
            body.append(svg.element("image", style=style, href=png(as_uint8(image)), **place))
            wide = max(wide, place["x"] + side)
        y += side + 8
    return svg.picture("".join(body), wide, y - 6, describe(array, name), shown=1.5 * wide)


def as_uint8(image: Num[Array | np.ndarray, "H W ..."]):
    """An image (height, width, 3) or (height, width) as uint8; floats must lie in [0, 1]."""
    image = np.asarray(image)
    if image.dtype == np.uint8:
        return image
    if image.min() < -1e-3 or image.max() > 1 + 1e-3:
        raise ValueError(f"expected pixels in [0, 1], found [{image.min():.3g}, {image.max():.3g}]")
    return np.round(255 * np.clip(image, 0, 1)).astype(np.uint8)


def png(image: UInt8[np.ndarray, "H W ..."]):
    """A uint8 image as a data URI."""
    out = io.BytesIO()
    grey = {"cmap": "gray", "vmin": 0, "vmax": 255}
    matplotlib_image.imsave(out, image, format="png", metadata={"Software": None}, **grey)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
