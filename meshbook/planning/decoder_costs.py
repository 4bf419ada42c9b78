"""What a training step of the decoder must cost, by formula: parameters, FLOPs, bytes that move.

Nothing here looks at a program: these are the predictions that programs are held to. A weight is
(how many of them, letters): (2, "DGK") is two matrices from D to G heads of K numbers. From the
letters follow its size, on which mesh axes it is split, and the FLOPs of its product with a token.
"""
from __future__ import annotations

import math
from functools import partial
from typing import Any

from meshbook.hlo.collectives import Moved
from meshbook.models.decoder import DecoderConfig
from meshbook.models.losses import CHUNK
from meshbook.sharding import Sharding

PRESETS = {  # of the decoder's rules
    name: getattr(Sharding, name) for name in (
        "data_parallel", "tensor_parallel", "sequence_parallel", "zero1", "zero2",
        "fully_sharded")} | {
    "fully_sharded_kept": partial(Sharding.fully_sharded, regather=False),
    "fully_sharded_again": partial(Sharding.fully_sharded, regather=True)}
BY_HAND = ("zero1", "zero2", "fully_sharded_kept", "fully_sharded_again")  # reduce-scattered
SPLIT = set("HGFV")  # letters that "model" divides, under every preset but data_parallel
AGAIN = {  # products of a layer that a policy of rematerialisation computes again
    "none": lambda each: 0, "products": lambda each: each["scores"] + each["values"],
    "attention": lambda each: sum(each.values()) - each["FD"] - each["values"],
    "all": lambda each: sum(each.values()) - each["FD"]}
AGAIN_BY_ROW = AGAIN | {  # and what attention row by row does whatever is kept: the scores
    "none": lambda each: each["scores"], "products": lambda each: each["scores"],
    "all": lambda each: AGAIN["all"](each) + each["scores"]}


def sizes_of(config: DecoderConfig):
    """{letter: size} of a decoder's dimensions."""
    return dict(T=config.tokens, D=config.embed, F=config.hidden, H=config.heads,
                K=config.head_size, G=config.groups or config.heads, R=config.latent,
                P=config.rotary, V=config.padded)


def layer_matrices(config: DecoderConfig, has_positions: bool = True):
    """The matrices of one layer, [(how many, letters)], in the order in which they are used."""
    if config.latent:
        turned = [(2, "RP"), (2, "RHP")] if config.rotary and has_positions else []
        attention = [(2, "DR"), (1, "RHK"), *turned, (2, "RHK")]
    else:
        attention = [(1, "DHK"), (2, "DGK")]
    return [*attention, (1, "HKD"), (1 + config.gated, "DF"), (1, "FD")]


def layer_vectors(config: DecoderConfig, has_positions: bool = True):
    """The biases, scales and shifts of one layer, [(how many, letters)]."""
    made = {"DR": "R", "RP": "P", "HKD": "D", "FD": "D"}  # what a matrix gives, if not its rest
    given = [(count, made.get(letters, letters[1:]))
             for count, letters in layer_matrices(config, has_positions)]
    given = [(1, letters) if letters in ("P", "HP") else (count, letters)
             for count, letters in given]  # of two matrices whose products are added
    return [(1, "D")] * 2 * (1 + config.bias) + (given if config.bias else [])


def layers_of(config: DecoderConfig):
    """[(how many layers of a kind, whether they have positions)]: the last of a period has none.

    Raises ValueError for a decoder with experts, whose costs are in `expert_costs`.
    """
    if config.experts is not None:
        raise ValueError(f"expected a dense decoder; found {config.experts.count} experts")
    periods = config.layers // config.period
    if config.period == 1:
        return [(periods, True)]
    return [(periods * (config.period - 1), True), (periods, False)]


def numbers(config: DecoderConfig, weights: list, ways: int = 1, rows: int = 1):
    """How many numbers of these weights one device holds: rows divides those with a D."""
    sizes, total = sizes_of(config), 0
    for count, letters in weights:
        size = count * math.prod(map(sizes.get, letters))
        total += size // (ways if SPLIT & set(letters) else 1) // (rows if "D" in letters else 1)
    return total


def layer_parameters(config: DecoderConfig, has_positions: bool = True, ways: int = 1,
                     rows: int = 1):
    """How many parameters of one layer one device holds: see `decoder_parameters`."""
    weights = layer_matrices(config, has_positions) + layer_vectors(config, has_positions)
    return numbers(config, weights, ways, rows)


def ends(config: DecoderConfig):
    """The weights outside of the layers: the table of tokens, and the last norm."""
    return [(1, "VD"), (1 + config.bias, "D")]


def decoder_parameters(config: DecoderConfig, ways: int = 1, rows: int = 1):
    """How many parameters of a Decoder one device holds.

    ways: devices along "model", which divide what has heads, groups, hidden units or vocabulary;
    rows: devices along "batch" that divide every D once more (fully sharded).
    """
    layers = sum(count * layer_parameters(config, has_positions, ways, rows)
                 for count, has_positions in layers_of(config))
    return layers + numbers(config, ends(config), ways, rows)


