"""What a step sends that is no sum of a product: of experts, contexts, stages, and of the loss."""
from __future__ import annotations

import math
from typing import NamedTuple

from meshbook.costs.step import Step
from meshbook.costs.turns import turns_of
from meshbook.models.losses import CHUNK

WEIGHTS, GRADIENTS, KEYS = "weights", "gradients of weights", "keys and values"
LOADS = 4  # numbers of an expert that a layer sums: choices before and after, means of scores


class Sent(NamedTuple):
    """Collectives of one kind along mesh axes: how many, or None, and bytes of their results.

    part: of the model, one of `tables.ALL_PARTS`, of which all layers of one device count; when:
    "forward", "backward" or "update"; what: is sent, in words. A count of 0 is that of what travels
    together with something else.
    """

    part: str
    when: str
    what: str
    kind: str
    axes: tuple
    count: float | None
    bytes: float


def in_layers(step: Step):
    """How often a device's layers exchange what a microbatch needs, in a step."""
    plan = step.plan
    if plan.stage > 1 and plan.schedule == "gpipe":
        return turns_of("gpipe", plan.stage, plan.microbatches).permutes / 2
    return plan.microbatches


def of_experts(step: Step, number: int, balanced: bool):
    """Slots that travel to experts and back, and what a layer sums of their loads."""
    experts, plan = getattr(step.config, "experts", None), step.plan
    if experts is None:
        return
    again = (step.remat != "none") + (plan.stage > 1 and plan.schedule == "lockstep")
    part, over = "layers with experts", step.layout.over
    times = in_layers(step) * step.layers[part]
    slots = number * step.microbatch * math.prod(step.sizes[letter] for letter in "EZD")
    what = "tokens to their experts and back"
    for when, words, count in (
            ("forward", what, 2 * times), ("backward", f"{what}, again", 2 * again * times),
            ("backward", "gradients of these tokens", 2 * times)):
        yield Sent(part, when, words, "all-to-all", over("BZED", "E"), count, count * slots)
    loads = LOADS + again if plan.stage == 1 else bool(experts.auxiliary or experts.biased)
    yield Sent(part, "forward", "loads of experts", "all-reduce", over("BT", "BT"), None,
               balanced * times * 4 * loads * experts.count)


def of_context(step: Step, number: int):
    """Keys and values of other devices: in a ring, gathered, or heads for tokens (Ulysses)."""
    ways = step.plan.context
    if ways == 1:
        return
    keys, queries = step.numbers_of("BTGK"), step.numbers_of("BTHK")
    passes = 1 + (step.remat in ("products", "all"))  # forward, with the one that is done again
    kept = step.remat == "attention"  # what was found is kept, queries and keys are not
    size, around, both = number * keys, 2 * (ways - 1), number * (queries + keys)
    again, back, heads = f"{KEYS}, again", f"gradients of {KEYS}", "heads for tokens"
    lines = {
        "ring": (("forward", KEYS, "collective-permute", around, around * size),
                 ("backward", again, "collective-permute", around * passes, around * passes * size),
                 ("backward", back, "collective-permute", around, around * 4 * keys)),
        "gather": (("forward", KEYS, "all-gather", 2, 2 * ways * size),
                   ("backward", again, "all-gather", 2, 2 * ways * size),  # serves both passes
                   ("backward", back, "reduce-scatter", 2, 2 * 4 * keys)),
        "ulysses": (("forward", heads, "all-to-all", 4, 2 * both),
                    ("backward", f"{heads}, and gradients", "all-to-all", 4 * passes + 3 * kept,
                     2 * passes * both + kept * (both + size)))}
    for part, layers in step.layers.items():
        times = in_layers(step) * layers
        for when, what, kind, count, moved in lines[step.plan.method]:
            yield Sent(part, when, what, kind, ("context",), times * count, times * moved)


def of_stages(step: Step, number: int):
    """Permutes between stages, and what the first and the last stage give to all."""
    plan, m = step.plan, step.plan.microbatches
    if plan.stage == 1:
        return
    one, axes = number * step.numbers_of("BTD"), ("stage",)
    turns = turns_of(plan.schedule, plan.stage, m).permutes / 2
    for when, what in ("forward", "activations to the next stage"), (
            "backward", "their gradients to the stage before"):
        yield Sent("stages", when, what, "collective-permute", axes, turns, turns * one)
    norm = sum(each.used for each in step.placed if each.shape == "D")
    for part, when, what, size in (
            ("head", "forward", "output of the last stage", m * one),
            ("head", "backward", GRADIENTS, 4 * norm),
            ("embedding", "backward", "gradient of the input of the first stage", m * one)):
        yield Sent(part, when, what, "all-reduce", axes, None, size)


def of_scalars(step: Step, clipped: bool):
    """Loss and accuracy, what the loss sums over the vocabulary, norms of split gradients."""
    plan, over, found = step.plan, step.layout.over, {}
    has_experts = getattr(step.config, "experts", None) is not None
    rows = over("BW", "BW") + ("stage",) * (plan.stage > 1)
    # the compiler takes them out of the loop over microbatches, with experts all but the first, and
    # not those of images
    times = min(plan.microbatches, 2) if has_experts and plan.stage == 1 else 1
    if "V" not in step.sizes:
        times = plan.microbatches
    parts = plan.microbatches if plan.microbatches > 1 else 0  # whose gradients are summed at once
    yield Sent("head", "forward", "loss and accuracy", "all-reduce", rows,
               None if step.table.stacked else 1 + parts, times * 2 * 4)
    if "V" in step.sizes:
        tokens = step.numbers_of("BW")
        count = plan.microbatches * 2 * -(-tokens // CHUNK)
        yield Sent("head", "forward", "maximum and sums of the softmax", "all-reduce",
                   over("VD", "V"), count, plan.microbatches * 3 * 4 * tokens)
    for each in step.placed if clipped else ():
        if each.row.is_parameter and each.row.travels:
            for axis in over(each.shape, each.shape, "moments"):
                found[axis] = found.get(axis, 0) + each.leaves
    for axis, leaves in found.items():
        yield Sent("optimizer", "update", "squared norms of gradients", "all-reduce", (axis,),
                   1 if axis == "model" else None, 4 * leaves)
