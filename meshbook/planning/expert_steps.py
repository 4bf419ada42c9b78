"""What a step of a decoder with experts holds and sends, by formula, with experts over an axis.

Each of n devices along the axis has E/n experts of every layer that has any, and all of the other
weights; rows of the batch are split over this axis, too. See `meshbook.parallel.experts`.
"""
from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshbook.hlo.collectives import Moved
from meshbook.models.decoder import DecoderConfig
from meshbook.planning.costs import tiled
from meshbook.planning.decoder_costs import numbers
from meshbook.planning.decoder_memory import decoder_step_memory
from meshbook.planning.expert_costs import (
    expert_decoder_parameters, expert_layer_parameters, mlp_parameters, slots_in_row,
    without_experts
)


def check_experts(config: DecoderConfig, rows: int, across: int, ways: int):
    """ValueError where experts or rows do not divide, and without a capacity."""
    if not config.experts.capacity:
        raise ValueError("expected a capacity above 0: what dropless experts do depends on tokens")
    sizes = ("experts", config.experts.count, ways), ("batch", rows, across * ways)
    for name, size, parts in sizes:
        if size % parts:
            raise ValueError(f"{name}={size} does not divide over {parts} devices")


def expert_step_traffic(config: DecoderConfig, mesh: Mapping[str, int], rows: int):
    """What a step exchanges: {(kind, axes): Moved(count, result bytes)}, with 4 bytes a number.

    mesh: {axis: size} of the axes for the batch and for the experts, in this order; rows: B, of T
    tokens each. Slots travel by all-to-all, two in the forward pass of each layer with experts, two
    in the backward pass, and two more where the forward pass is done again. Gradients of experts
    are summed along the batch, all others over all devices, that of the table twice, with loss and
    accuracy. Raises ValueError as `check_experts` does.
    """
    (data, expert), (across, ways) = mesh, mesh.values()
    check_experts(config, rows, across, ways)
    periods, moved = config.layers // config.period, {}
    own = periods * expert_layer_parameters(config, 1, ways)["experts"]
    if ways > 1:
        count = periods * (4 if config.remat == "none" else 6)
        slots = rows // across // ways * slots_in_row(config)
        moved["all-to-all", (expert,)] = Moved(count, count * 4 * slots * config.embed)
    others = expert_decoder_parameters(config, 1, ways) - own + numbers(config, [(1, "VD")]) + 2
    axes = tuple(axis for axis, size in mesh.items() if size > 1)
    sums = {axes: 4 * others} if axes else {}
    if across > 1:
        sums[data,] = sums.get((data,), 0) + 4 * own
    return moved | {("all-reduce", axes): Moved(None, size) for axes, size in sums.items()}


def slots_waiting(config: DecoderConfig, batch: int, tpu: bool = True):
    """Bytes that experts of one layer keep on a device with so many rows, less those of the MLP.

    Of its slots what came in, hidden units, and what came out; of the MLP six arrays of hidden
    units. The shared expert has as many of its own.
    """
    number = np.dtype(config.dtype).itemsize if tpu else 4
    size = tiled if tpu else lambda *shape: int(np.prod(shape))
    slots, tokens, F = batch * slots_in_row(config), batch * config.tokens, config.hidden
    kept = 2 * size(slots, config.embed) + (1 + config.gated) * size(slots, F)
    shared = 6 * size(tokens, config.experts.shared) if config.experts.shared else 0
    return number * (kept + shared - 6 * size(tokens, F))


def expert_step_memory(config: DecoderConfig, batch: int, ways: int, tpu: bool = True):
    """Bytes that one device holds in a step with Adam, by what they are: `decoder_step_memory`.

    batch: rows of text of this device; ways: devices along the axis of the experts.
    """
    held = decoder_step_memory(without_experts(config), batch, preset="data_parallel", tpu=tpu)
    each, periods = expert_decoder_parameters(config, 1, ways), config.layers // config.period
    more = slots_waiting(config, batch, tpu)
    held |= {"parameters": 4 * each, "moments": 8 * each, "gradients": 4 * each,
             "layer": held["layer"] + more}
    if config.remat == "none":
        number = np.dtype(config.dtype).itemsize if tpu else 4
        layer = sum(expert_layer_parameters(config, 1, ways).values())
        held["gathered"] += number * periods * (layer - mlp_parameters(config, config.hidden))
        held["activations"] += periods * more
    return held
