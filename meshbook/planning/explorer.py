"""Every tensor of a model on a mesh, and what each of its layers communicates in a step.

The explorer on the site is the same in JavaScript; a test compares the two.
"""
from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from meshbook.hlo.collectives import Moved
from meshbook.models.losses import CHUNK
from meshbook.models.minigpt import MiniGPT, MiniGPTConfig
from meshbook.models.vit import ViT, ViTConfig
from meshbook.planning.estimates import PRESETS
from meshbook.sharding import Sharding, axes_of

LAYERS = ("embedding", "block", "head", "optimizer")  # in the order of a step


class Tensor(NamedTuple):
    """One tensor: its layer, its name, which ends with its letters, and where its pieces lie.

    spec: for each dimension the mesh axis that splits it, or None; held, bytes: shape and bytes of
    the piece of one device; is_parameter: else it is an activation.
    """

    layer: str
    name: str
    shape: tuple
    spec: tuple
    held: tuple
    bytes: int
    is_parameter: bool = True


class Exchange(NamedTuple):
    """Collectives of one layer, in one pass of a step, along one mesh axis.

    count: how many; None where the compiler may join them with those of other layers. bytes: of
    their results on one device.
    """

    layer: str
    when: str
    what: str
    kind: str
    axis: str
    count: int | None
    bytes: int


def tensors(config: ViTConfig | MiniGPTConfig, preset: str, mesh: Mapping[str, int], batch: int):
    """The Tensors of a model, those of its blocks once, in float32.

    config, preset, mesh, batch: as in `meshbook.planning.estimates.estimate`, for axes "batch" and
    "model". The shapes and specs of parameters are those of the model, which is traced for such a
    mesh; devices are not needed. Raises ValueError for an unknown preset, and where the mesh does
    not divide sizes.
    """
    if preset not in PRESETS:
        raise ValueError(f"expected one of {', '.join(PRESETS)}; found {preset!r}")
    abstract = AbstractMesh(tuple(mesh.values()), tuple(mesh),
                            axis_types=(AxisType.Explicit,) * len(mesh))
    rules, found = getattr(Sharding, preset)(), list(_parameters(config, preset, abstract))
    for layer, name, shape in _activations(config, batch):
        sharding = NamedSharding(abstract, rules.activation(name.rpartition("_")[2]))
        found.append(_tensor(layer, name, shape, sharding, False))
    return sorted(found, key=lambda each: (LAYERS.index(each.layer), not each.is_parameter))


@functools.lru_cache
def _parameters(config, preset, abstract):
    """The parameters of a model with one block, which stands for all of them."""
    rules, Model = getattr(Sharding, preset)(), MiniGPT if _is_gpt(config) else ViT
    with jax.sharding.use_abstract_mesh(abstract):
        one = dataclasses.replace(config, layers=1)
        model = nnx.eval_shape(lambda: Model(one, rules, rngs=nnx.Rngs(0)))
    found = []
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        x = leaf.get_value()
        name = "/".join(map(str, path[2 * (path[0] == "blocks"):]))
        found.append(_tensor(_layer(path), name, x.shape, x.sharding, True))
    return found


def _is_gpt(config):
    return isinstance(config, MiniGPTConfig)


def _layer(path):
    if path[0] == "blocks":
        return "block"
    return "head" if "head" in path[-1] or path[0] == "norm" else "embedding"


def _tensor(layer, name, shape, sharding, is_parameter):
    spec = (*sharding.spec, *[None] * (len(shape) - len(sharding.spec)))
    held = sharding.shard_shape(shape)
    return Tensor(layer, name, tuple(shape), spec, held, 4 * math.prod(held), is_parameter)


def _activations(config, batch):
    """(layer, name, shape) of the activations that decide what is communicated."""
    T, D, H = config.tokens, config.embed, config.heads
    yield "embedding", "x_BTD", (batch, T, D)
    yield "block", "query_BTHK", (batch, T, H, config.head_size)
    yield "block", "hidden_BTF", (batch, T, config.hidden)
    yield "block", "x_BTD", (batch, T, D)
    if not _is_gpt(config):
        yield "head", "logits_BC", (batch, config.classes)


