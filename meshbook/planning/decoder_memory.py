"""What a training step of the decoder must hold, by formula: what waits for the backward pass.

The layers are a scan. What waits of each layer is a slice of a stack, and a stack is there whole
from the loop's first turn to its last, and so are the gradients of the layers in the backward pass.
"""
from __future__ import annotations

import math

import numpy as np

from meshbook.models.decoder import DecoderConfig
from meshbook.models.losses import CHUNK
from meshbook.planning.costs import tiled, token_rows
from meshbook.planning.decoder_costs import (
    BY_HAND, SPLIT, decoder_parameters, ends, layer_matrices, layers_of, numbers, sizes_of
)
from meshbook.planning.memory_timeline import KINDS, Moment


def waiting(config: DecoderConfig, has_positions: bool = True, policy: str | None = None,
            ways: int = 1, split: bool = False):
    """What of one layer waits for the backward pass: [(how many, letters, bytes of a number)].

    policy: of rematerialisation, the config's if None; ways: devices along "model"; split: whether
    they split the tokens, too (sequence parallelism). Letters are B, T, t for tokens that are then
    split, and those of `decoder_costs`. With everything kept these are: of each norm three arrays
    in float32, what it gives, and two numbers a token; latents; queries, keys, values, and what the
    heads find; scores and weights of the softmax, and its maxima and sums; dropout's masks; six
    arrays of hidden units. Otherwise what the policy keeps, and what comes into the layer. Split
    tokens that were gathered are kept whole. Attention row by row keeps no scores.
    """
    c, policy, latent = np.dtype(config.dtype).itemsize, policy or config.remat, config.latent
    x, whole, found = (1, "BtD", c), (1, "BTD" if split else "BtD", c), (1, "BTHK", c)
    if policy in ("all", "attention"):
        return [x] if policy == "all" else [x, found]
    has_turned, kept = latent and config.rotary and has_positions, policy == "none"
    if latent:
        heads = [(2, "BTR" if kept else "BtR", c), (3, "BTHK", c)]
    else:
        heads = [(1, "BTHK", c), (2, "BTGK", c)]
    if has_turned:
        heads += [(1, "BTHP", c), (1, "BTP" if kept else "BtP", c)]
    if not kept:
        return [x, whole, *heads, (1 + config.gated, "BTF", c)]
    norms = [(6, "BtD", 4), (4, "Bt", 4), x if latent else whole, whole]
    both = [(2, "BtR", c)] * bool(has_turned)  # the latents of queries and keys, side by side
    both += [(2, "BTR", c)] * bool(has_turned and ways > 1)  # and as the devices have them
    softmax = [] if config.by_row else [(1, "BHTT", 4), (1, "BHTT", c), (2, "BHT", 4)]
    masks = [(2, "BtD", 1)] if config.dropout else []
    finds = [found] * (2 if latent and config.bias and config.by_row else 1)  # and with the bias
    return [*norms, *heads, *both, *softmax, *finds, *masks, (6, "BTF", c)]


def size_on_cpu(letters: str, sizes: dict):
    """Numbers of an array with these letters."""
    return math.prod(map(sizes.get, letters))


def size_on_tpu(letters: str, sizes: dict):
    """Numbers of an array on a TPU, filled up to its tiles as `meshbook.planning.costs` has them:
    (B, T, width) with tokens or rows above width, arrays of heads with their tokens last.
    """
    first, *others = map(sizes.get, letters)
    if len(others) == 1:
        return tiled(first, *others)
    if letters[1] == "H":  # scores, and what is one number of a head and token
        return first * tiled(*others)
    if len(others) == 2:
        return token_rows(first, *others)
    tokens, *width = others
    return first * tiled(math.prod(width), tokens)


