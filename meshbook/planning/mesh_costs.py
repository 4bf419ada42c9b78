"""What a plan asks of one device, by formula: parameters, and what is sent over the links.

A plan spreads a decoder, with experts or without, over up to four mesh axes: "batch" and "expert"
split the rows, "expert" the experts, "stage" the layers and the vocabulary, "model" heads, hidden
units and the vocabulary. These are the formulas of `decoder_costs`, `pipeline_costs` and
`expert_costs`, put together.
"""
from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from meshbook.hlo.collectives import Moved, Traffic
from meshbook.models.decoder import DecoderConfig
from meshbook.planning.costs import tiled
from meshbook.planning.decoder_costs import (
    decoder_step_traffic, ends, layer_matrices, layer_vectors, sizes_of
)
from meshbook.planning.expert_costs import slots_in_row
from meshbook.planning.pipeline_costs import turns_of

PLACES = {"E": "expert", **dict.fromkeys("HGFMV", "model")}  # the axis that divides a letter
LOADS = 4  # numbers of an expert that a layer sums: choices before and after, means of scores


@functools.cache
def weights(config: DecoderConfig):
    """The parameters of a decoder, [(how many of them, letters, whether they are in the layers)].

    Letters are those of `decoder_costs`, and of experts: E experts, C classes of the router, M
    hidden units of the expert that all tokens share.
    """
    found = [(*each, False) for each in ends(config)]
    for i in range(config.period):
        has_positions = i < config.period - 1 or config.period == 1
        layer = layer_matrices(config, has_positions) + layer_vectors(config, has_positions)
        if config.experts is not None and i == config.period - 1:
            layer = of_experts(config, layer)
        found += [(config.layers // config.period * count, letters, True)
                  for count, letters in layer]
    return found


def of_experts(config: DecoderConfig, layer: list):
    """A layer's weights with those of experts in the place of its MLP's."""
    first, e, bias = 1 + config.gated, config.experts, config.bias
    mlp = [(first, "DF"), (1, "FD")] + [(first, "F"), (1, "D")] * bias
    experts = [(1, "DC"), (first, "EDF"), (1, "EFD")] + [(1, "C"), (first, "EF"), (1, "ED")] * bias
    shared = [(first, "DM"), (1, "MD")] + [(first, "M"), (1, "D")] * bias
    for each in mlp:
        layer.remove(each)
    return layer + experts + shared * bool(e.shared) + [(1, "C")] * e.biased


@functools.cache
def letters_of(config: DecoderConfig):
    """{letter: size} of a decoder's dimensions, those of experts among them."""
    e, more = config.experts, {}
    if e is not None:
        more = {"E": e.count, "C": e.count, "M": e.shared}
    return sizes_of(config) | more


def own_numbers(config: DecoderConfig, plan: Any, weight: tuple):
    """How many numbers of a weight one device uses: of all, what no axis of its own divides."""
    count, letters, in_layers = weight
    sizes = letters_of(config)
    parts = [getattr(plan, axis) for axis in {PLACES[each] for each in letters if each in PLACES}]
    stages = plan.stage if in_layers or "V" in letters else 1
    return count * math.prod(map(sizes.get, letters)) // math.prod(parts) // stages


def own_groups(config: DecoderConfig, plan: Any):
    """{(whether it has a D, an E, a V, is in the layers): numbers that one device uses}."""
    return _groups(config, replace(plan, batch=1, rules="", schedule="", microbatches=1, remat=""))


@functools.cache
def _groups(config, plan):
    found = Counter()
    for weight in weights(config):
        key = *(letter in weight[1] for letter in "DEV"), weight[2]
        found[key] += own_numbers(config, plan, weight)
    return found


def own_parameters(config: DecoderConfig, plan: Any, stored: bool = True):
    """How many parameters one device has: that it uses, or, fully sharded, that it stores."""
    rows = plan.batch if stored and plan.is_fully_sharded else 1
    return sum(count // (rows if has_D else 1)
               for (has_D, *_), count in own_groups(config, plan).items())


def plan_traffic(config: DecoderConfig, plan: Any, rows: int, number: int = 4):
    """What a step exchanges: a Traffic of (kind, axes): Moved(None, result bytes).

    Of conditionals those branches count that are taken, as on the devices. rows: B, of T tokens
    each, on all devices. number: bytes of an activation that travels, and of a weight that layers
    gather; what is summed has 4. Loss and gradients are those of `plan_programs`, without the norms
    of clipping.
    """
    moved, sizes = Counter(), plan.sizes
    for key, size in (*_of_tokens(config, plan, rows, number), *_of_weights(config, plan, number)):
        axes = tuple(axis for axis in sizes if axis in key[1] and sizes[axis] > 1)
        if axes:
            moved[key[0], axes] += size
    return Traffic({key: Moved(None, size) for key, size in moved.items() if size}, sizes)


def _of_tokens(config, plan, rows, number):
    """((kind, axes), bytes) of all that travels because of the rows."""
    m, p, D, e = plan.microbatches, plan.stage, config.embed, config.experts
    b = rows // plan.batch // plan.expert // m
    tokens, periods = b * config.tokens, config.layers // config.period
    # in stages the sums along "model" are no products: they are made again with "products", too
    kept = "attention" if p > 1 and plan.remat == "products" else plan.remat
    dense = replace(config, experts=None, remat=kept)
    turns, again, u = m, plan.remat != "none", number * tokens * D
    if p > 1:
        found = turns_of(plan.schedule, p, m)
        turns, again = found.permutes / 2, again + (plan.schedule == "lockstep")
        yield ("collective-permute", ("stage",)), found.permutes * u
        yield ("all-reduce", ("stage",)), 2 * m * u + 4 * (1 + config.bias) * D
        yield ("all-reduce", ("batch", "expert", "stage")), 2 * 4
        if plan.schedule != "gpipe":
            turns = m
    if plan.model > 1:
        mesh = type("Sizes", (), {"shape": {"batch": 1, "model": plan.model}})
        all_of_it = decoder_step_traffic(dense, mesh, b, "tensor_parallel", number=number)
        layers = all_of_it["all-reduce", ("model",)].bytes - tokens * (number * 2 * D + 3 * 4)
        if e is not None:
            biases = config.bias * e.count // plan.expert * D  # inside of the sum: their gradients
            layers += periods * (tokens * (number * 2 * D + 4 * e.active) + 4 * biases)
        yield ("all-reduce", ("model",)), turns * layers // p
    yield ("all-reduce", ("stage", "model")), m * (2 * u + 3 * 4 * tokens)
    if e is not None:
        slots = number * b * slots_in_row(config) * D
        yield ("all-to-all", ("expert",)), turns * periods // p * (4 + 2 * again) * slots
        # a pipeline's loss needs only what has a gradient
        sums = bool(e.auxiliary or e.biased) if p > 1 else LOADS + again
        yield ("all-reduce", ("batch", "expert")), turns * periods // p * 4 * sums * e.count


def _of_weights(config, plan, number):
    """The same of weights and their gradients, along the axes that split the rows."""
    whole, m = plan.stage > 1, plan.microbatches
    by_hand = plan.rules != "tensor_parallel"
    parts = m if plan.is_fully_sharded and not whole else 1
    if not whole:  # the compiler takes sums of loss and accuracy out of the loop over microbatches
        sums = min(m, 2) if config.experts is not None else 1  # with experts all but the first's
        yield ("all-reduce", ("batch", "expert")), sums * 2 * 4
        if plan.rules == "fully_sharded_again":
            yield ("all-gather", ("batch",)), parts * number * _again(config, plan)
    for (has_D, has_E, has_V, in_layers), q in own_groups(config, plan).items():
        axes = ("batch",) if has_E else ("batch", "expert")
        if not by_hand or not has_D:
            twice = has_V and not whole and m == 1 and not by_hand
            yield ("all-reduce", axes), 4 * q * (1 + twice)
            continue
        gathers = parts if in_layers else 1  # what stands outside of the layers stays gathered
        if plan.batch > 1:
            yield ("all-gather", ("batch",)), gathers * number * q
            yield ("reduce-scatter", ("batch",)), parts * 4 * q // plan.batch
        yield ("all-reduce", axes[1:]), parts * 4 * q // plan.batch


def _again(config, plan):
    """Numbers that a device's layers gather again in the backward pass.

    What products and norms need; or, where layers are made again, all but the last bias of each.
    """
    of_layers = [each for each in weights(config) if each[2] and "D" in each[1]]
    if plan.remat != "none":
        last = config.bias * config.layers * config.embed
        return sum(own_numbers(config, plan, each) for each in of_layers) - last
    matrices = [each for each in of_layers if len(each[1]) > 1 and each[1] != "ED"]
    scales = 2 * config.layers * config.embed
    return sum(own_numbers(config, plan, each) for each in matrices) + scales
