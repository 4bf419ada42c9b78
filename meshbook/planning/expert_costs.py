"""What experts in a decoder must cost, by formula: parameters, FLOPs, bytes of their all-to-alls.

A decoder with experts is the dense one of `decoder_costs`, whose last MLP of every period is
replaced by E experts of the same width, a router, and an expert that all tokens share.
"""
from __future__ import annotations

import math
from dataclasses import replace

import jax

from meshbook.hlo.collectives import Moved
from meshbook.models.decoder import DecoderConfig
from meshbook.parallel import routing
from meshbook.planning.decoder_costs import decoder_parameters, decoder_step_flops


def without_experts(config: DecoderConfig):
    """The dense decoder of the same sizes."""
    return replace(config, experts=None)


def mlp_parameters(config: DecoderConfig, hidden: int, ways: int = 1):
    """Parameters of an MLP with so many hidden units, of which one of `ways` devices has a part."""
    D, first, F = config.embed, 1 + config.gated, hidden // ways
    return (first + 1) * D * F + config.bias * (first * F + D)


def expert_layer_parameters(config: DecoderConfig, ways: int = 1, across: int = 1):
    """{what: parameters} on one device of one layer's "router", "experts" and "shared" expert.

    ways: devices along "model", which divide hidden units; across: along "expert".
    """
    e = config.experts
    router = config.embed * e.count + e.count * (config.bias + e.biased)
    return {"router": router,
            "experts": e.count // across * mlp_parameters(config, config.hidden, ways),
            "shared": mlp_parameters(config, e.shared, ways) if e.shared else 0}


def expert_decoder_parameters(config: DecoderConfig, ways: int = 1, across: int = 1,
                              active: bool = False):
    """How many parameters of a decoder with experts one device holds: see expert_layer_parameters.

    active: only those that one token uses, of its k experts.
    """
    each, e = expert_layer_parameters(config, ways, across), config.experts
    if active:
        each["experts"] = each["experts"] * e.active // e.count
    more = sum(each.values()) - mlp_parameters(config, config.hidden, ways)
    periods = config.layers // config.period
    return decoder_parameters(without_experts(config), ways) + periods * more


def slots_in_row(config: DecoderConfig):
    """How many slots all experts of a layer have together for a row, C of each, with a capacity."""
    e = config.experts
    return e.count * routing.capacity(e.capacity, config.tokens, e.active, e.count)


def mlp_flops(config: DecoderConfig, hidden: int):
    """FLOPs of an MLP's products in the forward pass, for one token."""
    return 2 * (2 + config.gated) * config.embed * hidden


def expert_layer_flops(config: DecoderConfig):
    """{what: useful FLOPs} of one layer's "router", "experts" and "shared", forward, of a token."""
    e = config.experts
    return {"router": 2 * config.embed * e.count,
            "experts": e.active * mlp_flops(config, config.hidden),
            "shared": mlp_flops(config, e.shared)}


def expert_step_flops(config: DecoderConfig, rows: int, ways: int = 1):
    """FLOPs of a training step, and how often they are done: see `decoder_step_flops`.

    With a capacity experts multiply all of their slots, also empty ones; each of `ways` devices
    along "model" has a router of its own. Raises ValueError for a dropless config, whose work
    depends on the tokens, and for one that computes layers again.
    """
    if not config.experts.capacity or config.remat != "none":
        raise ValueError("the work of experts is known where they have a capacity and nothing is "
                         f"computed again; found capacity={config.experts.capacity} and "
                         f"remat={config.remat!r}")
    useful, factor = decoder_step_flops(without_experts(config), rows, ways)
    done, each = useful * factor, expert_layer_flops(config)
    times = 3 * rows * config.tokens * (config.layers // config.period)
    dense = mlp_flops(config, config.hidden)
    padded = slots_in_row(config) / (config.tokens * config.experts.active)
    useful += times * (sum(each.values()) - dense)
    done += times * (ways * each["router"] + padded * each["experts"] + each["shared"] - dense)
    return useful, done / useful


def expert_all_to_alls(config: DecoderConfig, mesh: jax.sharding.Mesh, rows: int,
                       axis: str = "expert", number: int = 4):
    """The all-to-alls of a step along the axis of experts: Moved(count, result bytes).

    Two in the forward pass of each layer with experts and two in the backward pass, of all slots of
    a device's rows. rows: B of the whole batch, split over all axes but "model"; number: bytes of
    an activation, 4 on a CPU. None for a mesh of one device along the axis.
    """
    if mesh.shape[axis] == 1:
        return None
    split = math.prod(size for name, size in mesh.shape.items() if name != "model")
    one = number * rows // split * slots_in_row(config) * config.embed
    count = 4 * config.layers // config.period
    return Moved(count, count * one)


def balanced_step_traffic(config: DecoderConfig, mesh: jax.sharding.Mesh, rows: int):
    """What a step with balanced_loss exchanges: {(kind, axes): Moved(count or None, result bytes)}.

    mesh: of axes "batch", "expert" and "model", with the rows B over the first two, experts over
    the second, and tensor parallelism over the third. Along "batch" travel the gradients of
    experts; along the first two the others, that of the table twice, loss and accuracy, and of each
    layer with experts four numbers an expert, its loads and scores; along "model" six activations a
    layer and the gradients of gates, embeddings and hidden gradient, and three numbers a token.
    Raises ValueError for configs for which this was not derived.
    """
    if config.bias or config.latent or config.period > 1 or not config.experts.shared:
        raise ValueError("the traffic of experts is known without biases and latents, in layers of "
                         "one kind with a shared expert; found another config")
    batch, across, ways = (mesh.shape[axis] for axis in ("batch", "expert", "model"))
    e, D, L = config.experts, config.embed, config.layers
    experts = L * expert_layer_parameters(config, ways, across)["experts"]
    rest = expert_decoder_parameters(config, ways, across) - experts
    table = config.padded * D // ways
    moved = {("all-to-all", ("expert",)): expert_all_to_alls(config, mesh, rows)}
    if batch > 1:
        moved["all-reduce", ("batch",)] = Moved(None, 4 * experts)
    both = tuple(axis for axis in ("batch", "expert") if mesh.shape[axis] > 1)
    moved["all-reduce", both] = Moved(None, 4 * (rest + table + 4 * e.count * L + 2))
    if ways > 1:
        each = L * (6 * D + e.active) + 2 * D + 3
        tokens = rows // (batch * across) * config.tokens
        moved["all-reduce", ("model",)] = Moved(None, 4 * tokens * each)
    return moved


def one_hot_flops(config: DecoderConfig, tokens: int, slots: int):
    """{what: FLOPs} of one layer's "experts" and "dispatch", forward, if dispatch is a matmul.

    A matrix of tokens by slots takes tokens to their slots, and another takes what experts made of
    them back: 4·S·slots·D for S tokens, which share their slots. Source: GShard.
    """
    return {"experts": slots * mlp_flops(config, config.hidden),
            "dispatch": 4 * tokens * slots * config.embed}