def layer_products(config: DecoderConfig, has_positions: bool = True, ways: int = 1):
    """{what: FLOPs} of a layer's products in the forward pass, for one token, by all devices.

    A product is named by its weight's letters, or is that of the "scores" or of the "values". What
    no letter of SPLIT divides, each of `ways` devices along "model" does.
    """
    sizes, found = sizes_of(config), {}
    for count, letters in layer_matrices(config, has_positions):
        times = 1 if SPLIT & set(letters) else ways
        found[letters] = found.get(letters, 0) + 2 * count * times * math.prod(
            map(sizes.get, letters))
    turned = config.rotary if has_positions and config.latent else 0
    found["scores"] = 2 * config.tokens * (config.embed + config.heads * turned)
    found["values"] = 2 * config.tokens * config.embed
    return found


def decoder_step_flops(config: DecoderConfig, rows: int, ways: int = 1,
                       preset: str = "tensor_parallel"):
    """FLOPs of the products of one training step, and how often they are done.

    Returns (useful FLOPs of all devices together, factor). rows: B, of T tokens each; ways:
    devices along "model"; preset: of PRESETS. Useful is the head over tokens that exist. The factor
    is what the padding, what config.remat computes again and what each of `ways` devices does make
    of it: under tensor parallelism latents and the key that heads share. Attention counts whole,
    though the mask throws half of it away.
    """
    useful = done = 0
    times = 1 if preset == "sequence_parallel" else ways  # there each has its own tokens
    for count, has_positions in layers_of(config):
        useful += 3 * count * sum(layer_products(config, has_positions).values())
        each = layer_products(config, has_positions, times)
        again = AGAIN_BY_ROW if config.by_row else AGAIN
        done += count * (3 * sum(each.values()) + again[config.remat](each))
    head = 3 * 2 * config.embed
    useful, done = useful + head * config.vocabulary, done + head * config.padded
    if preset == "data_parallel":
        done *= ways
    return rows * config.tokens * useful, done / useful


