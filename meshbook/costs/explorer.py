"""Every tensor of a model on a mesh, and what each part of the model sends in a step.

The explorer on the site is the same in JavaScript; a test compares the two.
"""
from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from meshbook.costs.plans import PRESETS, Plan
from meshbook.costs.ranking import STAGED, WHOLE, impossible
from meshbook.costs.step import Step, describe
from meshbook.costs.tables import ALL_PARTS
from meshbook.costs.traffic import added, sent
from meshbook.costs.transfers import Sent
from meshbook.models.decoder_config import DecoderConfig
from meshbook.models.expert_layers import JAXFORMER
from meshbook.models.minigpt import MiniGPTConfig
from meshbook.models.vit import ViTConfig

MODELS = {  # of the form on the site: config, mesh axes
    "ViT": (ViTConfig(), ("batch", "model")), "MiniGPT": (MiniGPTConfig(), ("batch", "model")),
    "Decoder": (DecoderConfig(groups=4), ("batch", "stage", "context", "model")),
    "JAXformer": (DecoderConfig.jaxformer(experts=JAXFORMER),
                  ("batch", "expert", "stage", "model"))}
OF_ALL = ("data_parallel", "tensor_parallel", "fully_sharded")  # presets known of every model
PASSES = ("forward", "backward", "update")  # of a step, in this order


class Tensor(NamedTuple):
    """A parameter, or an activation of a microbatch, and the piece of it that one device holds.

    part: of the model, one of `meshbook.costs.tables.ALL_PARTS`; name: of the parameter in the
    model, or of the one whose product makes the activation; letters, shape: its dimensions; spec:
    for each of them the mesh axes that split it; held, bytes: shape and bytes of the piece; arrays:
    of the model that are such a parameter, or layers that make such an activation.
    """

    part: str
    name: str
    letters: str
    shape: tuple
    spec: tuple
    held: tuple
    bytes: int
    arrays: int
    is_parameter: bool


def explored(config: Any, plan: Plan, rows: int):
    """The Step of a plan that the explorer knows.

    Arguments as of `meshbook.costs.step.describe`. Raises ValueError that says why a plan is not
    possible, and for presets whose bytes no program of this book confirms.
    """
    if why := impossible(config, plan, rows) or _unknown(config, plan):
        raise ValueError(why)
    return describe(config, plan, rows)


def known_presets(config: Any, plan: Plan):
    """(of what kind of plan a model's is, the presets whose bytes are known with such a plan)."""
    if not isinstance(config, DecoderConfig):
        return "of this model", OF_ALL
    if plan.stage > 1:
        return "in stages", ("data_parallel", *STAGED)
    if config.experts:
        return "with experts", ("data_parallel", *WHOLE)
    if plan.microbatches > 1:
        return "of microbatches", ("data_parallel", "fully_sharded", *WHOLE)
    return "on such a mesh", tuple(PRESETS)


def _unknown(config, plan):
    kind, known = known_presets(config, plan)
    return "" if plan.rules in known else (
        f"bytes {kind} are known with {', '.join(known)}; found {plan.rules}")


def parameters(step: Step, kind: str = "parameters"):
    """The Tensors of a model's parameters, in float32.

    kind: "gradients" or "moments" for where those lie, which have the parameters' shapes.
    """
    return [_parameter(step, each, kind) for each in step.placed if each.row.is_parameter]


def _parameter(step, each, kind):
    stacked = "L" * (each.in_layers and step.table.stacked)
    layers = each.layers * step.layout.parts("L") // each.leaves
    letters = stacked + each.row.name.removeprefix(f"{each.row.title}_")
    return _tensor(step, each, letters, kind, 4, each.leaves, L=layers)


def activations(step: Step):
    """The Tensors that parameters make of a microbatch: of several products of one array, one.

    Not the logits of texts, which the loss makes in chunks of tokens.
    """
    return [_activation(step, each) for each in step.placed
            if each.row.is_parameter and each.row.output and "V" not in each.row.output]


def _activation(step, each):
    number, layers = np.dtype(step.config.dtype).itemsize, each.layers
    if each.in_layers:
        layers *= step.layout.parts("L")
    return _tensor(step, each, each.row.output, "activations", number, layers,
                   B=step.rows // step.plan.microbatches)


def _tensor(step, each, letters, kind, number, arrays, **more):
    sizes = step.sizes | {"S": each.row.number(each.flags)} | more
    shape = tuple(sizes[letter] for letter in letters)
    spec = tuple(step.layout.named(letters, letter, kind) for letter in letters)
    held = tuple(size // step.layout.devices(axes) for size, axes in zip(shape, spec))
    return Tensor(each.part, each.row.name, letters, shape, spec, held, number * math.prod(held),
                  arrays, kind != "activations")


def exchanges(step: Step, clipped: bool = False):
    """What each part of a model sends in a step, [Sent]: lines of the same words as one.

    Activations and gathered weights travel in the config's dtype. clipped: whether gradients are
    clipped by their norm. The sum is that of `meshbook.costs.traffic.step_traffic`.
    """
    events = sent(step, np.dtype(step.config.dtype).itemsize, clipped)
    found = [Sent(*line, *moved) for line, moved in added(
        step, events, lambda each: each[:5]).items()]
    return sorted(found, key=lambda each: (ALL_PARTS.index(each.part), PASSES.index(each.when)))


def notation(tensor: Tensor):
    """A tensor's name as the book writes it: `mlp/w_in[D_batch, F_model]`.

    That of an activation is `mlp/w_in makes [B_batch, T, F_model]`.
    """
    dimensions = ["_".join((letter, *axes)) for letter, axes in zip(tensor.letters, tensor.spec)]
    makes = "" if tensor.is_parameter else " makes "
    return f"{tensor.name.rpartition('_')[0]}{makes}[{', '.join(dimensions)}]"
