"""What a training step must cost, by formula: parameters, FLOPs, bytes that move.

Nothing here looks at a program: these are the predictions that programs are held to.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from meshbook.costs.tiles import tiled, token_rows
from meshbook.hlo.collectives import Moved
from meshbook.models.losses import CHUNK
from meshbook.models.minigpt import MiniGPTConfig
from meshbook.models.vit import ViTConfig


def vit_parameters(config: ViTConfig, ways: int = 1, rows: int = 1):
    """How many parameters one of `ways` devices along "model" holds.

    Column- and row-split matrices are divided, and so are the biases of split
    units; embeddings, norms, the head and the biases after a sum are not.
    rows: devices along "batch" that divide every D once more (fully sharded).
    """
    X, D, F, L = config.patch**2 * 3, config.embed, config.hidden, config.layers
    embed = X * D + D + D + config.tokens * D
    blocks = L * ((4 * D * D + 2 * D * F) // ways + 6 * D)
    head = 2 * D + D * config.classes
    without_D = L * (3 * D + F) // ways + config.classes
    return (embed + blocks + head) // rows + without_D


def vit_step_flops(config: ViTConfig, images: int, ways: int = 1):
    """FLOPs of the products of one training step, and how often they are done.

    Returns (useful FLOPs of all devices together, factor). A product costs 2 FLOPs
    a pair forward and twice that backward; the first has no gradient to its input.
    Each of `ways` devices along "model" does the patches and the head again.
    """
    X, T, D, F = config.patch**2 * 3, config.tokens, config.embed, config.hidden
    block = T * (8 * D * D + 4 * D * F) + 4 * T * T * D
    blocks = 3 * config.layers * block
    whole = 2 * (T - 1) * 2 * X * D + 3 * 2 * D * config.classes
    factor = (blocks + ways * whole) / (blocks + whole)
    return images * (blocks + whole), factor


def vit_step_traffic(
    config: ViTConfig, mesh: Any, images: int,
    axes: tuple[str, str] = ("batch", "model"),
):
    """What a tensor-parallel step exchanges: {(kind, axes): Moved(count, result bytes)}.

    Along "model" four sums of activations per block (two forward, two backward);
    along "batch" the local gradients, loss and accuracy. The class token's gradient
    is the first row of the positions' and travels with it. axes: of the mesh that
    split the batch and the model.
    """
    rows, ways = (mesh.shape[axis] for axis in axes)
    activations = images // rows * config.tokens * config.embed
    shared = config.embed  # class token and position 0: one gradient for both
    scalars = 2  # the loss and the accuracy
    gradients = vit_parameters(config, ways) - shared + scalars
    moved = {}
    if ways > 1:
        sums = 4 * config.layers
        moved["all-reduce", axes[1:]] = Moved(sums, 4 * sums * activations)
    if rows > 1:
        moved["all-reduce", axes[:1]] = Moved(1, 4 * gradients)
    return moved


def block_activations(config: ViTConfig | MiniGPTConfig, batch: int, ways: int = 1):
    """Bytes per device that wait in one block for the backward pass; batch: B of this device.

    Everything is float32 but the inputs of the attention's matmuls, which a TPU rounds to bfloat16
    and keeps so, and dropout's masks, of a byte each. There wait the hidden units before the
    activation; the scores; query, key, value and what the heads give; the softmax's maxima and
    sums; what comes into the block and what lies between its halves; a mask for each tensor that
    drops units. What is split along "model" is divided, the residual stream is not.
    """
    T, D, F, H = config.tokens, config.embed, config.hidden // ways, config.heads // ways
    hidden = 4 * token_rows(batch, T, F)
    scores = 4 * batch * tiled(H, T, T)
    heads = 2 * 4 * batch * tiled(D // ways, T)
    sums = 4 * 2 * batch * tiled(H, T)
    residual = 4 * 2 * token_rows(batch, T, D)
    dropped = (D, D) if isinstance(config, MiniGPTConfig) else (F, D)
    masks = sum(token_rows(batch, T, width) for width in dropped) if config.dropout else 0
    return hidden + scores + heads + sums + residual + masks


def block_inputs(config: ViTConfig | MiniGPTConfig, batch: int):
    """Bytes per device of what comes into one block, (B, T, D) in float32: all that a block keeps
    for the backward pass when it is checkpointed.
    """
    return 4 * token_rows(batch, config.tokens, config.embed)


def vit_head(config: ViTConfig, rows: int = 1):
    """How many of `vit_parameters` are the head's, with the norm before it."""
    return (2 * config.embed + config.embed * config.classes) // rows + config.classes


