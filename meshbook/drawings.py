"""Drawings of a mesh and of arrays that lie on one: every tile, and the devices that hold it.

What is drawn is read from the shards on the devices (`addressable_shards`), never from a sharding
annotation. The shards are written into the picture too, and `tiles` reads them back from there.
"""

import re
from dataclasses import dataclass

import jax
import numpy as np

from meshbook import svg

GAP = 3.0  # between neighbouring tiles, pixels


@dataclass(frozen=True, repr=False)
class Drawing(svg.Picture):
    """A picture of an array's tiles."""

    @property
    def tiles(self):
        """{device id: index as a tuple of slices}, read back from the picture itself."""
        return {device: index for device, index, _ in drawn_tiles(self.html)}


def drawn_tiles(html):
    """[(device id, index, fill)] of every coloured tile in the picture, from its attributes."""
    found = re.findall(r'<rect [^>]*?fill="([^"]*)"[^>]*? data-device="(\d+)" data-index="([^"]*)"', html)
    return [(int(device), parse_index(index), fill) for fill, device, index in found]


def parse_index(words):
    """The tuple of slices that `"0:4,8:16"` names; "" is the index of a scalar."""
    pairs = (part.split(":") for part in words.split(",") if part)
    return tuple(slice(int(start), int(stop)) for start, stop in pairs)


def index_text(tile):
    """`((0, 4), (8, 16))` as `"0:4,8:16"`."""
    return ",".join(f"{start}:{stop}" for start, stop in tile)


def tiles_of(array):
    """{((start, stop), ...): [device ids]} of the shards that this process can address."""
    if not hasattr(array, "addressable_shards") or isinstance(array, jax.core.Tracer):
        raise TypeError(
            f"draw_sharding expected a jax.Array with shards on devices, found {type(array).__name__}"
        )
    tiles = {}
    for shard in sorted(array.addressable_shards, key=lambda shard: shard.device.id):
        bounds = [part.indices(size)[:2] for part, size in zip(shard.index, array.shape, strict=True)]
        tiles.setdefault(tuple(bounds), []).append(shard.device.id)
    return tiles


def assert_tiles(drawing, array):
    """Assert that the picture shows the array's shards: every device, its tile and its colour."""
    drawn = {device: (index, fill) for device, index, fill in drawn_tiles(drawing.html)}
    held = {
        device: tuple(slice(*bounds) for bounds in tile)
        for tile, devices in tiles_of(array).items()
        for device in devices
    }
    if drawn.keys() != held.keys():
        raise AssertionError(f"devices: expected {sorted(held)}, drawn {sorted(drawn)}")
    for device, index in held.items():
        expected = (index, svg.device_colour(device))
        if drawn[device] != expected:
            raise AssertionError(f"device {device}: holds {expected}, drawn {drawn[device]}")


def letters_of(name, rank):
    """The axis letters at the end of a tensor's name (`w_DF` → D, F), else `axis 0`, `axis 1`."""
    suffix = (name or "").rpartition("_")[2] if "_" in (name or "") else ""
    if len(suffix) == rank and suffix.isalpha():
        return tuple(suffix.upper())
    return tuple(f"axis {i}" for i in range(rank))


def split_axes(shape, tiles):
    """The axes along which the tiles differ."""
    return [axis for axis in range(len(shape)) if len({tile[axis] for tile in tiles}) > 1]


def arrange(shape, tiles):
    """(vertical axes, horizontal axes), outermost first: the split ones, of a matrix always both."""
    axes = list(range(len(shape))) if len(shape) <= 2 else split_axes(shape, tiles)
    if len(shape) > 2 and len(axes) == 1:
        return axes, []
    return axes[-2::-2][::-1], axes[-1::-2][::-1]


def spans(axes, shape, tiles, length):
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


