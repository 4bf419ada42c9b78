"""How long a plan's step takes and what it holds, by formula: `mesh_costs` on one TPU.

A chip runs one operation after the other, so a step's parts are added: products, by the FLOPs that
the matrix units spend; every other array, by the bytes that go to memory and back; random numbers
of dropout, by the vector units; and collectives, by the links of their axes, which nothing hides.
What stands in a pipeline's turns is multiplied by the turns, those for nothing among them.
"""
from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from meshbook.costs.devices import Device
from meshbook.hlo.clock import LANES
from meshbook.hlo.wire import wire_seconds
from meshbook.models.decoder import DecoderConfig
from meshbook.models.losses import CHUNK
from meshbook.planning.costs import tiled
from meshbook.planning.decoder_costs import AGAIN, AGAIN_BY_ROW, layer_products
from meshbook.planning.decoder_memory import waiting_bytes
from meshbook.planning.expert_costs import slots_in_row
from meshbook.planning.mesh_costs import own_parameters, plan_traffic
from meshbook.planning.pipeline_costs import turns_of

SIDE = 128  # of a matrix unit: a product with a smaller side takes as long as with this one
DRAWN = 32  # steps of a vector unit for an element: 20 rounds of Threefry for four, and a test


class Work(NamedTuple):
    """FLOPs of one device: `useful`, its share of what must be done; `done`, what it executes;
    `spent`, what its matrix units could do in that time.
    """

    useful: float
    done: float
    spent: float


def kinds_of(config: DecoderConfig):
    """[(how many layers, whether they have positions, whether they have experts)]."""
    periods, has = config.layers // config.period, config.experts is not None
    if config.period == 1:
        return [(periods, True, has)]
    return [(periods * (config.period - 1), True, False), (periods, False, has)]


def products_of(config: DecoderConfig, has_positions: bool, has_experts: bool, ways: int,
                slots: float):
    """{what: FLOPs} of a layer's products forward, for a token, by all devices along "model".

    slots: of experts for a token. See `decoder_costs.layer_products`.
    """
    each, e = layer_products(config, has_positions, ways), config.experts
    if has_experts:
        mlp = 2 * (2 + config.gated) * config.embed
        del each["DF"]
        each |= {"DC": 2 * config.embed * e.count * ways, "experts": mlp * config.hidden * slots,
                 "DM": (1 + config.gated) * 2 * config.embed * e.shared,
                 "FD": 2 * config.embed * e.shared}
    return each


def passes_of(plan: Any):
    """How often a layer goes (forward, through what remat does again, backward) for a microbatch.

    A device of a pipeline works in every turn of GPipe, also on nothing, and of the others in the
    longest of what some device does.
    """
    p, m = plan.stage, plan.microbatches
    if p == 1:
        return 1.0, 1.0, 1.0
    turns = turns_of(plan.schedule, p, m).permutes / 2 / m
    if plan.schedule == "lockstep":  # forward in m + p - 1 of its turns, and back in as many
        each = (m + p - 1) / m
        return 2 * each, each, each
    return (turns / 3,) * 3 if plan.schedule == "zero_bubble" else (turns,) * 3  # F, B or W


def slots_of(plan: Any):
    """Slots of ZB-H1's table for a microbatch, 0 for other schedules.

    All devices meet at the end of a slot, so that it lasts as long as the longest of F, B and W. As
    products these are equal. Of memory and random numbers F has most.
    """
    if plan.stage == 1 or plan.schedule != "zero_bubble":
        return 0
    return turns_of(plan.schedule, plan.stage, plan.microbatches).permutes / 2 / plan.microbatches


