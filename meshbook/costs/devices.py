"""Accelerators by their data sheets, and the times that no program can beat on them.

A device is what JAX lists as one: a chip, or on TPU v2, v3 and TPU7x (Ironwood) one of a chip's two
cores, with half of the chip's memory and arithmetic. On v4 and v5p, JAX lists the two cores of a
chip as one device.

Memory is in GiB for all. Data sheets write GB and mean 2^30 bytes: a TPU's compiler gives programs
7.48 GiB of the "8 GB" of a core of a v2, and `nvidia-smi` shows 81,559 MiB for an H100 with "80 GB"
and 143,771 MiB for an H200 with "141 GB", all more than so many times 10^9 bytes. Rates are
decimal, and without sparsity.
"""
from __future__ import annotations

from dataclasses import dataclass

GIB, T, G = 2**30, 1e12, 1e9
CLOUD = "https://docs.cloud.google.com/tpu/docs/"
JOUPPI = "Jouppi et al. 2020, doi:10.1145/3360307"
NVIDIA = "https://www.nvidia.com/en-us/data-center/"
DGX = "https://docs.nvidia.com/dgx/dgx"
HOP = 1e-6  # seconds, about: Austin et al. 2025, https://jax-ml.github.io/scaling-book/sharding/


@dataclass(frozen=True)
class Device:
    """One device: bfloat16 FLOP/s, bytes of memory, bytes/s to it, its links, and the source.

    links: how many it has; link: bytes/s over one of them in one direction, the other being free at
    the same time. The links of a TPU lead to neighbours on a torus, two for each dimension;
    `switch`: those of a GPU lead to a switch, and all of them to anybody. hop: seconds from one
    chip to the next, at least; 0 where no source says. clock: cycles a second of a TPU's core, 0
    where not known: at this rate its matrix units (n² multiplications and additions a cycle: one of
    n = 128 on v2, two on v3, eight on v4 and v5p, four on v5e; four of n = 256 on v6e and TPU7x)
    make `flops`.
    Two cores that share a chip's links can each use them all while the other is silent; so `links`
    are the chip's.
    node: GPUs that a switch joins; network: bytes/s in one direction of one device's part of the
    network between nodes, or between slices of TPUs, 0 where no source says; adds: whether a switch
    adds up the numbers of all-reduces; ring: a dimension of a slice has its ends linked where
    it has a multiple of so many chips.
    """

    name: str
    flops: float
    memory: int | float
    bandwidth: float
    links: int
    link: float
    source: str
    switch: bool = False
    hop: float = HOP
    clock: float = 0.0
    node: int = 0
    network: float = 0.0
    adds: bool = False
    ring: int = 0

    @property
    def tiles(self):
        """Whether its arrays take whole tiles (`meshbook.costs.tiles`)."""
        return not self.switch

    @property
    def interconnect(self):
        """Bytes/s that all its links together carry in one direction."""
        return self.links * self.link


def _core(name, flops, memory, bandwidth, links, link, source, clock=0.0):
    """A core of a chip that has two."""
    return Device(name, flops / 2, memory / 2, bandwidth / 2, links, link, source, clock=clock)


def _gpu(name, flops, memory, bandwidth, links, link, source, network, adds=True):
    return Device(name, flops, memory, bandwidth, links, link, source, switch=True, hop=0.0,
                  node=8, network=network, adds=adds)


DEVICES = {each.name: each for each in (
    _core("TPU v2", 46 * T, 16 * GIB, 700 * G, 4, 496 / 8 * G,
          f"{JOUPPI}; memory bandwidth: Norrie et al. 2021, doi:10.1109/MM.2021.3058217",
          clock=0.7 * G),
    _core("TPU v3", 123 * T, 32 * GIB, 900 * G, 4, 656 / 8 * G, f"{CLOUD}v3; links: {JOUPPI}",
          clock=0.94 * G),
    Device("TPU v4", 275 * T, 32 * GIB, 1200 * G, 6, 50 * G,
           f"{CLOUD}v4; links: Jouppi et al. 2023, doi:10.1145/3579371.3589350", clock=1.05 * G,
           ring=4),
    # Network: of 6.4 and 25.6 Tbit/s for a pod of 256 chips, and 50 Gbit/s for a chip of v5p. Of
    # these four, Google gives the bandwidth of all ports in both directions: 400, 1200, 800 and
    # 1200 GB/s; one of them has a 2·links-th of it in one direction.
    Device("TPU v5e", 197 * T, 16 * GIB, 819 * G, 4, 50 * G, f"{CLOUD}v5e; network: {CLOUD}v6e",
           clock=1.5 * G, network=3.125 * G, ring=16),
    Device("TPU v5p", 459 * T, 95 * GIB, 2765 * G, 6, 100 * G, f"{CLOUD}v5p", clock=1.75 * G,
           network=6.25 * G, ring=4),
    Device("TPU v6e", 918 * T, 32 * GIB, 1638 * G, 4, 100 * G,
           f"{CLOUD}v6e; memory bandwidth: {CLOUD}tpu7x", clock=1.75 * G, network=12.5 * G,
           ring=16),
    _core("TPU7x", 2307 * T, 192 * GIB, 7380 * G, 6, 100 * G, f"{CLOUD}tpu7x", clock=2.2 * G),
    # Network: one adapter for each GPU of a DGX, of 200 Gbit/s beside an A100, then of 400.
    _gpu("A100", 312 * T, 80 * GIB, 2039 * G, 12, 25 * G,
         f"{NVIDIA}a100/ (SXM, 80 GB); network: {DGX}a100-user-guide/", 25 * G, adds=False),
    _gpu("H100", 989 * T, 80 * GIB, 3350 * G, 18, 25 * G,
         f"{NVIDIA}h100/ (SXM); network: {DGX}h100-user-guide/", 50 * G),
    _gpu("H200", 989 * T, 141 * GIB, 4800 * G, 18, 25 * G,
         f"{NVIDIA}h200/ (SXM); network: {DGX}h100-user-guide/", 50 * G),
    # An eighth of a DGX B200: of 1,440 GB, of 64 TB/s, of 72 PFLOP/s in sparse FP8 (a quarter of
    # which is bfloat16 without sparsity), of 14.4 TB/s of NVLink in both directions.
    _gpu("B200", 2250 * T, 180 * GIB, 8000 * G, 18, 50 * G,
         f"{NVIDIA}dgx-b200/; network: {DGX}b200-user-guide/", 50 * G),
)}


def floors(device: Device, flops: int | float, moved: int | float, wire: int | float):
    """Seconds that one device needs at least to multiply, to use its memory, and to use its links.

    flops: of one device. moved: bytes it reads from and writes to its memory. wire: bytes that it
    sends over its links, a Traffic's `wire_total`; all links are taken to be busy at once, which a
    single collective along one mesh axis cannot do on a torus (`Traffic.seconds`).
    Returns a dict with `compute`, `memory`, `interconnect`.
    """
    return {"compute": flops / device.flops, "memory": moved / device.bandwidth,
            "interconnect": wire / device.interconnect}


def tokens_to_hide(device: Device, heads: int, groups: int, width: int = 2):
    """Tokens of each device whose products take as long as a zigzag ring's next keys and values.

    Forward, with numbers of so many bytes: 2·H·K·t² FLOPs against 2·width·t·G·K bytes in one
    direction of a link.
    """
    return width * device.flops / device.link * groups / heads
