"""What a training step with Adam asks of each device, before anything is compiled.

The sums of `meshbook.planning.costs` for one choice of model, sizes, mesh, preset of the sharding
rules, batch and device. The calculator on the site is the same in JavaScript; a test compares the
two.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import NamedTuple

from meshbook.hlo.collectives import Moved, Traffic
from meshbook.models.minigpt import MiniGPTConfig
from meshbook.models.vit import ViTConfig
from meshbook.planning import costs
from meshbook.planning.devices import Device, floors
from meshbook.planning.memory_timeline import Moment, highest, memory_timeline

PRESETS = ("data_parallel", "tensor_parallel", "fully_sharded")


class Estimate(NamedTuple):
    """A step by formula. Bytes and FLOPs are those of one device, floors are seconds.

    memory: bytes by what they are, on a TPU, each where it is most. timeline: what is held from
    moment to moment, `meshbook.planning.memory_timeline`; peak: the most that is held at once.
    useful: FLOPs of the step that all devices must do together; factor: how often they are done.
    traffic: the collectives, as they are written, with result bytes and wire bytes. floors: those
    of `meshbook.planning.devices.floors`.
    """

    memory: dict
    timeline: list[Moment]
    peak: int
    useful: int
    factor: float
    flops: float
    traffic: Traffic
    floors: dict


def estimate(
    config: ViTConfig | MiniGPTConfig, preset: str, mesh: Mapping[str, int], batch: int,
    device: Device, checkpointed: bool = False,
):
    """The Estimate of one training step in float32.

    config: ViTConfig or MiniGPTConfig; preset: of `meshbook.sharding.Sharding`, by name; mesh:
    {axis: size} of the axes for the batch and for the model, in this order; batch: images or rows
    of text on all devices together; device: of `meshbook.planning.devices`. A MiniGPT has the
    chunked loss, and its gradients are clipped by their norm. checkpointed: each block keeps only
    its input for the backward pass. Memory is counted so; the work of the second forward pass of
    the blocks, at most a third of the step's, and what it sends depend on the compiler and are not
    counted, so that the floors still are floors.
    Raises ValueError for an unknown preset, and where the mesh does not divide sizes.
    """
    if preset not in PRESETS:
        raise ValueError(f"expected a preset of the sharding rules, one of {PRESETS}; "
                         f"found {preset!r}")
    axes, (rows, across) = tuple(mesh), mesh.values()
    ways = 1 if preset == "data_parallel" else across
    shards = rows if preset == "fully_sharded" else 1
    _check(config, batch, axes, rows, ways, shards)
    split = SimpleNamespace(shape=dict(zip(axes, (rows, ways))))
    of = _gpt if hasattr(config, "vocabulary") else _vit
    held, useful, factor, moved, gathered = of(config, split, batch, shards)
    own = batch // rows
    timeline = memory_timeline(config, own, ways, shards, checkpointed)
    waiting = held["activations"]
    if checkpointed:
        held["activations"] = max(moment.held["activations"] for moment in timeline)
        waiting = config.layers * costs.block_inputs(config, own)
    factor *= across / ways  # what is not split along axes[1] is done by all of it
    flops = useful * factor / (rows * across)
    traffic = Traffic(moved, split.shape)
    wire = traffic.wire_total
    if shards > 1:
        traffic["all-gather", axes[:1]] = gathered
        wire = _least(traffic, held["gathered"], axes[:1], rows).wire_total
    through = costs.step_memory_traffic(held | {"activations": waiting})
    return Estimate(held, timeline, highest(timeline).total, useful, factor, flops, traffic,
                    floors(device, flops, through, wire))


def _least(traffic, gathered, along, rows):
    """What a compiler can make of a fully sharded step: bfloat16 gathered, gradients in pieces."""
    kept = {key: each for key, each in traffic.items() if key[1] != along}
    return Traffic(kept | {("all-gather", along): Moved(1, gathered),
                           ("reduce-scatter", along): Moved(1, 2 * gathered / rows)},
                   traffic.sizes)


def _vit(config, mesh, images, shards):
    rows, ways = mesh.shape.values()
    return (costs.vit_step_memory(config, images // rows, ways, shards),
            *costs.vit_step_flops(config, images, ways),
            costs.vit_step_traffic(config, mesh, images, tuple(mesh.shape)),
            Moved(10 * config.layers + 7, costs.step_gathers(
                costs.vit_parameters, config, mesh, tuple(mesh.shape))))


def _gpt(config, mesh, batch, shards):
    rows, ways = mesh.shape.values()
    return (costs.gpt_step_memory(config, batch // rows, ways, shards),
            *costs.gpt_step_flops(config, batch),
            costs.gpt_step_traffic(
                config, mesh, batch, sharded=shards > 1, axes=tuple(mesh.shape)),
            Moved(10 * config.layers + 3, costs.step_gathers(
                costs.gpt_parameters, config, mesh, tuple(mesh.shape))))


def _check(config, batch, axes, rows, ways, shards):
    """ValueError where a size does not divide over its mesh axis."""
    data, model = axes
    sizes = [("batch", batch, rows, data), ("heads", config.heads, ways, model),
             ("hidden", config.hidden, ways, model), ("embed", config.embed, shards, data)]
    if hasattr(config, "vocabulary"):
        sizes.append(("padded vocabulary", config.padded, ways, model))
    for name, size, parts, axis in sizes:
        if size % parts:
            raise ValueError(f"{name}={size} does not divide over mesh axis {axis!r} of size "
                             f"{parts}: {size} = {parts}·{size // parts} + {size % parts}")
