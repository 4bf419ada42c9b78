"""The shards of an array one by one: for each device, the place of what it holds in the whole."""

from collections.abc import Sequence

import jax

from meshbook.drawing import svg
from meshbook.drawing.arrays import Drawing, device_marks, letters_of
from meshbook.drawing.tiles import index_text, tiles_of

WIDTH, COLUMNS = 400, 4
WIDE, HIGH = 78.0, 60.0  # the room for the outline of one array, pixels


def draw_shards(array: jax.Array, name: str):
    """Draw every shard of a vector or a matrix inside the outline of the whole array.

    The devices, in the order of their ids, and the slices are those of `tiles_of`; what is drawn
    can be checked by `assert_tiles`. Raises ValueError for an array of another rank.
    """
    if array.ndim not in (1, 2):
        raise ValueError(f"expected an array of one or two dimensions, found {array.shape}")
    tiles, letters = tiles_of(array), letters_of(name, array.ndim)
    held = sorted((device, tile) for tile, devices in tiles.items() for device in devices)
    step = WIDTH / COLUMNS
    sizes = ", ".join(f"{letter} = {size}" for letter, size in zip(letters, array.shape))
    body, bottom = [svg.text(0, 12, f"the shards of {name}", 12, "start", font_weight="600"),
                    svg.text(WIDTH, 12, sizes, 11, "end")], 26.0
    for first in range(0, len(held), COLUMNS):
        for column, (device, tile) in enumerate(held[first:first + COLUMNS]):
            body.append(_shard(column * step, bottom, array.shape, device, tile))
        bottom += HIGH + 46
    words = "; ".join(f"device {device} [{_sliced(tile)}]" for device, tile in held)
    alt = f"The {len(held)} shards of {name}, an array {array.shape}: {words}"
    return Drawing(svg.root("".join(body), WIDTH, bottom - 8, alt), svg.checked_alt(alt))


def _shard(x, y, shape: Sequence[int], device, tile):
    """One device: its name, the outline of the array with its slice filled, and the slice."""
    rows, columns = shape if len(shape) == 2 else (1, *shape)
    scale = min(WIDE / max(columns, 1), HIGH / max(rows, 1))
    wide, high = max(columns * scale, 14.0), max(rows * scale, 14.0)
    x += (WIDTH / COLUMNS - wide) / 2
    middle, top = x + wide / 2, y + 12 + (HIGH - high) / 2
    (start, stop), (left, right) = tile if len(tile) == 2 else ((0, 1), *tile)
    hint, marks = device_marks(device, tile)
    piece = svg.element("rect", hint, x=x + left / columns * wide, y=top + start / rows * high,
                        width=(right - left) / columns * wide,
                        height=(stop - start) / rows * high, **marks)
    return (svg.text(middle, y + 6, f"device {device}", 11)
            + piece + svg.frame(x, top, wide, high)
            + svg.text(middle, y + HIGH + 26, f"[{_sliced(tile)}]", 10.5))


def _sliced(tile):
    return index_text(tile).replace(",", ", ")