def waiting_bytes(config: DecoderConfig, batch: int, ways: int = 1, has_positions: bool = True,
                  policy: str | None = None, tpu: bool = False, split: bool = False):
    """Bytes of `waiting` on a device with so many rows of text.

    ways: devices along "model", which divide what has heads, groups or hidden units, and split
    tokens; tpu: with tiles.
    """
    sizes = sizes_of(config) | {"B": batch}
    parts = {letter: size // (ways if letter in SPLIT else 1) for letter, size in sizes.items()}
    parts["t"] = -(-config.tokens // (ways if split else 1))
    size = size_on_tpu if tpu else size_on_cpu
    return sum(count * number * size(letters, parts)
               for count, letters, number in waiting(config, has_positions, policy, ways, split))


def held_parameters(config: DecoderConfig, preset: str, ways: int, rows: int):
    """How many (parameters, gradients, moments of one kind) one device holds, of PRESETS."""
    whole, own = (decoder_parameters(config, ways, parts) for parts in (1, rows))
    sharded = preset.startswith("fully_sharded")
    return (own if sharded else whole, own if sharded or preset == "zero2" else whole,
            own if sharded or preset in BY_HAND else whole)


def decoder_step_memory(config: DecoderConfig, batch: int, ways: int = 1, rows: int = 1,
                        preset: str = "tensor_parallel", tpu: bool = True):
    """Bytes that one device holds in a training step with Adam, by what they are.

    batch: rows of text on this device; ways, rows: devices along "model", of "batch"; preset: of
    PRESETS. Activations are those that wait in all layers; "layer" is what one period of layers
    needs when the backward pass gets there. Gathered are the matrices of the layers, where they are
    kept on purpose, or as a scan keeps everything if the policy is "none", on every mesh, unless
    they are gathered again; and, fully sharded, what embeds. Logits are those of one chunk, with
    the gradient of the head. tpu False: a CPU has no tiles, three arrays of logits, float32 for
    bfloat16, and with the preset fully_sharded whole gradients.
    """
    number, each = np.dtype(config.dtype).itemsize if tpu else 4, dict(
        batch=batch, ways=ways, tpu=tpu, split=preset == "sequence_parallel" and ways > 1)
    parameters, gradients, moments = held_parameters(config, preset, ways, rows)
    if preset == "fully_sharded" and not tpu:
        gradients = decoder_parameters(config, ways)
    kept = sum(count * waiting_bytes(config, has_positions=has_positions, **each)
               for count, has_positions in layers_of(config))
    period = sum(count * waiting_bytes(config, has_positions=has_positions, policy="none", **each)
                 for count, has_positions in layers_of(config))
    gathered = 0
    if preset == "fully_sharded_kept" or (
            config.remat == "none" and preset != "fully_sharded_again"):
        gathered = sum(count * numbers(config, layer_matrices(config, has_positions), ways)
                       for count, has_positions in layers_of(config))
    if rows > 1 and preset.startswith("fully_sharded"):
        gathered += numbers(config, ends(config), ways)
    V, chunk = config.padded // ways, min(CHUNK, batch * config.tokens)
    logits = number * tiled(chunk, V) if tpu else 3 * 4 * chunk * V
    return {
        "parameters": 4 * parameters,
        "moments": 2 * 4 * moments,
        "gradients": 4 * gradients,
        "gathered": number * gathered,
        "inputs": 4 * 2 * (tiled(batch, config.tokens) if tpu else batch * config.tokens),
        "activations": kept,
        "layer": period * config.period // config.layers,
        "logits": logits + 4 * numbers(config, [(1, "VD")], ways),
    }


def decoder_temporaries(held: dict):
    """Bytes of `decoder_step_memory` at the peak that are no arguments of the step.

    Either the logits are there, or the gradients with what one period of layers works with.
    """
    return (held["gathered"] + held["activations"]
            + max(held["logits"], held["gradients"] + held["layer"]))


def decoder_step_peak(held: dict):
    """The most bytes of `decoder_step_memory` that one device holds at once."""
    return held["parameters"] + held["moments"] + held["inputs"] + decoder_temporaries(held)


def decoder_timeline(config: DecoderConfig, held: dict):
    """The Moments of one step with Adam, in order, from `decoder_step_memory`: its stacks are there
    whole as long as their loop runs. Blocks are layers; the work of a layer counts as activations.
    """
    L, always = config.layers, {name: held[name] for name in ("parameters", "moments", "inputs")}
    stacks = {"gathered": held["gathered"], "activations": held["activations"]}
    gradients = {"gradients": held["gradients"]}
    work = stacks | gradients | {"activations": held["activations"] + held["layer"]}

    def moment(phase, block=None, **more):
        return Moment(phase, block, {kind: (always | more).get(kind, 0) for kind in KINDS})

    return [moment("forward", 0), *(moment("forward", i, **stacks) for i in range(1, L + 1)),
            moment("loss", logits=held["logits"], **stacks),
            *(moment("backward", i, **work) for i in range(L, 0, -1)),
            moment("backward", 0, **gradients), moment("update", **gradients)]