def plan_work(config: DecoderConfig, plan: Any, rows: int):
    """The Work of a step with so many rows."""
    useful = done = spent = 0
    forward, redone, backward = passes_of(plan)
    e = config.experts
    choices, slots = (e.active, slots_in_row(config) / config.tokens) if e else (0, 0)
    narrow = max(1, SIDE / config.head_size)

    def again(products, policy):  # experts' products are of several matrices at a time: never kept
        more = products.get("experts", 0) if policy == "products" else 0
        return more + (AGAIN_BY_ROW if config.by_row else AGAIN)[policy](products)

    for count, has_positions, has_experts in kinds_of(config):
        useful += 3 * count * sum(
            products_of(config, has_positions, has_experts, 1, choices).values())
        each = products_of(config, has_positions, has_experts, plan.model, slots)
        wide = each | {name: narrow * each[name] for name in ("scores", "values")}
        total = lambda products: count * (sum(products.values()) * (forward + 2 * backward)
                                          + redone * again(products, plan.remat))
        done += total(each)
        spent += total(wide)
    head, tokens = 3 * 2 * config.embed, rows * config.tokens / math.prod(plan.sizes.values())
    return Work(tokens * (useful + head * config.vocabulary),
                tokens * (done + head * config.padded), tokens * (spent + head * config.padded))


@functools.cache
def layer_bytes(config: DecoderConfig, ways: int, rows: int, policy: str):
    """[(how many layers of a kind, bytes that wait in one of them)], of a device's rows.

    ways: devices along "model"; policy: of rematerialisation, see `waiting_bytes`.
    """
    dense, found = replace(config, experts=None), []
    for count, has_positions, has_experts in kinds_of(config):
        own = waiting_bytes(dense, rows, ways, has_positions, policy, tpu=True)
        if has_experts and policy == "none":
            own += experts_bytes(config, ways, rows)
        found.append((count, own))
    return found


def experts_bytes(config: DecoderConfig, ways: int, rows: int):
    """Bytes of what experts keep of so many rows, less those of the MLP in whose place they are."""
    number, slots = np.dtype(config.dtype).itemsize, rows * slots_in_row(config)
    F, M, tokens = config.hidden // ways, config.experts.shared // ways, rows * config.tokens
    shared = 6 * tiled(tokens, M) if M else 0
    return number * (2 * tiled(slots, config.embed) + (1 + config.gated) * tiled(slots, F)
                     + shared - 6 * tiled(tokens, F))


