"""Wire bytes: what a device sends over its links in a collective, and how long that takes.

A program's text says *result bytes*, the bytes of a collective's result on one device. *Wire bytes*
are what one device sends over its links, and receives over them, to get there. Both are of one
device; they are different numbers, and only wire bytes divided by a bandwidth are seconds.

The formulas are those of devices that send to each other and add up themselves. Where the network
adds up (NVLink SHARP on machines with H100s and later, SHARP on InfiniBand), an all-reduce of n
bytes sends about n over a device's links, not 2·n·(k-1)/k. An all-to-all's are what it sends of
its own; where chips between two others forward what is for others, `wire_seconds` adds it.

Sources: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
workstations" (all-reduce, all-gather, reduce-scatter: the least without such a network, and a ring
reaches it); Austin et al. 2025, "How to Scale Your Model" (seconds on a torus, the time of a hop).
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

WIRE = {
    # A reduce-scatter, which leaves n/k, and then an all-gather of n: (k-1)·n/k each.
    "all-reduce": lambda k, n: 2 * n * (k - 1) / k,
    # Of its result a device already has the k-th part.
    "all-gather": lambda k, n: n * (k - 1) / k,
    # A device has k pieces of n and keeps one; the others must leave it, in part sums of n.
    "reduce-scatter": lambda k, n: n * (k - 1),
    # Of its k pieces a device keeps the one that is addressed to itself.
    "all-to-all": lambda k, n: n * (k - 1) / k,
    # Each device that has a target sends all it has.
    "collective-permute": lambda k, n: n,
    # Each device but the source must receive everything; in a chain each but the last sends it.
    "collective-broadcast": lambda k, n: n,
}


def wire_bytes(kind: str, ways: int | np.integer, result_bytes: int | float | np.integer):
    """The bytes that one device sends, and receives, over its links in a collective.

    kind: such as "all-reduce"; ways: k, the devices of a group; result_bytes: n, of the result on
    one device (of a reduce-scatter, the piece that stays). The figure is that of the device that
    sends most: in a permute some may have no target, and in a broadcast one sends nothing on.
    Raises ValueError for a kind whose bytes do not follow from its result, such as
    "ragged-all-to-all".

    >>> wire_bytes("all-reduce", ways=4, result_bytes=800)
    1200.0
    """
    if kind not in WIRE:
        raise ValueError(f"expected one of {', '.join(WIRE)}; found {kind!r}, whose wire bytes do "
                         "not follow from its result bytes")
    return WIRE[kind](ways, result_bytes)


def wire_seconds(kind: str, sizes: Sequence[int | np.integer], moved: tuple, device: Any,
                 ring: bool | Sequence[bool] = True):
    """How long the links of one device need for its part of some collectives.

    sizes: of the mesh axes along which the group lies, each of them laid along a dimension of the
    torus of its own; moved: (how many collectives, result bytes of all of them); device: a
    `meshbook.costs.devices.Device`; ring: whether the ends of a dimension are linked, of all or of
    each. If not, it is a line, and the device at its end has one link, not two. The longer of two
    times is taken: that of the bytes, and that of the hops that the first byte makes. Nothing else
    uses the links.
    """
    count, result_bytes = moved
    sent = wire_bytes(kind, math.prod(sizes), result_bytes)
    if device.switch:
        return max(sent / device.interconnect, count * device.hop)
    rings = [ring] * len(sizes) if isinstance(ring, bool) else ring
    each = list(zip(sizes, rings, strict=True))
    links = [2 if linked and size > 2 else 1 for size, linked in each]  # two chips share one link
    across = [size // 2 if linked else size - 1 for size, linked in each]
    if kind == "collective-permute":  # all of it goes to one neighbour
        return max(sent / device.link, count * device.hop)
    if kind == "all-to-all":  # chips on the way forward what is not for them
        carried = max(size**2 // 4 / size / each for size, each in zip(sizes, links, strict=True))
        return max(result_bytes * carried / device.link, count * sum(across) * device.hop)
    twice = 2 if kind == "all-reduce" else 1  # there, and back
    used = min(sum(links), device.links) * device.link
    return max(sent / used, count * twice * sum(across) * device.hop)
