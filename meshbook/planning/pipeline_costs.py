"""What a decoder's step costs, by formula, where layers are stages of a pipeline in one program.

Each of p devices along an axis has L/p layers, and a part of the vocabulary: see
`meshbook.models.pipelined`. A batch goes through in m microbatches, of b rows on a device. Every
turn of the program's loop ends with a permute of 4·b·T·D bytes to the next device, or with one to
each neighbour. What is counted as memory is what a schedule has to keep; a program keeps more.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from meshbook.hlo.collectives import Moved
from meshbook.models.decoder import DecoderConfig
from meshbook.planning.decoder_costs import ends, layer_parameters, layers_of, numbers
from meshbook.planning.decoder_memory import decoder_step_memory, waiting_bytes

SCHEDULES = ("gpipe", "lockstep", "one_f_one_b", "zero_bubble")


class Turns(NamedTuple):
    """A schedule in one program.

    permutes: on each device, of one activation or its gradient; bubble: the share of the time in
    which a device has nothing to do; kept: microbatches of which the first one keeps something;
    factor: how often the useful work is executed.
    """

    permutes: int
    bubble: float
    kept: int
    factor: float


def turns_of(schedule: str, stages: int, microbatches: int):
    """The Turns of a schedule, of p stages and m microbatches.

    gpipe: a loop of m + p - 1 turns, and one back; a device works in every turn, on nothing in
    p - 1. lockstep: m + 2(p - 1) turns, of a forward and a backward pass, the forward pass once
    more before the latter. No device goes back in the first p - 1 turns, and none forward in the
    last: together 4(m + p - 1) units of time, of which a device works 4m. The others are tables of
    slots, one for each of F, B and W: 1F1B takes 3m + 2(p - 1), ZB-H1 3m + p - 1 where m is p or
    more. Raises ValueError for another schedule.
    """
    p, m = stages, microbatches
    if schedule not in SCHEDULES:
        raise ValueError(f"expected a schedule, one of {', '.join(SCHEDULES)}; found {schedule!r}")
    if schedule == "gpipe":
        turns = m + p - 1
        return Turns(2 * turns, (p - 1) / turns, turns, turns / m)
    if schedule == "lockstep":
        turns = m + 2 * (p - 1)
        return Turns(2 * turns, (p - 1) / (m + p - 1), 2 * p - 1, 4 / 3)
    slots = 3 * m + 2 * (p - 1) if schedule == "one_f_one_b" else max(3 * m + p - 1,
                                                                      2 * (m + p) - 1)
    return Turns(2 * slots, 1 - 3 * m / slots, min(m, p), 1.0)


def check_stages(config: DecoderConfig, rows: int, across: int, stages: int, microbatches: int):
    """ValueError where layers, rows or the vocabulary do not divide, and if layers are made again.

    The stages keep what their schedule says, whatever a policy of rematerialisation would.
    """
    if config.remat != "none":
        raise ValueError(f"stages keep what their schedule needs: expected remat='none', found "
                         f"{config.remat!r}")
    for name, size, parts, what in (
            ("periods of layers", config.layers // config.period, stages, "stages"),
            ("padded vocabulary", config.padded, stages, "stages"),
            ("batch", rows, across * microbatches, "devices times microbatches")):
        if size % parts:
            raise ValueError(f"{name}={size} does not divide over {parts} {what}")


def stage_parameters(config: DecoderConfig, stages: int):
    """How many parameters one of the devices holds: its layers, its part of the table, the norm."""
    layers = sum(count * layer_parameters(config, has_positions)
                 for count, has_positions in layers_of(config))
    return layers // stages + numbers(config, ends(config), stages)


def pipeline_step_traffic(config: DecoderConfig, mesh: Mapping[str, int], rows: int,
                          schedule: str, microbatches: int):
    """What a step exchanges: {(kind, axes): Moved(count, result bytes)}, with 4 bytes a number.

    mesh: {axis: size} of the axes for the batch and for the stages, in this order; rows: B, of T
    tokens each. Along the stages permutes, and for each microbatch four sums of an activation's
    size: its embeddings, what the last stage found, the gradient of that, and the first stage's.
    Besides, three numbers a token for the loss, and once the gradient of the last norm. Along the
    batch, the gradients of a device's parameters, once. Raises ValueError as `check_stages` does.
    """
    (data, stage), (across, p) = mesh, mesh.values()
    check_stages(config, rows, across, p, microbatches)
    tokens = rows // across // microbatches * config.tokens
    size, moved = 4 * tokens * config.embed, {}
    if p > 1:
        permutes = turns_of(schedule, p, microbatches).permutes
        moved["collective-permute", (stage,)] = Moved(permutes, permutes * size)
        sums = microbatches * (4 * size + 3 * 4 * tokens)
        norm = 4 * numbers(config, [(1 + config.bias, "D")])
        moved["all-reduce", (stage,)] = Moved(None, sums + norm)
    if across > 1:
        moved["all-reduce", (data,)] = Moved(None, 4 * stage_parameters(config, p))
    axes = tuple(axis for axis, parts in mesh.items() if parts > 1)
    if axes:  # loss and accuracy
        before = moved.get(("all-reduce", axes), Moved(None, 0)).bytes
        moved["all-reduce", axes] = Moved(None, before + 2 * 4)
    return moved


def pipeline_step_memory(config: DecoderConfig, rows: int, stages: int, schedule: str,
                         microbatches: int, tpu: bool = True):
    """Bytes that the first of these devices has to hold in a step with Adam, by what they are.

    rows: of text on this device, of all microbatches. Keys as of `decoder_step_memory`. For each
    microbatch that is kept, activations wait in all layers of the stage; in lockstep only what came
    into it, and one microbatch at a time waits in all layers.
    """
    b, each = rows // microbatches, stage_parameters(config, stages)
    found = turns_of(schedule, stages, microbatches)
    held = decoder_step_memory(config, b, preset="data_parallel", tpu=tpu)
    whole = decoder_step_memory(config, rows, preset="data_parallel", tpu=tpu)
    kept = found.kept * held["activations"] // stages
    if schedule == "lockstep":
        inputs = waiting_bytes(config, b, policy="all", tpu=tpu)
        kept = found.kept * inputs + kept // found.kept
    table = held["logits"] - 4 * numbers(config, [(1, "VD")])
    return held | {
        "parameters": 4 * each, "moments": 8 * each, "gradients": 4 * each,
        "gathered": held["gathered"] // stages, "inputs": whole["inputs"], "activations": kept,
        "logits": table // stages + 4 * numbers(config, [(1, "VD")], stages)}
