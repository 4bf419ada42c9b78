"""Tiles: which device holds which slice of an array, by its shards and by its data."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from meshbook.proofs.shards import slices_of


def index_text(tile: Iterable[tuple[int, int]]):
    """`((0, 4), (8, 16))` as `"0:4,8:16"`."""
    return ",".join(f"{start}:{stop}" for start, stop in tile)


def tile_shape(tile: tuple[tuple[int, int], ...]):
    """The shape of a tile as text, `(4, 8)`."""
    sizes = [str(stop - start) for start, stop in tile]
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"


def refuse_without_tiles(array: Any):
    """Raise TypeError for what is no array on devices, ValueError for an unfinished sum."""
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
        raise TypeError(
            f"expected a jax.Array with shards on devices, found {type(array).__name__}"
        )
    if getattr(getattr(array.sharding, "spec", None), "unreduced", None):
        raise ValueError(
            f"{jax.typeof(array)} is a sum that is not finished: it has no tiles before "
            "jax.reshard has closed it"
        )


def tiles_of(array: Any):
    """Collect who holds what: {((start, stop), ...): [device ids]}, from the shards alone."""
    refuse_without_tiles(array)
    tiles = {}
    for shard in array.addressable_shards:
        (device,) = shard.data.devices()  # where the data really is
        tile = slices_of(shard.index, array.shape)
        if shard.data.shape != tuple(stop - start for start, stop in tile):
            raise ValueError(
                f"device {device.id} should hold [{index_text(tile)}] of {array.shape}, "
                f"and holds an array of shape {shard.data.shape}"
            )
        tiles.setdefault(tile, []).append(device.id)
    return {tile: sorted(tiles[tile]) for tile in sorted(tiles)}


def held_data(array: Any):
    """{device id: the data in its memory}, whatever index the shards claim for it."""
    refuse_without_tiles(array)
    return {each.id: shard.data for shard in array.addressable_shards
            for each in shard.data.devices()}


def bounds(places: Int[np.ndarray, "..."], shape: tuple[int, ...]):
    """The tile `((start, stop), ...)` that a piece of `arange(size).reshape(shape)` fills."""
    if not places.size:
        return tuple((0, size) for size in places.shape)
    ends = (np.unravel_index(int(each), shape) for each in (places.flat[0], places.flat[-1]))
    return tuple((int(first), int(last) + 1) for first, last in zip(*ends))
