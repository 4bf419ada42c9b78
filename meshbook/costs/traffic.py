"""What a step sends over the links: the collectives that follow from where arrays lie.

A product whose summed dimension is split over a mesh axis leaves each device with a part of a sum;
one whose made dimension is split, with a part of the gradient of what it reads. Both are summed
over the axis; where tokens are split between products, they are scattered instead, and gathered on
the way in. A parameter's gradient is summed over the axes that split the tokens of its product.
Experts, contexts and stages add exchanges of their own.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from meshbook.costs.step import Step, check_slots
from meshbook.costs.turns import turns_of
from meshbook.hlo.collectives import Moved, Traffic
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


def step_traffic(step: Step, number: int = 4, clipped: bool = False, balanced: bool = True):
    """The Traffic of a Step: (kind, axes): Moved(count or None, result bytes).

    Of conditionals those branches count that are taken. number: bytes of an activation that
    travels, and of a weight that is gathered for products; what is summed outside of products has
    4. clipped: whether gradients are clipped by their norm, which takes a number for each leaf that
    is split; balanced: whether the loss knows the loads of experts. A count is None where the
    compiler merges collectives as it likes. Raises ValueError for experts without a capacity.
    """
    found = added(step, sent(step, number, clipped, balanced), lambda each: (each.kind, each.axes))
    return Traffic(found, step.plan.sizes)


def added(step: Step, events: Iterable[Sent], key: Callable):
    """{key(each): Moved} of what goes over links, each with its axes in the order of the mesh."""
    order, moved = list(step.layout.mesh), {}
    for each in events:
        if each.axes and each.bytes:
            each = each._replace(axes=tuple(sorted(each.axes, key=order.index)))
            moved.setdefault(key(each), []).append(each)
    return {name: Moved(
        None if any(each.count is None for each in found) else round(sum(
            each.count for each in found)), round(sum(each.bytes for each in found)))
        for name, found in moved.items()}


def sent(step: Step, number: int = 4, clipped: bool = False,
         balanced: bool = True) -> Iterator[Sent]:
    """All that a step sends: see `step_traffic`."""
    check_slots(step)
    yield from _products(step, number, clipped)
    for each in step.placed:
        if each.row.is_parameter or each.row.of:
            yield from _parameter(step, each, number)
    yield from _experts(step, number, balanced)
    yield from _context(step, number)
    yield from _stages(step, number)
    yield from _scalars(step, clipped)


def in_layers(step: Step):
    """How often a device's layers exchange what a microbatch needs, in a step."""
    plan = step.plan
    if plan.stage > 1 and plan.schedule == "gpipe":
        return turns_of("gpipe", plan.stage, plan.microbatches).permutes / 2
    return plan.microbatches


def _products(step, number, clipped):
    """What goes around products: sums of what they make, and of gradients of what they read."""
    over, read = step.layout.over, {}
    counted = _is_counted(step, clipped)
    for each in step.placed:
        row, letters = each.row, each.row.tokens + each.row.shape
        times = each.layers * (in_layers(step) if each.in_layers else step.plan.microbatches)
        if row.summed and (axes := over(letters, row.summed)):
            yield from _made(step, each, axes, times, number, counted)
        if row.reads and (axes := over(letters, row.made)):
            together = read.setdefault((each.flags, row.reads.partition("/")[0]), set())
            if row.reads not in together:
                count = 0 if together else times  # names before a "/" travel as one
                yield from _read(step, each, axes, times, number, count if counted else None)
                together.add(row.reads)
        if row.inside and (axes := over(row.inside, row.inside)):
            yield Sent(each.part, "backward", GRADIENTS, "all-reduce", axes, None,
                       times / each.layers * 4 * each.used)


def _is_counted(step, clipped):
    """Whether the number of collectives along "model" is known: the compiler merges none."""
    kinds = {each.flags for each in step.placed if each.flags}
    of_latents = step.sizes.get("R") and step.layout.over("BTD", "T")
    by_hand = step.layout.rules.gradients is not None
    return len(kinds) == 1 and not (by_hand and clipped or of_latents or step.sizes.get("E"))


def _made(step, each, axes, times, number, counted):
    """What a product makes is a part of a sum on each device: added up, or scattered by tokens."""
    split, row = step.layout.over("BTD", "T"), each.row
    again = times * (each.in_layers and _is_made_again(step, row))
    parts, whole = (number * step.numbers_of(tokens + row.made) for tokens in ("BT", "BW"))
    scatters, what = bool(set(axes) & set(split)), f"output of {row.title}"
    kind, size = ("reduce-scatter", parts) if scatters else ("all-reduce", whole)
    for when, words, kind, often, size in (
            ("forward", what, kind, times, size), ("backward", f"{what}, again", kind, again, size),
            ("backward", f"gradient of the {what}", "all-gather", times * scatters, whole)):
        yield Sent(each.part, when, words, kind, axes, often if counted else None, often * size)


