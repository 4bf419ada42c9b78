"""Diagrams made of several drawings: a product and its collective, a model, a tree of weights."""

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import jax
import numpy as np

from meshbook.drawing import svg
from meshbook.drawing.arrays import describe, letters_of, panel
from meshbook.drawing.tiles import tile_shape, tiles_of


def small_panel(array: jax.Array, name: str, letters: Sequence[str], limit: Real):
    """(SVG, width, height) of an array's tiles under its name, above what one device holds."""
    tiles = tiles_of(array)
    body, width, height = panel(array.shape, tiles, letters, limit)
    title = svg.text(0, 11, name, 11, "start", font_weight="600")
    shapes = " ".join(sorted({tile_shape(tile) for tile in tiles}))
    each = svg.text(0, height + 33, f"{shapes} each", 10, "start")
    return title + svg.element("g", body, transform="translate(0 18)") + each, width, height + 38


def moved(body: str, x: Real, y: Real):
    """The same SVG elsewhere."""
    return svg.element("g", body, transform=f"translate({svg.number(x)} {svg.number(y)})")


def draw_product(left: jax.Array, right: jax.Array, result: jax.Array, names: Sequence[str],
                 step: str = ""):
    """Draw left × right = result with the tiles of all three and the step that finishes it.

    names: three of the form `A[I, J_model]`; step: the collective, "" for none.
    """
    arrays = (left, right, result)
    panels = [
        small_panel(array, name, letters_of(name, array.ndim), 92.0)
        for array, name in zip(arrays, names, strict=True)
    ]
    high = max(height for _, _, height in panels)
    body = [moved(drawn, 128 * i, 0) for i, (drawn, _, _) in enumerate(panels)]
    body += [svg.text(128 * i - 13, 55, sign, 16) for i, sign in ((1, "×"), (2, "="))]
    note = step or "no communication: every device has what it needs"
    body.append(svg.text(0, high + 16, note, 12, "start"))
    alt = f"{' times '.join(names[:2])} gives {names[2]}; {note}. "
    alt += ". ".join(describe(array, name) for array, name in zip(arrays, names, strict=True))
    return svg.picture("".join(body), 362, high + 24, alt, shown=500)


def draw_weights(tree: Any):
    """Draw where every leaf of a tree of arrays lives: its path, its tiles, what a device holds."""
    leaves = [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
    body, y = [], 0.0
    for pair in (leaves[i : i + 2] for i in range(0, len(leaves), 2)):
        cells = [small_panel(leaf, name, "", 140.0) for name, leaf in pair]
        body += [moved(drawn, 184 * i, y) for i, (drawn, _, _) in enumerate(cells)]
        y += max(height for _, _, height in cells) + 10
    held = sum(leaf.addressable_shards[0].data.nbytes for _, leaf in leaves)
    total = sum(leaf.nbytes for _, leaf in leaves)
    words = f"device 0 holds {svg.size_text(held)} of {svg.size_text(total)}"
    body.append(svg.text(0, y + 12, words, 12, "start"))
    alt = "Where each weight lives. " + ". ".join(describe(leaf, name) for name, leaf in leaves)
    return svg.picture("".join(body), 352, y + 20, alt, shown=480)


def draw_flow(steps: Sequence[tuple[str, str]], alt: str,
              repeat: tuple[int, int, str] | None = None):
    """Draw what a value goes through, downwards: (what happens, shape or words beside it) a step.

    repeat: (first step, last step, words) puts a bracket around steps that are repeated.
    """
    body, top, pitch = [], 2.0, 46.0
    wide = 20 + max(svg.text_width(what, 11) for what, _ in steps)
    beyond = 34.0 if repeat is None else 26 + svg.text_width(repeat[2], 12)
    across = wide + beyond + max(svg.text_width(beside, 10) for _, beside in steps)
    for i, (what, beside) in enumerate(steps):
        y = top + pitch * i
        body.append(svg.frame(1, y, wide, 28))
        body.append(svg.text(1 + wide / 2, y + 18, what, 12))
        body.append(svg.text(wide + beyond, y + 18, beside, 11, "start"))
        if i + 1 < len(steps):
            body.append(svg.arrow(1 + wide / 2, y + 28, 1 + wide / 2, y + pitch))
    if repeat:
        first, last, words = repeat
        high, low, x = top + pitch * first - 4, top + pitch * last + 32, wide + 8
        ends = f"{x - 4},{high} {x},{high} {x},{low} {x - 4},{low}"
        body.append(svg.element("polyline", points=ends, fill="none", stroke="currentColor"))
        body.append(svg.text(x + 4, (high + low) / 2 + 4, words, 12, "start", font_weight="600"))
    return svg.picture("".join(body), across, pitch * len(steps) - 14, alt, shown=1.25 * across)


def draw_values(array: jax.Array, name: str, origins: Mapping[Real, int] | None = None):
    """Draw the numbers that each device holds: a row of cells for each device.

    array: few numbers, of any rank; origins {number: device id}: cells take the colour of the
    device that a number came from, and a number that is not among them is a new one, uncoloured.
    """
    shards = sorted(array.addressable_shards, key=lambda shard: shard.device.id)
    rows = [(shard.device.id, np.ravel(shard.data).tolist()) for shard in shards]
    wide = min(30.0, 300.0 / max(len(values) for _, values in rows))
    title = f"{name}  {array.dtype}{list(array.shape)}"
    body = [svg.text(0, 12, title, 12, "start", font_weight="600")]
    for i, (device, values) in enumerate(rows):
        y = 22.0 + 27 * i
        colour = svg.device_colour(device)
        body.append(svg.element("circle", cx=11, cy=y + 11, r=10, fill=colour))
        body.append(svg.text(11, y + 15, str(device), 12, fill=svg.ink(colour)))
        for j, value in enumerate(values):
            origin = device if origins is None else origins.get(value)
            body.append(cell(30 + wide * j, y, wide - 2, value, origin))
    words = lambda values: ", ".join(f"{value:g}" for value in values)
    held = [f"device {device} holds {words(values)}" for device, values in rows]
    return svg.picture("".join(body), 332, 24 + 27 * len(rows), f"{name}: {'; '.join(held)}")


def cell(x: Real, y: Real, wide: Real, value: Real, device: int | None):
    """One number in a square of its device's colour; without a device, in an outline."""
    words = f"{value:.4g}"
    size = min(12.0, 1.5 * wide / max(len(words), 2))
    if device is None:
        return svg.frame(x, y, wide, 22) + svg.text(x + wide / 2, y + 15, words, size)
    colour = svg.device_colour(device)
    box = svg.rectangle(x, y, wide, 22, fill=colour, rx=2)
    return box + svg.text(x + wide / 2, y + 15, words, size, fill=svg.ink(colour))
