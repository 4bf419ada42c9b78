"""What a step sends over the links: the collectives that follow from where arrays lie.

A product whose summed dimension is split over a mesh axis leaves each device with a part of a sum;
one whose made dimension is split, with a part of the gradient of what it reads. Both are summed
over the axis; where tokens are split between products, they are scattered instead, and gathered on
the way in. A parameter's gradient is summed over the axes that split the tokens of its product.
Experts, contexts and stages add transfers of their own (`meshbook.costs.transfers`).
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from meshbook.costs.step import Step, check_slots
from meshbook.costs.transfers import (
    GRADIENTS, WEIGHTS, Sent, in_layers, of_context, of_experts, of_scalars, of_stages
)
from meshbook.hlo.collectives import Moved, Traffic

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
    yield from of_experts(step, number, balanced)
    yield from of_context(step, number)
    yield from of_stages(step, number)
    yield from of_scalars(step, clipped)


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
    once = by_hand or plan.microbatches > 1
    if row.of and once:
        return
    width = 4 if row.exact or once else number  # sums over microbatches are float32
    stacked = step.table.stacked
    count, times = None if stacked else 0, 1 + plan.microbatches * _is_summed_at_once(step, row)
    for axes in _summed_over(step, row, tokens) * (row.travels or staged or not stacked and once):
        yield Sent(each.part, "backward", GRADIENTS, "all-reduce", axes, count, times * width * q)
    if owned:
        again = each.in_layers and stacked and step.remat != "none" and (
            row.backward != "never") and not once
        leaves = each.layers if each.in_layers and not (once and stacked) else 1
        for when, what, times in ("forward", WEIGHTS, 1), ("backward", f"{WEIGHTS}, again", again):
            yield Sent(each.part, when, what, "all-gather", owned, times * leaves,
                       times * width * q)


def _is_summed_at_once(step, row):
    """Whether the ViT and MiniGPT sum a gradient in each part of a batch, before all parts are."""
    return step.plan.microbatches > 1 and not (
        step.table.stacked or row.summed or not row.travels or "V" in row.shape)


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