def _is_made_again(step, row):
    """Whether a sum is made again: products that are kept are sums already, but not by hand."""
    by_hand = step.plan.stage > 1 or step.layout.over("BTD", "T")
    policy = "attention" if step.remat == "products" and by_hand else step.remat
    return policy in row.again.split() and row.tokens == "BT"  # experts' are added up by token


def _read(step, each, axes, times, number, count):
    """The gradient of what products read is a part of a sum; tokens are gathered for them."""
    split, row = step.layout.over("BTD", "T"), each.row
    number = 4 if row.exact else number
    parts, whole = (number * step.numbers_of(tokens + row.summed) for tokens in ("BT", "BW"))
    what = f"input of the {row.reads.partition('/')[0]}"
    gradient = each.part, "backward", f"gradient of the {what}"
    if set(axes) & set(split):
        again = each.in_layers and step.remat != "none"
        yield Sent(each.part, "forward", what, "all-gather", axes, count, times * whole)
        yield Sent(each.part, "backward", f"{what}, again", "all-gather", axes,
                   count and count * again, times * again * whole)
        yield Sent(*gradient, "reduce-scatter", axes, count, times * parts)
    else:
        yield Sent(*gradient, "all-reduce", axes, count, times * whole)


def _parameter(step, each, number):
    """A parameter that is gathered, and the sum of its gradient, for each of its uses."""
    plan, over, row, shape = step.plan, step.layout.over, each.row, each.shape
    staged, q = plan.stage > 1, each.used or _size(step, each)
    tokens = over("L" * each.in_layers + row.tokens + row.shape, row.tokens)
    kept, named = over(shape, shape), step.layout.named(shape, shape, "moments")
    owned = tuple(axis for axis in over(shape, shape, "moments") if axis not in kept)
    by_hand = step.layout.rules.gradients is not None or staged
    if by_hand and set(named) - set(step.layout.named(shape, shape)):
        if row.is_parameter:
            yield from _by_hand(step, each, number, owned, tokens, staged)
        return
    once = by_hand or staged or plan.microbatches > 1
    if row.of and once and not owned:
        return
    width = 4 if row.exact or once else number  # sums over microbatches are float32
    count = None if step.table.stacked else 0
    for axes in _summed_over(step, row, tokens) * (row.travels or staged):
        yield Sent(each.part, "backward", GRADIENTS, "all-reduce", axes, count, width * q)
    if owned:
        again = each.in_layers and step.table.stacked and step.remat != "none" and (
            row.backward != "never")
        for when, what, times in ("forward", WEIGHTS, 1), ("backward", f"{WEIGHTS}, again", again):
            yield Sent(each.part, when, what, "all-gather", owned, times * each.layers,
                       times * width * q)


def _size(step, each):
    """Numbers of another row's parameter on one device."""
    return math.prod(map(step.sizes.get, each.row.of)) // step.layout.parts(each.row.of)


def _summed_over(step, row, tokens):
    """The axes of a gradient's sums: those of a vector over rows and over tokens are apart."""
    along = step.layout.over("BTD", "T")
    if not row.summed and set(tokens) & set(along):
        return [tuple(axis for axis in tokens if axis not in along), along]
    return [tokens]


def _by_hand(step, each, number, owned, tokens, staged):
    """Gathered where it is used, its gradient scattered where its moments lie."""
    plan, rules, q, part = step.plan, step.layout.rules, each.used, each.part
    parts = plan.microbatches if plan.is_fully_sharded and not staged else 1
    gathers = parts if each.in_layers else 1  # what stands outside of the layers stays gathered
    width = number if plan.is_fully_sharded else 4  # what was updated, or what products need
    again = bool(rules.regather) and plan.is_fully_sharded and each.in_layers and (
        each.row.backward == "always" or each.row.backward == "again" and step.remat != "none")
    first = ("forward", WEIGHTS) if plan.is_fully_sharded else ("update", f"updated {WEIGHTS}")
    yield Sent(part, *first, "all-gather", owned, None, gathers * width * q)
    yield Sent(part, "backward", f"{WEIGHTS}, again", "all-gather", owned, None,
               parts * again * width * q)
    rest, own = tuple(axis for axis in tokens if axis not in owned), step.layout.devices(owned)
    for kind, axes in ("reduce-scatter", owned), ("all-reduce", rest):
        yield Sent(part, "backward", GRADIENTS, kind, axes, None, parts * 4 * q // own)


def _experts(step, number, balanced):
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


def _context(step, number):
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


def _stages(step, number):
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


def _scalars(step, clipped):
    """Loss and accuracy, what the loss sums over the vocabulary, norms of split gradients."""
    plan, over, found = step.plan, step.layout.over, {}
    has_experts = getattr(step.config, "experts", None) is not None
    rows = over("BW", "BW") + ("stage",) * (plan.stage > 1)
    # the compiler takes them out of the loop over microbatches, with experts all but the first
    times = min(plan.microbatches, 2) if has_experts and plan.stage == 1 else 1
    yield Sent("head", "forward", "loss and accuracy", "all-reduce", rows,
               None if step.table.stacked else 1, times * 2 * 4)
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