def gpt_head(config: MiniGPTConfig, ways: int = 1, rows: int = 1):
    """How many of `gpt_parameters` are the head's."""
    return config.padded * config.embed // ways // rows + config.padded // ways


def vit_step_memory(config: ViTConfig, images: int, ways: int = 1, rows: int = 1):
    """Bytes that one device of a TPU holds in a training step with Adam, by what they are.

    images: those of this device; ways: devices along "model"; rows: those along "batch" that
    divide the parameters too (fully sharded), which then are gathered for their products, in
    bfloat16. With the logits stands the gradient of the head, which is made from theirs.
    """
    parameters = 4 * vit_parameters(config, ways, rows)
    return {
        "parameters": parameters,
        "moments": 2 * parameters,
        "gradients": parameters,
        "gathered": _gathered(vit_parameters, config, ways, rows, 2),
        "inputs": 4 * images * config.image**2 * 3,
        "activations": config.layers * block_activations(config, images, ways),
        "logits": 4 * tiled(images, config.classes) + 4 * vit_head(config),
    }


def step_peak(held: Mapping[str, int]):
    """The most bytes that one device holds at once: at the start of the backward pass all
    activations and the logits wait; when it ends they are gone and all gradients are there.

    held: of `vit_step_memory` or `gpt_step_memory`.
    """
    first = held["activations"] + held["logits"]
    always = ("parameters", "moments", "gathered", "inputs")
    return sum(held[name] for name in always) + max(first, held["gradients"])


