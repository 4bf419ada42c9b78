"""Accelerators by their data sheets, and the times that no program can beat on them.

A device is what a program sees as one: a chip, or on TPU v2 and v3 one of a chip's two cores, with
half of the chip's memory and arithmetic. A floor is a bound from below, not a prediction: a program
that is limited by one thing alone reaches that floor, and no real one goes under it.

Sources: https://docs.cloud.google.com/tpu/docs (v3 to v6e), Jouppi et al. 2020, "A domain-specific
supercomputer for training deep neural networks" (v2, and the links of v3), NVIDIA's data sheets
(H100 SXM, H200).
"""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One device: bfloat16 FLOP/s, bytes of memory, bytes/s to it, bytes/s in from all its links.

    Two cores that share a chip's links can each use them all while the other is silent; so `link`
    is the chip's.
    """

    name: str
    flops: float
    memory: float
    bandwidth: float
    link: float


def _half(name, flops, memory, bandwidth, link):
    """A core of a chip that has two."""
    return Device(name, flops / 2, memory / 2, bandwidth / 2, link)


GIB, T, G = 2**30, 1e12, 1e9
DEVICES = {each.name: each for each in (
    _half("TPU v2", 46 * T, 16 * GIB, 716 * G, 4 * 496 / 8 * G),
    _half("TPU v3", 123 * T, 32 * GIB, 900 * G, 4 * 656 / 8 * G),
    Device("TPU v4", 275 * T, 32 * GIB, 1200 * G, 300 * G),
    Device("TPU v5e", 197 * T, 16 * GIB, 819 * G, 200 * G),
    Device("TPU v5p", 459 * T, 95 * GIB, 2765 * G, 600 * G),
    Device("TPU v6e", 918 * T, 32 * GIB, 1640 * G, 400 * G),
    Device("H100", 989 * T, 80 * G, 3350 * G, 450 * G),
    Device("H200", 989 * T, 141 * G, 4800 * G, 450 * G),
)}


def floors(device, flops, moved, received):
    """Seconds that one device needs at least to multiply, to use its memory, and to be sent things.

    flops: of one device. moved: bytes it reads from and writes to its memory. received: bytes that
    come in over its links. Returns a dict with `compute`, `memory`, `interconnect`.
    """
    return {"compute": flops / device.flops, "memory": moved / device.bandwidth,
            "interconnect": received / device.link}


def received(traffic, mesh_shape):
    """Bytes that must come in over one device's links for these collectives, at least.

    traffic: a Traffic, as `collectives` counts: {(kind, axes): Moved}. mesh_shape: {axis: size}.
    An all-reduce of n bytes over k devices cannot do with less than 2 n (k - 1) / k, an
    all-gather of n bytes (its result) with less than n (k - 1) / k, a reduce-scatter, which
    counts the piece that stays, with less than n (k - 1). Raises KeyError for another kind.

    Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations".
    """
    share = {"all-reduce": lambda k: 2 * (k - 1) / k, "all-gather": lambda k: (k - 1) / k,
             "all-to-all": lambda k: (k - 1) / k, "reduce-scatter": lambda k: k - 1,
             "collective-permute": lambda k: 1}
    total = 0
    for (kind, axes), each in traffic.items():
        ways = 1
        for axis in axes:
            ways *= mesh_shape[axis]
        total += share[kind](ways) * each.bytes
    return total
