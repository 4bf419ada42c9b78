"""What a decoder's step costs, by formula, where its tokens are split over an axis of the mesh.

Each of n devices has t = T/n tokens of a row, in all layers, and all of the weights: see
`meshbook.parallel.context`. So activations are those of a row of t tokens, and what is added is
what attention exchanges along the axis of the context. Let u = 4·b·t·G·K, the bytes of a device's
keys. In a ring a layer sends 2·(n - 1)·u forward, keys and values; in the backward pass they go
round once more, and the sums of their gradients with them: 6·(n - 1)·u in all. Gathered keys and
values take as many bytes on the wire; a gather's result has n·u. Ulysses exchanges queries, keys,
values and what is found.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshbook.costs.devices import Device
from meshbook.hlo.collectives import Moved
from meshbook.models.decoder import DecoderConfig
from meshbook.planning.decoder_costs import (
    decoder_parameters, decoder_step_flops, layer_vectors, layers_of, numbers, sizes_of
)
from meshbook.planning.decoder_memory import decoder_step_memory

METHODS = ("ring", "gather", "ulysses")
BLOCK = 512  # tokens of a block of queries, and of one of keys


def causal_flops(config: DecoderConfig, rows: int):
    """FLOPs of a training step that causal attention needs: T·(T + 1)/2 scores of a row."""
    T = config.tokens
    a_score = 4 * config.heads * config.head_size * rows * config.layers  # with its value
    return decoder_step_flops(config, rows)[0] - 3 * a_score * (T * T - T * (T + 1) // 2)


def tokens_to_hide(device: Device, heads: int, groups: int, width: int = 2):
    """Tokens of each device whose products take as long as a zigzag ring's next keys and values.

    Forward, with numbers of so many bytes: 2·H·K·t² FLOPs against 2·width·t·G·K bytes in one
    direction of a link.
    """
    return width * device.flops / device.link * groups / heads


def check_context(config: DecoderConfig, ways: int, method: str):
    """ValueError for another method, and where tokens or Ulysses' heads do not divide."""
    if method not in METHODS:
        raise ValueError(f"method is one of {', '.join(METHODS)}; found {method!r}")
    if config.latent:
        raise ValueError(f"attention over a context is for keys and values of heads; found "
                         f"latent={config.latent}")
    groups = config.groups or config.heads
    sizes = {"tokens": config.tokens} | ({"groups": groups} if method == "ulysses" else {})
    for name, size in sizes.items():
        if size % ways:
            raise ValueError(f"{name}={size} does not divide over {ways} devices of the context")


def layer_exchanges(config: DecoderConfig, batch: int, ways: int, method: str):
    """{kind: Moved} of one layer's attention on a device with so many rows, along the context."""
    check_context(config, ways, method)
    sizes, others = sizes_of(config), ways - 1
    number = lambda letters: 4 * batch * config.tokens // ways * sizes[letters] * sizes["K"]
    keys, queries = number("G"), number("H")
    forward = 1 + (config.remat in ("products", "all"))  # passes, with the one that is done again
    if method == "gather":  # what is gathered again serves both passes
        return {"all-gather": Moved(4, 4 * ways * keys), "reduce-scatter": Moved(2, 2 * keys)}
    if method == "ring":
        count = (2 * forward + 4) * others
        return {"collective-permute": Moved(count, count * keys)}
    again = queries + 2 * keys if config.remat == "attention" else 0  # what was found is kept
    return {"all-to-all": Moved(4 * forward + 4 + 3 * bool(again),
                                (forward + 1) * 2 * (queries + keys) + again)}


def context_step_traffic(config: DecoderConfig, mesh: Mapping[str, int], rows: int,
                         method: str = "ring"):
    """What a step exchanges: {(kind, axes): Moved(count, result bytes)}, with 4 bytes a number.

    mesh: {axis: size} of the axes for the batch and for the context, in this order; rows: B, of T
    tokens each, with the chunked loss; method: of METHODS. Gradients are summed over all devices,
    that of the table twice, and loss and accuracy with them. Those of norms and biases come from
    products of a device's own tokens and are summed along each axis apart. Raises ValueError as
    `check_context` does.
    """
    (data, context), (across, ways) = mesh, mesh.values()
    moved = {}
    if ways > 1:
        each = layer_exchanges(config, rows // across, ways, method)
        moved = {(kind, (context,)): Moved(config.layers * one.count, config.layers * one.bytes)
                 for kind, one in each.items()}
    vectors = numbers(config, [(1 + config.bias, "D")]) + sum(
        count * numbers(config, layer_vectors(config, has_positions))
        for count, has_positions in layers_of(config))
    whole = decoder_parameters(config) + numbers(config, [(1, "VD")]) + 2
    axes = tuple(axis for axis, size in mesh.items() if size > 1)
    if len(axes) < 2:
        return moved | {("all-reduce", axes): Moved(None, 4 * whole) for axes in [axes] if axes}
    moved["all-reduce", axes] = Moved(None, 4 * (whole - vectors))
    return moved | {("all-reduce", (axis,)): Moved(None, 4 * vectors) for axis in axes}


def context_step_memory(config: DecoderConfig, batch: int, ways: int, method: str = "ring",
                        tpu: bool = True):
    """Bytes that one device holds in a step with Adam, by what they are: `decoder_step_memory`.

    batch: rows of text of this device, which has T/ways tokens of each. Attention keeps no scores,
    but the logarithm of a sum for each head and token. Where the backward pass of a layer works,
    there are four blocks of scores, and keys and values with their gradients on their way: ten
    times those of this device. (Where each device has one block, and three or four are in the ring,
    XLA has no loop left, and for a CPU makes scores of several turns at once: up to three times
    this.) Raises ValueError as `check_context` does.
    """
    check_context(config, ways, method)
    own, sizes = replace(config, tokens=config.tokens // ways, by_row=True), sizes_of(config)
    held = decoder_step_memory(own, batch, preset="data_parallel", tpu=tpu)
    tokens, heads = own.tokens, sizes["H"]
    if method == "ulysses":
        tokens, heads = config.tokens, sizes["H"] // ways
    side = min(BLOCK, tokens)
    keys = 4 * batch * own.tokens * sizes["G"] * sizes["K"]
    held["layer"] += 4 * 4 * batch * heads * side * side + 10 * keys
    if config.remat != "all":
        held["activations"] += config.layers * 4 * batch * sizes["H"] * own.tokens
    return held
