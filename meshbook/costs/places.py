"""Where a mesh's axes lie on a torus of chips, as JAX lays them, without a TPU or its compiler."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jax.experimental import mesh_utils


@dataclass(frozen=True)
class Chip:
    """All that JAX asks of a device to lay out a mesh."""

    id: int
    coords: tuple
    platform: str = "tpu"
    device_kind: str = "TPU v4"
    core_on_chip: int = 0
    process_index: int = 0
    slice_index: int = 0


def three(torus: Sequence[int]):
    """A torus of three dimensions, those that it does not say of size 1. ValueError for more."""
    if not 1 <= len(torus) <= 3:
        raise ValueError(f"expected a torus of one to three dimensions; found {tuple(torus)}")
    return (*torus, *[1] * (3 - len(torus)))


def chips_of(torus: Sequence[int]):
    """The Chips of a torus such as (2, 4, 4), the first coordinate running fastest."""
    torus = three(torus)
    return [Chip(i, coords[::-1]) for i, coords in enumerate(np.ndindex(*torus[::-1]))]


def placed(torus: Sequence[int], mesh: Mapping[str, int], split: bool = True):
    """The coordinates of the chips of a mesh, (sizes of its axes ..., 3).

    split: whether a mesh axis may have a part of an axis of the torus. Raises NotImplementedError,
    as JAX does, where the mesh does not fit the torus.
    """
    devices = mesh_utils.create_device_mesh(
        tuple(mesh.values()), chips_of(torus), allow_split_physical_axes=split)
    return np.array([each.coords for each in devices.flat]).reshape(*mesh.values(), 3)


class Span(NamedTuple):
    """Chips of a group along a mesh axis: so many different coordinates in each of the dimensions
    of the torus (`along`) that it spans. shared: chips that share a link; where the group's are not
    next to each other, links between them also carry what other groups send.
    """

    sizes: tuple
    along: tuple
    shared: int


def spans(torus: Sequence[int], mesh: Mapping[str, int]):
    """{mesh axis: its Span}."""
    coords, found = placed(torus, mesh), {}
    for at, axis in enumerate(mesh):
        group = np.moveaxis(coords, at, 0).reshape(mesh[axis], -1, 3)[:, 0]
        places = {dimension: sorted(set(group[:, dimension].tolist())) for dimension in range(3)}
        places = {dimension: each for dimension, each in places.items() if len(each) > 1}
        steps = [max(np.diff(each).tolist()) for each in places.values()]
        found[axis] = Span(tuple(map(len, places.values())), tuple(places), max(steps, default=1))
    return found