def layer_exchanges(config: ViTConfig | MiniGPTConfig, preset: str, mesh: Mapping[str, int],
                    batch: int):
    """What each layer communicates in a training step: Exchanges, of one block and of the rest.

    The arguments are those of `tensors`, and so are the errors. Their sum is the traffic of
    `meshbook.planning.estimates.estimate`.
    """
    held = tensors(config, preset, mesh, batch)
    rows, ways = mesh["batch"], 1 if preset == "data_parallel" else mesh["model"]
    is_sharded = preset == "fully_sharded" and rows > 1
    found = list(_along_model(config, batch // rows)) if ways > 1 else []
    if rows > 1:
        found += _gradients(config, held, rows)
    if is_sharded:
        found += _gathers(held, rows)
        if _is_gpt(config):
            found.append(Exchange("optimizer", "update", "squared norms of split gradients",
                                  "all-reduce", "batch", None, 4 * (10 * config.layers + 3)))
    return sorted(found, key=lambda each: (LAYERS.index(each.layer), each.when != "forward"))


def _along_model(config, own):
    tokens = own * config.tokens
    size = 4 * tokens * config.embed  # of x_BTD
    reduce = "all-reduce", "model"
    if _is_gpt(config):
        yield Exchange("embedding", "forward", "embeddings, each from the device that has it",
                       *reduce, 1, size)
    yield Exchange("block", "forward", "partial sums of attention and MLP", *reduce, 2, 2 * size)
    yield Exchange("block", "backward", "gradients of what enters attention and MLP", *reduce, 2,
                   2 * size)
    if _is_gpt(config):
        yield Exchange("head", "forward", "maximum and sums of the softmax, per token", *reduce,
                       2 * -(-tokens // CHUNK), 4 * 3 * tokens)
        yield Exchange("head", "backward", "gradient of the hidden states", *reduce, 1, size)
        yield Exchange("optimizer", "update", "squared norms of split gradients", *reduce, 1,
                       4 * (6 * config.layers + 3))


def _gradients(config, held, rows):
    """All-reduces of each layer's local gradients, of the shape that their products need."""
    whole = collections.Counter()
    for each in held:
        if each.is_parameter:
            whole[each.layer] += each.bytes * (rows if "batch" in each.spec else 1)
    if not _is_gpt(config):  # the class token's gradient is the first of the positions'
        whole["embedding"] -= 4 * config.embed
    for layer, size in whole.items():
        yield Exchange(layer, "backward", "gradients of the weights", "all-reduce", "batch", None,
                       size)
    yield Exchange("head", "forward", "loss and accuracy", "all-reduce", "batch", None, 8)


def _gathers(held, rows):
    """All-gathers of each layer's weights that are split along "batch"."""
    for layer in LAYERS[:3]:
        split = [each for each in held
                 if each.is_parameter and each.layer == layer and "batch" in each.spec]
        if split:
            yield Exchange(layer, "forward", "weights, kept for the backward pass", "all-gather",
                           "batch", len(split), rows * sum(each.bytes for each in split))


def step_total(exchanges: Iterable[Exchange], layers: int):
    """{(kind, (axis,)): Moved} of a step, in which each block does the same.

    A count is None where one of the Exchanges leaves it open.
    """
    moved = {}
    for each in exchanges:
        times, key = layers if each.layer == "block" else 1, (each.kind, (each.axis,))
        count, size = moved.get(key, Moved(0, 0))
        is_open = count is None or each.count is None
        moved[key] = Moved(None if is_open else count + times * each.count,
                           size + times * each.bytes)
    return moved


def notation(tensor: Tensor):
    """A tensor's name as the book writes it: `mlp/w_in[D_batch, F_model]`."""
    name, _, letters = tensor.name.rpartition("_")
    dimensions = [letter + "".join(f"_{axis}" for axis in axes_of(rule))
                  for letter, rule in zip(letters, tensor.spec, strict=True)]
    return f"{name}[{', '.join(dimensions)}]"
