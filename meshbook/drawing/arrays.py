"""Drawings of a mesh and of arrays that lie on one: every tile, and the devices that hold it.

What is drawn is read from the shards on the devices (`addressable_shards`), never from a sharding
annotation. The shards are written into the picture too, `tiles` reads them back from there, and
`assert_tiles` compares them with the data in the devices' memory.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from meshbook.drawing import svg
from meshbook.drawing.tiles import bounds, held_data, index_text, tile_shape, tiles_of

GAP = 3.0  # between neighbouring tiles, pixels


@dataclass(frozen=True, repr=False)
class Drawing(svg.Picture):
    """A picture of an array's tiles."""

    @property
    def tiles(self):
        """{device id: index as a tuple of slices}, read back from the picture itself."""
        return {device: index for device, index, _ in drawn_tiles(self.html)}


def drawn_tiles(html: str):
    """[(device id, index, fill)] of every coloured tile in the picture, from its attributes."""
    pattern = r'<(?:rect|circle) [^>]*fill="([^"]*)" data-device="(\d+)" data-index="([^"]*)"'
    found = re.findall(pattern, html)
    return [(int(device), parse_index(index), fill) for fill, device, index in found]


def parse_index(words: str):
    """The tuple of slices that `"0:4,8:16"` names; "" is the index of a scalar."""
    pairs = (part.split(":") for part in words.split(",") if part)
    return tuple(slice(int(start), int(stop)) for start, stop in pairs)


def assert_tiles(drawing: svg.Picture, array: jax.Array,
                 whole: jax.Array | np.ndarray | None = None):
    """Check the picture against data on the devices: each device holds the slice that is drawn.

    `shard.index` is not used. The array's elements are numbered on the host, the numbers are put
    on the devices in the array's sharding, and each device's must be the drawn slice of the
    host's. With `whole`, the array as the host knows it, the array's own data must be too.
    Raises AssertionError that names the device, what it holds and what is drawn.
    """
    drawn = {device: (index, fill) for device, index, fill in drawn_tiles(drawing.html)}
    places = np.arange(array.size, dtype=np.int32).reshape(array.shape)
    numbers, data = held_data(jax.device_put(places, array.sharding)), held_data(array)
    if not drawn.keys() == numbers.keys() == data.keys():
        raise AssertionError(f"expected devices {sorted(data)}, drawn {sorted(drawn)}")
    for device, (index, fill) in drawn.items():
        tile = index_text((part.start, part.stop) for part in index)
        found = np.asarray(numbers[device])
        if not np.array_equal(found, places[index]) or data[device].shape != found.shape:
            held = index_text(bounds(found, array.shape))
            raise AssertionError(f"device {device} holds [{held}], drawn [{tile}]")
        if whole is not None and not np.array_equal(data[device], whole[index]):
            raise AssertionError(f"device {device} holds other data than [{tile}] of the whole")
        if fill != svg.device_colour(device):
            raise AssertionError(
                f"device {device} has the colour {svg.device_colour(device)}, drawn {fill}"
            )


def letters_of(name: str | None, rank: int):
    """The axis letters in a name, `w_DF` or `w[D, F]`: D, F; else `axis 0`, `axis 1`."""
    inside = re.search(r"\[(.*?)\]", name or "")
    if inside:
        letters = [part.strip().partition("_")[0] for part in inside[1].split(",")]
    else:
        letters = list(((name or "").split() or [""])[0].rpartition("_")[2])
    if len(letters) == rank and all(letter.isalpha() and letter.isupper() for letter in letters):
        return tuple(letters)
    return tuple(f"axis {i}" for i in range(rank))


def split_axes(shape: tuple[int, ...], tiles: Iterable[tuple]):
    """The axes along which the tiles differ."""
    return [axis for axis in range(len(shape)) if len({tile[axis] for tile in tiles}) > 1]


def arrange(shape: tuple[int, ...], tiles: Iterable[tuple]):
    """(vertical axes, horizontal axes), outermost first: the split ones, a matrix's both."""
    axes = list(range(len(shape))) if len(shape) <= 2 else split_axes(shape, tiles)
    if len(shape) > 2 and len(axes) == 1:
        return axes, []
    return axes[-2::-2][::-1], axes[-1::-2][::-1]


