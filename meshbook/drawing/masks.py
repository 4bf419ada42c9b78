"""Random numbers on a mesh: one key, one grid of numbers, and the tile that each device draws."""

from collections.abc import Mapping

import jax
import numpy as np
from jaxtyping import Integer

from meshbook.drawing import svg
from meshbook.drawing.tiles import held_data, index_text, tiles_of

CELL, WIDE, HIGH = 14.0, 32.0, 15.0  # of a mask's element, of a number: pixels


def draw_masks(numbers_BF: Integer[np.ndarray, "B F"], least: int, masks: Mapping[str, jax.Array]):
    """Draw random numbers, and below them the masks that several meshes make of them.

    numbers_BF: from 0 to 255; those below `least` are dropped. masks {title: bool (B, F) on a
    mesh}: each device's elements, read from its memory, are filled with its colour where they are
    kept and hollow where they are dropped. Raises ValueError for a mask of another shape, and
    where two devices hold the same tile.
    """
    rows, columns = numbers_BF.shape
    left, top = 96.0, 22.0
    body = [svg.rectangle(0, top + 44, 58, 30, rx=15, stroke="currentColor", stroke_width=1.4),
            svg.text(29, top + 63, "one key", 11, font_weight="600"),
            svg.arrow(60, top + 59, left - 4, top + 59),
            svg.text(left, 12, "one number for each place in the array", 12, "start",
                     font_weight="600")]
    for (row, column), number in np.ndenumerate(numbers_BF):
        x, y = left + WIDE * column, top + HIGH * row
        fill, ink = ("none", "currentColor") if number < least else ("#858585", "#111111")
        body.append(svg.rectangle(x, y, WIDE - 1, HIGH - 1, fill=fill, stroke="#858585"))
        body.append(svg.text(x + WIDE / 2, y + 11, str(number), 10, fill=ink))
    top += HIGH * rows + 16
    body.append(svg.text(left, top, f"hollow: below {least}, dropped", 11, "start"))
    for i, (title, mask) in enumerate(masks.items()):
        if mask.shape != numbers_BF.shape:
            raise ValueError(f"expected a mask {numbers_BF.shape}, found {mask.shape}")
        x, y = (CELL * columns + 24) * i, top + 28
        body.append(svg.text(x, y, title, 12, "start", font_weight="600"))
        body += shards_of(mask, x, y + 8)
    width = max(left + WIDE * columns, len(masks) * (CELL * columns + 24) - 24)
    dropped = int((numbers_BF < least).sum())
    alt = (f"One key gives {numbers_BF.size} numbers, {dropped} of which are below {least}. "
           f"The same {dropped} elements are dropped on each of: {', '.join(masks)}, although each "
           "device draws only the numbers of its own tile.")
    return svg.picture("".join(body), width, top + 40 + CELL * rows, alt, shown=1.3 * width)


def shards_of(mask: jax.Array, x: float, y: float):
    """The elements of a mask at (x, y), each as the device that holds it has it in its memory."""
    body, held = [], held_data(mask)
    for tile, devices in tiles_of(mask).items():
        if len(devices) > 1:
            raise ValueError(f"[{index_text(tile)}] is held by devices {devices}, not by one")
        (device,), ((first, _), (left, _)) = devices, tile
        colour, named = svg.device_colour(device), False
        for (row, column), kept in np.ndenumerate(np.asarray(held[device])):
            at = x + CELL * (left + column), y + CELL * (first + row)
            place = {"data_device": str(device), "data_at": f"{first + row},{left + column}"}
            fill = colour if kept else "none"
            body.append(svg.rectangle(*at, CELL - 1, CELL - 1, fill=fill, stroke=colour, **place))
            if kept and not named:
                body.append(svg.text(at[0] + 6.5, at[1] + 10, str(device), 9.5,
                                     fill=svg.ink(colour)))
                named = True
    return body
