"""What each device of a mesh holds: the piece in its memory, inside the outline of the whole."""

from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import Mesh

from meshbook.drawing import svg
from meshbook.drawing.arrays import Drawing, describe, device_label, device_marks
from meshbook.drawing.tiles import tiles_of

PITCH, WIDE, LOWEST, HIGHEST = 94.0, 84.0, 20.0, 42.0  # from device to device, an outline: pixels


def draw_held(mesh: Mesh, arrays: Mapping[str, jax.Array], title: str):
    """Draw a mesh of two axes, the first one across: each device with its piece of every array.

    arrays {name: a matrix on the mesh}, below each other and as wide as each other, the heights
    within bounds; the pieces are those of `tiles_of`. Raises ValueError for a mesh or an array of
    another rank.
    """
    ranks = {mesh.devices.ndim, *(array.ndim for array in arrays.values())}
    if ranks != {2}:
        shapes = [array.shape for array in arrays.values()]
        raise ValueError("expected a mesh of two axes and matrices on it, found a mesh of "
                         f"{mesh.devices.shape} and arrays of {shapes}")
    held = {name: {device: tile for tile, devices in tiles_of(array).items() for device in devices}
            for name, array in arrays.items()}
    high = {name: min(HIGHEST, max(LOWEST, WIDE * array.shape[0] / array.shape[1]))
            for name, array in arrays.items()}
    labels = 14.0 * (len(arrays) > 1)
    row = 26 + sum(high.values()) + (labels + 8) * len(arrays)
    body = [svg.text(0, 12, title, 13, "start", font_weight="600")]
    for (across, down), device in np.ndenumerate(mesh.device_ids):
        device, x, y = int(device), PITCH * across, 24 + row * down
        body.append(svg.element("circle", cx=x + 9, cy=y + 9, r=9, fill=svg.device_colour(device)))
        body.append(device_label(x + 9, y + 9, device, 18))
        y += 24
        for name, array in arrays.items():
            if labels:
                body.append(svg.text(x, y + 10, name, 11, "start"))
            body.append(_piece(x, y + labels, high[name], array.shape, device,
                               held[name][device]))
            y += high[name] + labels + 8
    bottom = 24 + row * mesh.devices.shape[1] + 8
    for name, array in arrays.items():
        size, whole = array.addressable_shards[0].data.nbytes, array.nbytes
        words = f"each device holds {svg.size_text(size)} of the {svg.size_text(whole)} of {name}"
        body.append(svg.text(0, bottom, words, 12, "start"))
        bottom += 17
    alt = f"{title}. " + ". ".join(describe(array, name) for name, array in arrays.items())
    width = PITCH * mesh.devices.shape[0] - PITCH + WIDE + 2
    return Drawing(svg.root("".join(body), max(width, 240.0), bottom - 8, alt, shown=1.1 * width),
                   svg.checked_alt(alt))


def _piece(x, y, high, shape, device, tile):
    """The outline of a matrix, with the tile of one device filled."""
    (top, bottom), (left, right) = tile
    hint, marks = device_marks(device, tile)
    down, across = high / shape[0], WIDE / shape[1]
    piece = svg.element("rect", hint, x=x + left * across, y=y + top * down,
                        width=(right - left) * across, height=(bottom - top) * down, **marks)
    return piece + svg.frame(x, y, WIDE, high)