def spans(axes: Sequence[int], shape: tuple[int, ...], tiles: Iterable[tuple], length: Real):
    """{(bounds of each of these axes): (offset, extent)} along one direction of the picture."""
    if not axes:
        return {(): (0.0, length)}
    axis, inner = axes[0], axes[1:]
    parts = sorted({tile[axis] for tile in tiles})
    gap = GAP if not inner else 4 * GAP
    scale = (length - gap * (len(parts) - 1)) / max(shape[axis], 1)
    result, offset = {}, 0.0
    for start, stop in parts:
        extent = (stop - start) * scale
        for key, (at, size) in spans(inner, shape, tiles, extent).items():
            result[((start, stop), *key)] = (offset + at, size)
        offset += extent + gap
    return result


def chip_grid(count: int, width: Real, height: Real):
    """(columns, rows, pitch) of the largest round chips, `count` of them, that fit the box."""
    options = []
    for columns in range(1, count + 1):
        rows = -(-count // columns)
        holes = rows * columns - count
        options.append((min(width / columns, height / rows, 26.0), -holes, columns, rows))
    pitch, _, columns, rows = max(options)  # chips of one size: the grid with the fewest holes
    return columns, rows, pitch


def device_marks(device: int, tile: tuple[tuple[int, int], ...]):
    """(hint, attributes) of a coloured shape: which device it is and which tile it holds."""
    index = index_text(tile)
    hint = svg.element("title", f"device {device}: [{index.replace(',', ', ')}]")
    colour = svg.device_colour(device)
    return hint, {"fill": colour, "data_device": str(device), "data_index": index}


def device_label(x: Real, y: Real, device: int, size: Real):
    """The id of a device, centred at (x, y) on its colour; nothing where it would be too small."""
    size = min(12.0, size / (0.7 * max(len(str(device)), 1.6)))
    if size < 5:
        return ""
    return svg.text(x, y + 0.36 * size, str(device), size, fill=svg.ink(svg.device_colour(device)))


def draw_tile(x: Real, y: Real, width: Real, height: Real, tile: tuple[tuple[int, int], ...],
              devices: Sequence[int]):
    """A tile: filled by the one device that holds it, or framed around a chip for every copy."""
    if len(devices) == 1:
        hint, marks = device_marks(devices[0], tile)
        box = svg.element("rect", hint, x=x, y=y, width=width, height=height, rx=2, **marks)
        return box + device_label(x + width / 2, y + height / 2, devices[0], min(width, height))
    parts = [svg.frame(x, y, width, height)]
    columns, rows, pitch = chip_grid(len(devices), width - 6, height - 6)
    for i, device in enumerate(devices):
        row, column = divmod(i, columns)
        in_row = min(columns, len(devices) - row * columns)
        at = x + width / 2 + (column - (in_row - 1) / 2) * pitch
        down = y + height / 2 + (row - (rows - 1) / 2) * pitch
        hint, marks = device_marks(device, tile)
        parts.append(svg.element("circle", hint, cx=at, cy=down, r=0.43 * pitch, **marks))
        parts.append(device_label(at, down, device, 0.8 * pitch))
    return "".join(parts)


def box_size(shape: tuple[int, ...], tiles: Mapping[tuple, Sequence[int]], vertical: Sequence[int],
             horizontal: Sequence[int], limit: Real):
    """(width, height) of the picture of the tiles: a matrix keeps its proportions within limits."""
    parts = len({tuple(tile[axis] for axis in vertical) for tile in tiles})
    copies = max(len(devices) for devices in tiles.values()) > 1
    low = max(0.13 * limit, parts * (22.0 if copies else 17.0) + 4 * GAP * len(vertical))
    if not vertical:
        return limit, low
    if len(shape) != 2 or not all(shape):
        return limit, max(low, 0.4 * limit)
    ratio = shape[0] / shape[1]
    high = 0.62 * limit
    return min(limit, max(0.4 * limit, high / ratio)), max(low, min(high, ratio * limit))


def axis_words(axes: Sequence[int], letters: Sequence[str], shape: tuple[int, ...]):
    """`B = 64` or, for nested axes, `H = 8 · K = 16`; without letters the sizes alone."""
    names = [f"{letters[axis]} = " if letters else "" for axis in axes]
    return " · ".join(f"{name}{shape[axis]:,}" for name, axis in zip(names, axes, strict=True))


def panel(shape: tuple[int, ...], tiles: Mapping[tuple, Sequence[int]], letters: Sequence[str],
          limit: Real = 290.0):
    """(SVG, width, height) of the tiles of an array, with the names and sizes of its axes."""
    vertical, horizontal = arrange(shape, tiles)
    width, height = box_size(shape, tiles, vertical, horizontal, limit)
    left, top = (18.0 if vertical else 1.0), 15.0
    rows, columns = spans(vertical, shape, tiles, height), spans(horizontal, shape, tiles, width)
    rest = [axis for axis in range(len(shape)) if axis not in vertical]
    across = axis_words(horizontal or rest, letters, shape) or "one number"
    parts = [svg.text(left + width / 2, 10, across)]
    if vertical:
        turn = f"rotate(-90 11 {svg.number(top + height / 2)})"
        down = axis_words(vertical, letters, shape)
        parts.append(svg.text(11, top + height / 2, down, transform=turn))
    for tile, devices in tiles.items():
        y, high = rows[tuple(tile[axis] for axis in vertical)]
        x, wide = columns[tuple(tile[axis] for axis in horizontal)]
        parts.append(draw_tile(left + x, top + y, wide, high, tile, devices))
    return "".join(parts), left + width, top + height


def holding(array: jax.Array, tiles: Mapping[tuple, Sequence[int]]):
    """One line that says what a device holds: `each device holds (4, 8) · 128 B`."""
    shapes = {tile_shape(tile) for tile in tiles}
    who = "each device" if sum(map(len, tiles.values())) > 1 else "the device"
    most = max(shard.data.nbytes for shard in array.addressable_shards)
    if len(shapes) > 1:
        return f"tiles of {len(shapes)} shapes, at most {svg.size_text(most)} each"
    return f"{who} holds {shapes.pop()} · {svg.size_text(most)}"


def unseen(shape: tuple[int, ...], tiles: Iterable[tuple], letters: Sequence[str]):
    """The axes that the picture leaves out, because no device splits them."""
    vertical, horizontal = arrange(shape, tiles)
    rest = [axis for axis in range(len(shape)) if axis not in (*vertical, *horizontal)]
    return f" · {axis_words(rest, letters, shape)}: not split" if rest and horizontal else ""


def describe(array: jax.Array, name: str | None):
    """The alternative text: what the array is and which device holds which tile."""
    tiles = tiles_of(array)
    words = [
        f"[{index_text(tile).replace(',', ', ')}] on device{'s' if len(devices) > 1 else ''} "
        + ", ".join(map(str, devices))
        for tile, devices in tiles.items()
    ]
    listed = "; ".join(words) if len(words) <= 8 else "; ".join(words[:8]) + "; and so on"
    count = f"{len(tiles)} tile" + "s" * (len(tiles) > 1)
    return f"{name or 'an array'}, {array.dtype}{list(array.shape)}, in {count}: {listed}"


def draw_sharding(array: Any, name: str | None = None):
    """Draw which device holds which tile of an array of any rank.

    One colour is one device; a tile that several devices hold shows a dot for each of them. Axes
    that are not split are named with their size; three and more split axes are nested. With a name
    such as `w_DF` the axes are called by its letters. Raises TypeError for what has no shards.
    """
    tiles, letters = tiles_of(array), letters_of(name, array.ndim)
    body, width, height = panel(array.shape, tiles, letters)
    note = holding(array, tiles) + unseen(array.shape, tiles, letters)
    title = f"{name + '  ' if name else ''}{array.dtype}{list(array.shape)}"
    return Drawing(*titled(body, width, height, title, note, describe(array, name)))


def titled(body: str, width: Real, height: Real, title: str, note: str, alt: str):
    """(SVG, alt text) of a panel under its title and above a line that explains it."""
    head = svg.text(0, 12, title, 12, "start", font_weight="600")
    moved = svg.element("g", body, transform="translate(0 22)")
    foot = svg.text(0, height + 38, note, 11, "start")
    wide = max(310.0, width, 5.6 * len(note))
    return svg.root(head + moved + foot, wide, height + 44, alt), svg.checked_alt(alt)


def draw_mesh(mesh: Mesh):
    """Draw the devices of a mesh: one cell is one device, one direction is one axis."""
    shape = mesh.devices.shape
    tiles = {
        tuple((i, i + 1) for i in position): [mesh.devices[position].id]
        for position in np.ndindex(shape)
    }
    body, width, height = panel(shape, tiles, mesh.axis_names)
    title = "mesh  " + " × ".join(f"{name} {size}" for name, size in mesh.shape.items())
    note = f"{mesh.size} devices; the number is the device's id"
    rows = "; ".join(str(row) for row in mesh.device_ids.tolist())
    alt = f"{title}, device ids along the first axis: {rows}"
    return svg.Picture(*titled(body, width, height, title, note, alt))
