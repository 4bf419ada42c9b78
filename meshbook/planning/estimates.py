"""What a training step with Adam asks of each device, before anything is compiled.

The sums of `meshbook.planning.costs` for one choice of model, sizes, mesh, preset of the sharding
rules, batch and device. The calculator on the site is the same in JavaScript; a test compares the
two. `zero_state` is of any model, by the number of its parameters.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import NamedTuple

from meshbook.costs.devices import Device, floors
from meshbook.hlo.collectives import Moved, Traffic
from meshbook.models.decoder import DecoderConfig
from meshbook.models.minigpt import MiniGPTConfig
from meshbook.models.vit import ViTConfig
from meshbook.planning import costs, decoder_costs, decoder_memory
from meshbook.planning.memory_timeline import KINDS, Moment, highest, memory_timeline

PRESETS = ("data_parallel", "tensor_parallel", "fully_sharded")  # of every model


class Estimate(NamedTuple):
    """A step by formula. Bytes and FLOPs are those of one device, floors are seconds.

    memory: bytes by what they are, on a TPU, each where it is most. timeline: what is held from
    moment to moment, `meshbook.planning.memory_timeline`; peak: the most that is held at once.
    useful: FLOPs of the step that all devices must do together; factor: how often they are done.
    traffic: the collectives, as they are written, with result bytes and wire bytes. floors: those
    of `meshbook.costs.devices.floors`.
    """

    memory: dict
    timeline: list[Moment]
    peak: int
    useful: int
    factor: float
    flops: float
    traffic: Traffic
    floors: dict


class Ranked(NamedTuple):
    """The best preset of a mesh: mesh {axis: size}, preset, Estimate; whether a device has room.

    seconds: the sum of the floors, a lower bound of a step in which nothing overlaps. Bounds of
    different programs need not be in the order of these programs' times.
    """

    mesh: dict
    preset: str
    estimate: Estimate
    fits: bool
    seconds: float


def ranked_meshes(
    config: ViTConfig | MiniGPTConfig | DecoderConfig, devices: int, batch: int, device: Device,
    checkpointed: bool = False,
):
    """All meshes of two axes of so many devices: ([Ranked], {(batch, model): why not}).

    Those that fit come first, and of them those of the fewest seconds, which is an order of lower
    bounds, not of times: memory and traffic of a preset are not always those of one program. With
    fully sharded weights, one layer is counted as gathered, and the links carry one gather of each,
    whether or not the preset gathers again. Arguments as of `estimate`.
    """
    found, refused = [], {}
    for across in (size for size in range(1, devices + 1) if devices % size == 0):
        mesh, reasons = {"batch": devices // across, "model": across}, []
        each = list(_by_preset(config, mesh, batch, device, checkpointed, reasons))
        if each:
            found.append(min(each, key=_order))
        else:
            refused[tuple(mesh.values())] = reasons[0]
    return sorted(found, key=_order), refused


def _order(ranked):
    return not ranked.fits, ranked.seconds


def _by_preset(config, mesh, batch, device, checkpointed, reasons):
    """The Ranked of every preset that can be; why others cannot is added to `reasons`."""
    for preset in decoder_costs.PRESETS if isinstance(config, DecoderConfig) else PRESETS:
        try:
            found = estimate(config, preset, mesh, batch, device, checkpointed)
        except ValueError as error:
            reasons.append(str(error))
            continue
        yield Ranked(mesh, preset, found, found.peak <= device.memory, sum(found.floors.values()))


def estimate(
    config: ViTConfig | MiniGPTConfig | DecoderConfig, preset: str, mesh: Mapping[str, int],
    batch: int, device: Device, checkpointed: bool = False,
):
    """The Estimate of one training step.

    config: of the ViT, of MiniGPT or of the decoder; preset: of PRESETS or, for a decoder, of
    `meshbook.planning.decoder_costs.PRESETS`; mesh: {axis: size} of the axes for the batch and for
    the model, in this order; batch: images or rows of text on all devices together; device: of
    `meshbook.costs.devices`. Text models have the chunked loss, and their gradients are clipped
    by their norm. checkpointed: each block of a ViT or MiniGPT keeps only its input for the
    backward pass. Memory is counted so; the work of the second forward pass of the blocks, at most
    a third of the step's, and what it sends depend on the compiler and are not counted, so that the
    floors still are floors. Of a decoder, whose config says what is kept, both are counted.
    Memory is counted in a TPU's tiles, on any device, and without fused attention: scores that are
    kept are written. Attention counts for all pairs of tokens: a program that skips those that a
    causal mask hides can take less than the floor of compute. All links of a GPU lead to all others
    here, as within a node.
    Raises ValueError for an unknown preset, and where the mesh does not divide sizes.
    """
    is_decoder = isinstance(config, DecoderConfig)
    presets = tuple(decoder_costs.PRESETS) if is_decoder else PRESETS
    if preset not in presets:
        raise ValueError(f"expected a preset of the sharding rules, one of {presets}; "
                         f"found {preset!r}")
    if is_decoder:
        if checkpointed:
            raise ValueError("expected checkpointed=False: a decoder's config says what is kept, "
                             f"here remat={config.remat!r}")
        return _decoder(config, preset, mesh, batch, device)
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


def _decoder(config, preset, mesh, batch, device):
    """The Estimate of a decoder's step: its formulas know all presets and what is recomputed."""
    axes, (rows, across) = tuple(mesh), mesh.values()
    ways, own = 1 if preset == "data_parallel" else across, batch // rows
    split = preset == "sequence_parallel"
    divided = preset.startswith("fully_sharded") or preset in decoder_costs.BY_HAND
    _check(config, batch, axes, rows, ways, rows if divided else 1, split)
    held = decoder_memory.decoder_step_memory(config, own, ways, rows, preset)
    timeline = decoder_memory.decoder_timeline(config, held)
    useful, factor = decoder_costs.decoder_step_flops(config, batch, across, preset)
    flops = useful * factor / (rows * across)
    sizes = SimpleNamespace(shape=dict(zip(axes, (rows, across))))
    traffic = Traffic(decoder_costs.decoder_step_traffic(
        config, sizes, batch, preset, clipped=True, axes=axes), sizes.shape)
    wire = traffic.wire_total
    if preset.startswith("fully_sharded") and rows > 1:
        wire = _least(traffic, 2 * decoder_costs.with_D(config, ways), axes[:1], rows).wire_total
    through = costs.step_memory_traffic(held)
    memory = {kind: max(moment.held[kind] for moment in timeline) for kind in KINDS}
    return Estimate(memory, timeline, highest(timeline).total, useful, factor, flops, traffic,
                    floors(device, flops, through, wire))


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


def _check(config, batch, axes, rows, ways, shards, split=False):
    """ValueError where a size does not divide over its mesh axis."""
    data, model = axes
    sizes = [("batch", batch, rows, data), ("heads", config.heads, ways, model),
             ("hidden", config.hidden, ways, model), ("embed", config.embed, shards, data)]
    if hasattr(config, "vocabulary"):
        sizes.append(("padded vocabulary", config.padded, ways, model))
    if getattr(config, "groups", 0):
        sizes.append(("groups", config.groups, ways, model))
    if split:
        sizes.append(("tokens", config.tokens, ways, model))
    for name, size, parts, axis in sizes:
        if size % parts:
            raise ValueError(f"{name}={size} does not divide over mesh axis {axis!r} of size "
                             f"{parts}: {size} = {parts}·{size // parts} + {size % parts}")
