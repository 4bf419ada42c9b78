"""Devices as they are joined: slices of TPUs, nodes of GPUs, and the network between them."""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshbook.costs.devices import Device
from meshbook.costs.places import three, spans
from meshbook.hlo.wire import wire_bytes, wire_seconds

FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
CUBES = ((1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8),
         (8, 8, 8), (8, 8, 16), (8, 16, 16), (16, 16, 16))
SLICES = {  # of TPUs whose devices are chips; source: that of the device
    "TPU v4": CUBES, "TPU v5p": (*CUBES, (16, 16, 24)), "TPU v5e": FLAT, "TPU v6e": FLAT}


class Group(NamedTuple):
    """Devices along mesh axes, between which a collective goes.

    sizes: along the dimensions of the torus that they span, or of a node, behind one switch; rings:
    whether the ends of each are linked; shared: groups whose messages go over the same link; near:
    how many are in one slice or node; apart: over how many slices or nodes they lie.
    """

    sizes: tuple
    rings: tuple
    shared: int
    near: int
    apart: int


@dataclass(frozen=True)
class Machine:
    """Devices of one kind: slices of TPUs, each a torus of this shape, or (so many,) GPUs.

    Raises ValueError for GPUs that are no whole nodes, and for slices whose network is not known.
    """

    device: Device
    shape: tuple[int, ...]
    slices: int = 1

    def __post_init__(self):
        device, node = self.device, self.device.node
        if min(*self.shape, self.slices, 1) < 1:
            raise ValueError(f"expected one device or more in each dimension, and one slice or "
                             f"more; found {self.shape} and {self.slices}")
        if device.switch and (len(self.shape), self.slices) != (1, 1):
            raise ValueError(f"expected a number of {device.name}, as a shape (number,); found "
                             f"{self.shape} and {self.slices} slices")
        if device.switch and self.size > node and self.size % node:
            raise ValueError(f"expected whole nodes of {node} {device.name}; found {self.size}")
        if self.slices > 1 and not device.network:
            raise ValueError(f"the network between slices of {device.name} is not known")

    @property
    def size(self):
        """How many devices there are."""
        return math.prod(self.shape) * self.slices

    @property
    def rings(self):
        """Of each dimension of a slice, whether its ends are linked.

        Of a torus of three dimensions, that asks whole cubes of all of them.
        """
        sizes, ring = three(self.shape), self.device.ring
        linked = [ring > 0 and size % ring == 0 for size in sizes]
        return (all(linked),) * 3 if len(self.shape) == 3 else tuple(linked)

    def groups(self, mesh: Mapping[str, int]):
        """{mesh axis: its Group}, of a mesh with as many devices as there are.

        Slices are split by the first axis that they divide. Raises ValueError where there is none.
        """
        if self.device.switch:
            return dict(self._in_nodes(mesh))
        return self._in_slices(mesh)

    def _in_nodes(self, mesh):
        """Devices of the last axis are neighbours. The group counts that lies in most nodes."""
        node, stride = self.device.node, 1
        for axis, size in reversed(mesh.items()):
            blocks = self.size // (stride * size)
            first = [stride * size * block + at for block in range(min(blocks, node))
                     for at in range(min(stride, node))]
            nodes = max(len({(at + stride * i) // node for i in range(size)}) for at in first)
            near = size // nodes
            yield axis, Group((near,), (False,), 1, near, -(-size // near))
            stride *= size

    def _in_slices(self, mesh):
        split = next((axis for axis, size in mesh.items() if size % self.slices == 0), None)
        if split is None:
            found = ", ".join(f"{axis}={size}" for axis, size in mesh.items() if size > 1)
            raise ValueError(f"no axis of the mesh divides over {self.slices} slices: {found}")
        inside = {axis: size // self.slices if axis == split else size
                  for axis, size in mesh.items()}
        found = {}
        for axis, (sizes, along, shared) in spans(self.shape, inside).items():
            whole = three(self.shape)
            rings = tuple(self.rings[at] and size == whole[at] for size, at in zip(sizes, along))
            apart = self.slices if axis == split else 1
            found[axis] = Group(sizes, rings, shared, inside[axis], apart)
        return found


def along_all(groups: Sequence[Group]):
    """The Group along several axes."""
    sizes, rings, shared, near, apart = zip(*groups)
    return Group(sum(sizes, ()), sum(rings, ()), max(shared), math.prod(near), math.prod(apart))


def link_seconds(kind: str, group: Group, result_bytes: int | float, device: Device):
    """Seconds that the links of a device need for some collectives, of so many result bytes.

    The longer of two parts is taken: within a slice or node, and between them, where each device
    has its share on its own part of the network. Where a switch adds up, an all-reduce of n bytes
    has n on the links.
    """
    part = {"reduce-scatter": group.apart, "all-to-all": 1 / group.apart}.get(kind, 1)
    inside = between = 0.0
    if group.near > 1 and device.adds and kind == "all-reduce":
        inside = result_bytes / device.interconnect
    elif group.near > 1:
        inside = group.shared * wire_seconds(
            kind, group.sizes, (0, part * result_bytes), device, group.rings)
    if group.apart > 1:
        share = group.near if kind in ("all-reduce", "all-gather") else 1
        between = wire_bytes(kind, group.apart, result_bytes / share) / device.network
    return max(inside, between)