def gpt_parameters(config: MiniGPTConfig, ways: int = 1, rows: int = 1):
    """How many parameters of a MiniGPT each of `ways` devices holds.

    Everything over the padded vocabulary is divided, like heads and hidden
    units; positions, norms and the biases after a sum are not.
    rows: devices along "batch" that divide every D once more (fully sharded).
    """
    D, F, V, L = config.embed, config.hidden, config.padded, config.layers
    embed = config.tokens * D + 2 * V * D // ways
    blocks = L * ((4 * D * D + 2 * D * F) // ways + 6 * D)
    without_D = (L * (3 * D + F) + V) // ways
    return (embed + blocks) // rows + without_D


def gpt_step_flops(config: MiniGPTConfig, rows: int):
    """FLOPs of the products of one training step, and how often they are done.

    Returns (useful FLOPs of all devices together, factor). rows: B, of T
    tokens each. Useful is the head over tokens that exist; the factor is that
    of the padding. Attention counts whole, though the mask throws half of it
    away.
    """
    blocks = config.tokens * _gpt_blocks(config)
    head = 2 * config.tokens * config.embed * config.vocabulary
    done = blocks + 2 * config.tokens * config.embed * config.padded
    return 3 * rows * (blocks + head), done / (blocks + head)


def _gpt_blocks(config):
    """FLOPs of the products of all blocks for one token, whose queries meet a whole window."""
    T, D, F = config.tokens, config.embed, config.hidden
    return config.layers * (8 * D * D + 4 * D * F + 4 * T * D)


def gpt_extend_flops(config: MiniGPTConfig, rows: int, tokens: int):
    """FLOPs of the products that read `tokens` new tokens of each of `rows` texts with a cache.

    All of them go through the blocks, where they meet all columns of the cache, also the empty
    and the masked ones; only the last one's logits are computed, padding included. A prefill has
    the tokens of the prompt, a decode step has one.
    """
    head = 2 * config.embed * config.padded
    return rows * (tokens * _gpt_blocks(config) + head)


def step_gathers(
    parameters: Callable, config: ViTConfig | MiniGPTConfig, mesh: Any,
    axes: tuple[str, str] = ("batch", "model"),
):
    """Result bytes of the all-gathers of weights along axes[0] in a fully sharded step.

    Each weight that is split there is gathered once, and kept for the backward pass: its memory is
    not freed in between, as ZeRO stage 3 frees it.
    parameters: `vit_parameters` or `gpt_parameters`, in float32; axes: of the mesh that split the
    batch and the model.
    """
    rows, ways = (mesh.shape[axis] for axis in axes)
    return _gathered(parameters, config, ways, rows, 4)


def _gathered(parameters, config, ways, rows, number):
    if rows == 1:
        return 0
    away = parameters(config, ways) - parameters(config, ways, rows)
    return number * away * rows // (rows - 1)


def gpt_step_memory(config: MiniGPTConfig, batch: int, ways: int = 1, rows: int = 1):
    """The same for MiniGPT, whose loss makes the head's gradient chunk by chunk.

    batch: rows of text on this device. The logits of CHUNK tokens are there at once, rounded to
    bfloat16 for their product with the hidden state.
    """
    parameters = 4 * gpt_parameters(config, ways, rows)
    V, chunk = config.padded // ways, min(CHUNK, batch * config.tokens)
    return {
        "parameters": parameters,
        "moments": 2 * parameters,
        "gradients": parameters,
        "gathered": _gathered(gpt_parameters, config, ways, rows, 2),
        "inputs": 4 * 2 * tiled(batch, config.tokens),
        "activations": config.layers * block_activations(config, batch, ways),
        "logits": 2 * tiled(chunk, V) + 4 * tiled(config.embed, V),
    }


def step_memory_traffic(held: Mapping[str, int]):
    """Bytes that a device moves to and from its memory in a step with Adam, at the least.

    held: of `vit_step_memory` or `gpt_step_memory`. What waits for the backward pass is written
    once and read once; logits need not be, a compiler may fuse them into the loss. The weights are
    read forward and backward; Adam reads weights, gradients and both moments, and writes three of
    them back; the gradients had to be written first.
    """
    weights = held["gathered"] or held["parameters"]
    return 2 * (held["activations"] + weights) + 8 * held["parameters"]


def gpt_step_traffic(
    config: MiniGPTConfig, mesh: Any, rows: int, clipped: bool = True,
    sharded: bool = False, axes: tuple[str, str] = ("batch", "model"),
):
    """What a step of MiniGPT exchanges: {(kind, axes): Moved(count, result bytes)}.

    Tensor-parallel. Along "model": the tokens' embeddings, four sums of
    activations per block, the hidden gradient, three numbers per token for the
    loss (a maximum, and two sums in one, per CHUNK of one device's tokens), and
    where gradients are clipped the squared norm of each split leaf.
    Along "batch": the local gradients, loss, accuracy, and those norms where the
    parameters are split there too, in as many collectives as the compiler likes.
    rows: B, of T tokens each; sharded: fully,
    its weights' own bytes not counted (`step_gathers`); axes: of the mesh that
    split the batch and the model.
    """
    batch, ways = (mesh.shape[axis] for axis in axes)
    tokens = rows // batch * config.tokens
    activations = tokens * config.embed * (1 + 4 * config.layers + 1)
    norms = 6 * config.layers + 3
    more = sharded * clipped * (10 * config.layers + 3)
    gradients = gpt_parameters(config, ways) + 2 + more
    moved = {}
    if ways > 1:
        count = 4 * config.layers + 2 + 2 * -(-tokens // CHUNK) + clipped
        size = activations + 3 * tokens + clipped * norms
        moved["all-reduce", axes[1:]] = Moved(count, 4 * size)
    if batch > 1:
        count = None if more else 1
        moved["all-reduce", axes[:1]] = Moved(count, 4 * gradients)
    return moved