def chip_grid(count, width, height):
    """(columns, rows) of equal chips that keep `count` of them most nearly square in the box."""
    def flatness(columns):
        rows = -(-count // columns)
        wide, high = width / columns, height / rows
        return max(wide / high, high / wide)

    columns = min(range(1, count + 1), key=flatness)
    return columns, -(-count // columns)


def tile_shape(tile):
    """The shape of a tile as text, `(4, 8)`."""
    sizes = [str(stop - start) for start, stop in tile]
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"


def chip(x, y, width, height, device, tile):
    """One device's copy of a tile: its colour, its id, and its index for those who read on."""
    fill = svg.device_colour(device)
    hint = svg.element("title", f"device {device}: [{index_text(tile).replace(',', ', ')}]")
    marks = {"data_device": str(device), "data_index": index_text(tile)}
    box = svg.rectangle(x, y, width, height, fill=fill, body=hint, rx=2, **marks)
    size = min(12.0, 0.75 * height, width / (0.7 * len(str(device))))
    if size < 5:
        return box
    return box + svg.text(x + width / 2, y + height / 2 + 0.36 * size, str(device), size, fill=svg.ink(fill))


def draw_tile(x, y, width, height, tile, devices):
    """A tile: filled by the one device that holds it, or framed around a chip for every copy."""
    if len(devices) == 1:
        return chip(x, y, width, height, devices[0], tile)
    frame = svg.rectangle(x, y, width, height, stroke="currentColor", rx=2, stroke_opacity=0.6)
    pad, gap = min(4.0, 0.08 * min(width, height)), 2.0
    columns, rows = chip_grid(len(devices), width, height)
    wide = (width - 2 * pad - gap * (columns - 1)) / columns
    high = (height - 2 * pad - gap * (rows - 1)) / rows
    chips = [
        chip(x + pad + i % columns * (wide + gap), y + pad + i // columns * (high + gap), wide, high, each, tile)
        for i, each in enumerate(devices)
    ]
    return frame + "".join(chips)


def box_size(shape, tiles, vertical, horizontal, limit):
    """(width, height) of the picture of the tiles: a matrix keeps its proportions within limits."""
    def count(axes):
        return len({tuple(tile[axis] for axis in axes) for tile in tiles})

    copies = max(len(devices) for devices in tiles.values())
    low = max(0.12 * limit, count(vertical) * 0.06 * limit + 4 * GAP * len(vertical))
    if not vertical:
        return limit, low + (0.08 * limit if copies > 1 else 0)
    if not horizontal or len(shape) != 2 or not all(shape):
        return limit, max(low, 0.5 * limit)
    ratio = shape[0] / shape[1]
    if ratio <= 1:
        return limit, min(max(low, ratio * limit), limit)
    return min(limit, max(0.5 * limit, 0.8 * limit / ratio)), max(low, 0.8 * limit)


def axis_words(axes, letters, shape):
    """`B = 64` or, for nested axes, `H = 8 · K = 16`."""
    return " · ".join(f"{letters[axis]} = {shape[axis]:,}" for axis in axes)


def panel(shape, tiles, letters, limit=290.0):
    """(SVG, width, height) of the tiles of an array, with the names and sizes of its axes."""
    vertical, horizontal = arrange(shape, tiles)
    width, height = box_size(shape, tiles, vertical, horizontal, limit)
    left, top = (18.0 if vertical else 0.0), 15.0
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


def size_text(count):
    """A number of bytes with its unit, in powers of 1,000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000


def holding(array, tiles):
    """One line that says what a device holds: `each device holds (4, 8) · 128 B`."""
    shapes = {tile_shape(tile) for tile in tiles}
    who = "each device" if sum(map(len, tiles.values())) > 1 else "the device"
    most = max(shard.data.nbytes for shard in array.addressable_shards)
    if len(shapes) > 1:
        return f"tiles of {len(shapes)} shapes, at most {size_text(most)} each"
    return f"{who} holds {shapes.pop()} · {size_text(most)}"


def unseen(shape, tiles, letters):
    """The axes that the picture leaves out, because no device splits them."""
    vertical, horizontal = arrange(shape, tiles)
    rest = [axis for axis in range(len(shape)) if axis not in (*vertical, *horizontal)]
    return f" · {axis_words(rest, letters, shape)}: not split" if rest and horizontal else ""


def describe(array, name):
    """The alternative text: what the array is and which device holds which tile."""
    tiles = tiles_of(array)
    words = [
        f"[{index_text(tile).replace(',', ', ')}] on device{'s' if len(devices) > 1 else ''} "
        + ", ".join(map(str, devices))
        for tile, devices in tiles.items()
    ]
    listed = "; ".join(words) if len(words) <= 8 else "; ".join(words[:8]) + "; and so on"
    return f"{name or 'an array'}, {array.dtype}{list(array.shape)}, in {len(tiles)} tiles: {listed}"


def draw_sharding(array, name=None):
    """Draw which device holds which tile of an array of any rank.

    One colour is one device; a tile that several devices hold shows a chip for each of them. Axes
    that are not split are named with their size; three and more split axes are nested. With a name
    such as `w_DF` the axes are called by its letters. Raises TypeError for what has no shards.
    """
    tiles, letters = tiles_of(array), letters_of(name, array.ndim)
    body, width, height = panel(array.shape, tiles, letters)
    note = holding(array, tiles) + unseen(array.shape, tiles, letters)
    title = f"{name + '  ' if name else ''}{array.dtype}{list(array.shape)}"
    return Drawing(*titled(body, width, height, title, note, describe(array, name)))


def titled(body, width, height, title, note, alt):
    """(SVG, alt text) of a panel under its title and above a line that explains it."""
    head = svg.text(0, 12, title, 12, "start", font_weight="600")
    moved = svg.element("g", body, transform="translate(0 22)")
    foot = svg.text(0, height + 38, note, 11, "start")
    return svg.root(head + moved + foot, max(310.0, width), height + 44, alt), svg.checked_alt(alt)


def draw_mesh(mesh):
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
