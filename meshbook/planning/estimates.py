"""What a training step with Adam asks of each device, before anything is compiled.

The sums of `meshbook.planning.costs` for one choice of model, sizes, mesh, row of the sharding
table, batch and device. The calculator on the site is the same in JavaScript; a test compares the
two.
"""
from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

from meshbook.hlo.collectives import Moved, Traffic
from meshbook.planning import costs
from meshbook.planning.devices import floors

ROWS = ("data_parallel", "tensor_parallel", "fully_sharded")


class Estimate(NamedTuple):
    """A step by formula. Bytes and FLOPs are those of one device, floors are seconds.

    memory: bytes by what they are, on a TPU. peak: the most that is held at once. useful: FLOPs of
    the step that all devices must do together; factor: how often they are done. traffic: the
    collectives, as they are written, with result bytes and wire bytes. floors: those of
    `meshbook.planning.devices.floors`.
    """

    memory: dict
    peak: int
    useful: int
    factor: float
    flops: float
    traffic: Traffic
    floors: dict


def estimate(config, row, mesh, batch, device):
    """The Estimate of one training step in float32.

    config: ViTConfig or MiniGPTConfig; row: of `meshbook.sharding.Sharding`, by name; mesh:
    {"batch": ..., "model": ...}; batch: images or rows of text on all devices together; device: of
    `meshbook.planning.devices`. A MiniGPT has the chunked loss, and its gradients are clipped by
    their norm.
    Raises ValueError for a row that is not in the table, and where the mesh does not divide sizes.
    """
    if row not in ROWS:
        raise ValueError(f"expected a row of the sharding table, one of {ROWS}; found {row!r}")
    rows, across = mesh["batch"], mesh["model"]
    ways = 1 if row == "data_parallel" else across
    shards = rows if row == "fully_sharded" else 1
    _check(config, batch, rows, ways, shards)
    split = SimpleNamespace(shape={"batch": rows, "model": ways})
    of = _gpt if hasattr(config, "vocabulary") else _vit
    held, useful, factor, moved, gathered = of(config, split, batch, shards)
    factor *= across / ways  # what is not split along "model" is done by all of it
    flops = useful * factor / (rows * across)
    traffic = Traffic(moved, split.shape)
    wire = traffic.wire_total
    if shards > 1:
        traffic["all-gather", ("batch",)] = gathered
        wire = _least(traffic, held["gathered"], rows).wire_total
    least = floors(device, flops, costs.step_memory_traffic(held), wire)
    return Estimate(held, costs.step_peak(held), useful, factor, flops, traffic, least)


def _least(traffic, gathered, rows):
    """What a compiler can make of a fully sharded step: bfloat16 gathered, gradients in pieces."""
    kept = {key: each for key, each in traffic.items() if key[1] != ("batch",)}
    return Traffic(kept | {("all-gather", ("batch",)): Moved(1, gathered),
                           ("reduce-scatter", ("batch",)): Moved(1, 2 * gathered / rows)},
                   traffic.sizes)


def _vit(config, mesh, images, shards):
    rows, ways = mesh.shape.values()
    return (costs.vit_step_memory(config, images // rows, ways, shards),
            *costs.vit_step_flops(config, images, ways),
            costs.vit_step_traffic(config, mesh, images),
            Moved(10 * config.layers + 7, costs.step_gathers(costs.vit_parameters, config, mesh)))


def _gpt(config, mesh, batch, shards):
    rows, ways = mesh.shape.values()
    return (costs.gpt_step_memory(config, batch // rows, ways, shards),
            *costs.gpt_step_flops(config, batch),
            costs.gpt_step_traffic(config, mesh, batch, sharded=shards > 1),
            Moved(10 * config.layers + 3, costs.step_gathers(costs.gpt_parameters, config, mesh)))


def _check(config, batch, rows, ways, shards):
    """ValueError where a size does not divide over its mesh axis."""
    sizes = [("batch", batch, rows, "batch"), ("heads", config.heads, ways, "model"),
             ("hidden", config.hidden, ways, "model"), ("embed", config.embed, shards, "batch")]
    if hasattr(config, "vocabulary"):
        sizes.append(("padded vocabulary", config.padded, ways, "model"))
    for name, size, parts, axis in sizes:
        if size % parts:
            raise ValueError(f"{name}={size} does not divide over mesh axis {axis!r} of size "
                             f"{parts}: {size} = {parts}·{size // parts} + {size % parts}")