def decoder_step_traffic(config: DecoderConfig, mesh: Any, rows: int,
                         preset: str = "tensor_parallel", clipped: bool = False,
                         axes: tuple[str, str] = ("batch", "model"), number: int = 4):
    """What a step of the decoder exchanges: {(kind, axes): Moved(count, result bytes)}.

    rows: B, of T tokens each, with the chunked loss; preset: of PRESETS; clipped: whether gradients
    are clipped by their norm, which takes a number for each leaf that is split; axes: of the mesh
    that split the batch and the model; number: bytes of one activation, weight or gradient of a
    product that travels, 4 on a CPU whatever the dtype, 2 where bfloat16 does; what is summed or
    gathered outside of the layers' products has 4. A count is None where the compiler merges
    collectives as it likes.

    Along "model": the tokens' embeddings and the hidden gradient; in each layer two sums forward
    and two backward, one of them of the latent where there is one; once more what is computed
    again; three numbers a token for the loss. Along "batch": the gradients, of the table twice,
    loss and accuracy; fully sharded the weights, gathered once and kept, or with rematerialisation
    gathered again. Of presets BY_HAND each parameter with a D is gathered once, and its gradient
    reduce-scattered once; fully_sharded_again gathers the layers' once more.
    """
    batch, across = (mesh.shape[axis] for axis in axes)
    ways = 1 if preset == "data_parallel" else across
    leaves, (data, model) = stacked_leaves(config) if clipped else [], axes
    norms = sum("D" in letters for letters in leaves), sum(
        bool(SPLIT & set(letters)) for letters in leaves)
    moved = {}
    if ways > 1:
        tokens = rows // batch * config.tokens
        of = _pieces if preset == "sequence_parallel" else _sums
        for kind, count, size in of(config, tokens, ways, number):
            if kind == "all-reduce":
                size += 4 * norms[1]
                count = None if count is None or clipped and preset in BY_HAND else count + clipped
            moved[kind, (model,)] = Moved(count if config.period == 1 else None, size)
    if batch > 1:
        whole = preset not in BY_HAND
        size = 4 * 2 + 4 * (norms[0] if preset.startswith(("fully", "zero")) else 0)
        size += _gradients(config, ways, number) if whole else 4 * (
            decoder_parameters(config, ways) - with_D(config, ways))
        moved["all-reduce", (data,)] = Moved(None, size)
        if not whole:
            each = 4 * with_D(config, ways)
            moved["reduce-scatter", (data,)] = Moved(None, each // batch)
            moved["all-gather", (data,)] = Moved(None, each + (
                preset == "fully_sharded_again") * _again(config, ways))
        elif preset == "fully_sharded":
            moved["all-gather", (data,)] = _gathers(config, ways, number)
    if ways > 1 and preset == "sequence_parallel" and config.latent:
        _of_own_tokens(config, moved, batch, data, model)
    return moved


def stacked_leaves(config: DecoderConfig):
    """The letters of every parameter leaf; those of the layers of a period are stacked."""
    weights = [(1, "VD")] + [(1, "D")] * (1 + config.bias)
    for i in range(config.period):
        has_positions = i < config.period - 1 or config.period == 1
        weights += layer_matrices(config, has_positions) + layer_vectors(config, has_positions)
    return [letters for _, letters in weights]


def _numbers_in(config, has_positions):
    """Numbers of a token from which a layer's heads are made, as they travel along "model"."""
    turned = config.rotary if has_positions else 0
    return 2 * config.latent + turned if config.latent else config.embed


def _sums(config, tokens, ways, number):
    """[(kind, count, bytes)] along "model", of so many tokens of a device: sums of activations."""
    D, again = config.embed, config.remat in ("attention", "all")
    found = 2 * D + sum(count * ((3 + again) * D + _numbers_in(config, has_positions))
                        for count, has_positions in layers_of(config))
    count = (4 + again) * config.layers + 2 + 2 * -(-tokens // CHUNK)
    return [("all-reduce", count, tokens * (number * found + 4 * 3))]


def _pieces(config, tokens, ways, number):
    """The same where tokens are split along "model": gathered before products, scattered after.

    The gradients of what every device adds to its own tokens are summed.
    """
    D, again = config.embed, config.remat != "none"
    gathered, scattered, vectors = 2 * D, 2 * D, (1 + config.bias) * D
    for count, has_positions in layers_of(config):
        into = _numbers_in(config, has_positions) + D
        gathered += count * ((1 + again) * into + 2 * D)
        scattered += count * (2 * D + into + again * D)
        vectors += count * sum(
            numbers(config, [each]) for each in layer_vectors(config, has_positions)
            if not SPLIT & set(each[1]))
    L, size = config.layers, tokens * number
    return [("all-gather", (4 + 2 * again) * L + 2 if not config.latent else None, size * gathered),
            ("reduce-scatter", (4 + again) * L + 2 if not config.latent else None,
             size * scattered // ways),
            ("all-reduce", None, 4 * (vectors + 3 * tokens))]


def _of_own_tokens(config, moved, batch, data, model):
    """Gradients of latents' matrices, of which each device has its own tokens' part: over both."""
    size = 4 * sum(count * numbers(config, [each]) for count, has_positions in layers_of(config)
                   for each in layer_matrices(config, has_positions) if not SPLIT & set(each[1]))
    if batch == 1:
        moved["all-reduce", (model,)] = Moved(None, moved["all-reduce", (model,)].bytes + size)
        return
    moved["all-reduce", (data,)] = Moved(None, moved["all-reduce", (data,)].bytes - size)
    moved["all-reduce", (data, model)] = Moved(None, size)


def with_D(config: DecoderConfig, ways: int):
    """How many numbers on one of `ways` devices have a D: what rows of devices divide."""
    weights = [(layers * count, letters) for layers, has_positions in layers_of(config)
               for count, letters in layer_matrices(config, has_positions)
               + layer_vectors(config, has_positions)]
    return numbers(config, [each for each in weights + ends(config) if "D" in each[1]], ways)


def _again(config, ways):
    """Bytes gathered again in the backward pass: what products need, or all that is made again."""
    found = 0
    for layers, has_positions in layers_of(config):
        weights = layer_matrices(config, has_positions)
        if config.remat == "none":
            weights = weights + [(2, "D")]  # the scales of the norms
        else:
            weights = weights + layer_vectors(config, has_positions)
        last = config.embed if config.remat != "none" and config.bias else 0
        weights = [each for each in weights if "D" in each[1]]
        found += layers * (numbers(config, weights, ways) - last)
    return 4 * found


def _gradients(config, ways, number):
    """Bytes of the gradients that are summed along "batch"; those of norms are float32."""
    norms = (2 * config.layers + 1) * (1 + config.bias) * config.embed
    table = numbers(config, [(1, "VD")], ways)
    return number * (decoder_parameters(config, ways) + table - norms) + 4 * norms


def _gathers(config, ways, number):
    """Weights that are gathered along "batch", those with a D: see `_gradients`."""
    norm, again = (1 + config.bias) * config.embed, config.remat != "none"
    count, size = 3 + config.bias, 4 * norm + 2 * number * numbers(config, [(1, "VD")], ways)
    for layers, has_positions in layers_of(config):
        weights = layer_matrices(config, has_positions) + layer_vectors(config, has_positions)
        weights = [each for each in weights if "D" in each[1]]
        last = again * config.bias  # of a layer's biases the last is not needed again
        one = number * (numbers(config, weights, ways) - 2 * norm) + 4 * 2 * norm
        count += layers * ((1 + again) * len(weights) - last)
        size += layers * ((1 + again) * one - number * last * config.embed)
    return Moved(count, size)