def plan_memory(config: DecoderConfig, plan: Any, rows: int):
    """{what: bytes} that one device holds in a step with Adam.

    Weights that are gathered, or copied to the products' dtype, once for all microbatches, stand
    beside the stored ones, and the sums of the gradients beside both. In a loop over microbatches
    or turns there are the gradients of one, too. What goes into the stages of a pipeline and comes
    out of them is there of all microbatches. Where a scan goes back, the products for gradients
    of weights are put off to the end of its period: there are the arrays of the largest layer, and
    of all others their hidden units and the gradients of these. The gradients of fully sharded
    layers are scattered in every microbatch, if there are no stages; that of the table comes whole.
    """
    number, m, p = np.dtype(config.dtype).itemsize, plan.microbatches, plan.stage
    b = rows // plan.batch // plan.expert // m
    stored, used = (own_parameters(config, plan, each) for each in (True, False))
    own = stored if plan.is_fully_sharded or plan.rules == "tensor_parallel" else (
        own_parameters(config, replace(plan, rules="fully_sharded")))
    kept = m + p - 1 if plan.schedule == "gpipe" and p > 1 else (
        turns_of(plan.schedule, p, m).kept if p > 1 else 1)
    kind = lambda policy: layer_bytes(config, plan.model, b, policy)
    waits = sum(count * each for count, each in kind(plan.remat)) / p
    if plan.schedule == "lockstep" and p > 1:  # of the others only what came into the stage
        waits = waits / kept + kind("all")[0][1]
    tokens, V, loops = b * config.tokens, config.padded // plan.model // p, m > 1 or p > 1
    hidden, table = tiled(tokens, config.hidden // plan.model), 4 * V * config.embed
    scattered = plan.is_fully_sharded and p == 1
    grads = stored if scattered or not loops else used
    return {"parameters": 4 * stored, "moments": 8 * own,
            "gradients": 4 * (2 if loops else 1) * grads,
            "gathered": number * used, "activations": int(kept * waits),
            "layer": max(each for _, each in kind("none")) + (table if scattered else 0)
            + 2 * number * hidden * (config.period - 1),
            "logits": number * tiled(min(tokens, CHUNK), V) + table,
            "inputs": 4 * 2 * tiled(m * b, config.tokens)
            + 2 * number * (p > 1) * tiled(m * tokens, config.embed)}


def plan_peak(held: dict):
    """The most bytes of `plan_memory` at once: logits are gone when a layer goes back."""
    always = sum(held.values()) - held["layer"] - held["logits"]
    return always + max(held["layer"], held["logits"])


def plan_moved(config: DecoderConfig, plan: Any, rows: int):
    """Bytes to and from the memory of one device in a step with Adam, by what they are.

    Every array that a layer makes is written once and read once; in the backward pass it is read
    again, and its gradient is written and read. Scores are arrays, too. Where layers are made
    again, the first pass moves only what products make or read; the rest is fused with them. What
    is kept goes into a stack of all layers and comes out of it; in a table of slots all that is
    kept passes through a conditional in every slot. Each microbatch reads the weights in every pass
    and adds to the gradients, which are float32.
    """
    number, m, p = np.dtype(config.dtype).itemsize, plan.microbatches, plan.stage
    b = rows // plan.batch // plan.expert // m
    forward, redone, backward = passes_of(plan)
    again, slots = redone * (plan.remat != "none"), slots_of(plan)
    passes, first = (2 * slots, 0) if slots else (2 * again + 3 * backward, 2 * forward)
    made = lambda policy: m / p * sum(count * each for count, each in layer_bytes(
        replace(config, by_row=False), plan.model, b, policy))
    used, stored = own_parameters(config, plan, False), own_parameters(config, plan)
    tokens, V = rows / plan.batch / plan.expert * config.tokens, config.padded / plan.model / p
    stacked = m * sum(count * each for count, each in layer_bytes(config, plan.model, b, plan.remat)
                      ) / p * forward
    if slots:
        stacked = m * slots * plan_memory(config, plan, rows)["activations"]
    begun = made("none" if plan.remat == "none" else "products")
    return {"activations": made("none") * passes + begun * first, "copies": 2 * stacked,
            "weights": m * number * used * (forward + again + backward),
            "gradients": 2 * 4 * used * m * backward, "update": 8 * 4 * stored,
            "logits": 4 * 4 * tokens * V}


def plan_drawn(config: DecoderConfig, plan: Any, rows: int):
    """Random numbers that one device draws for dropout: those of its own rows and layers."""
    forward, redone, _ = passes_of(plan)
    own = rows / (plan.batch * plan.expert)
    passes = slots_of(plan) or forward + redone * (plan.remat != "none")
    return bool(config.dropout) * passes * own * config.tokens * config.embed * 2 \
        * config.layers / plan.stage


def plan_seconds(config: DecoderConfig, plan: Any, rows: int, device: Device, place: dict):
    """{what: seconds} of a step: "products", "memory", "random", and one for each axis of the wire.

    place: {axis: (sizes along the dimensions of the torus, chips that share a link)}, see
    `meshbook.costs.places`.
    """
    found = {"products": plan_work(config, plan, rows).spent / device.flops,
             "memory": sum(plan_moved(config, plan, rows).values()) / device.bandwidth,
             "random": plan_drawn(config, plan, rows) * DRAWN / LANES / device.clock}
    traffic = plan_traffic(config, plan, rows, np.dtype(config.dtype).itemsize)
    for (kind, axes), moved in traffic.items():
        sizes = [size for axis in axes for size in place[axis][0]]
        shared = max(place[axis][1] for axis in axes)
        seconds = shared * wire_seconds(kind, sizes, (0, moved.bytes), device, ring=False)
        found[axes[0]] = found.get(axes[0], 0) + seconds
    return found
