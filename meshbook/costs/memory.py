"""What one device holds in a step with Adam, by what it is, each where it is most."""
from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from meshbook.costs import tables
from meshbook.costs.plans import Plan
from meshbook.costs.rows import chosen
from meshbook.costs.step import Step, check_slots
from meshbook.costs.tiles import tiled, token_rows
from meshbook.costs.turns import turns_of
from meshbook.models.losses import CHUNK
from meshbook.parallel.context import BLOCK


class Size(NamedTuple):
    """How arrays are stored: in tiles, as on a TPU, or as they are; bytes of the narrow numbers,
    and of those that a layer keeps for products.
    """

    tiles: bool
    number: int
    read: int

    def numbers(self, letters: str, sizes: list):
        """Numbers that an array takes: in tiles (B, T, width) has tokens or rows above width, and
        an array of heads has its tokens last.
        """
        first, *others = sizes
        if not self.tiles or not others:
            return math.prod(sizes)
        if len(others) == 1:
            return tiled(first, *others)
        if letters[1] == "H":  # scores, and what is one number of a head and token
            return first * tiled(*others)
        if letters[1] == "E":  # slots, those of all experts one after the other
            return tiled(math.prod(sizes[:-1]), sizes[-1])
        if len(others) == 2:
            return token_rows(first, *others)
        tokens, *width = others
        return first * tiled(math.prod(width), tokens)


def size_of(step: Step, tiles: bool):
    """The Size of a step's arrays: products of the ViT and of MiniGPT are rounded on a TPU.

    A TPU's products take bfloat16 unless they are told otherwise. A loop over layers that keeps
    everything keeps what they read so, one that makes it again makes it in its dtype.
    """
    number = np.dtype(step.config.dtype).itemsize if step.table.stacked else 2
    narrow = tiles and step.remat == "none" and step.plan.stage == 1
    return Size(tiles, number, 2 if narrow else number)


@functools.lru_cache(8192)
def _bytes(rows, flags, config, layout, batch, size):
    """Bytes of Kept rows on one device, of so many rows of text or images on all."""
    total, known = 0, tables.sizes_of(config) | {"B": batch}
    for each in chosen(rows, flags):
        sizes = [-(-known[letter] // layout.devices(layout.over(each.letters, letter)))
                 for letter in each.letters]
        width = each.bytes or (size.read if each.read else size.number)
        total += each.count * width * size.numbers(each.letters, sizes)
    return total


def kept_bytes(step: Step, policy: str, tiles: bool = True, scores: bool = False):
    """Bytes that a device's layers keep of a microbatch by a policy of rematerialisation.

    scores: whether scores count where they are computed block by block and no kernel is fused.
    """
    size, rows, total = size_of(step, tiles), step.rows // step.plan.microbatches, 0
    for flags, layers in layers_of(step).items():
        also = {"scores"} if scores and "fused" not in flags else set()
        total += layers * _bytes(step.table.kept[policy], flags | _flags(step.plan) | also,
                                 step.config, step.layout, rows, size)
    return total


def layers_of(step: Step):
    """{flags: layers of one device that have them}."""
    return {each.flags: each.layers for each in step.placed if each.flags}


class Memory(NamedTuple):
    """Bytes of one device: see `step_memory`."""

    parameters: int
    moments: int
    inputs: int
    gathered: int
    gradients: int
    activations: int
    layer: int
    logits: int


def step_memory(step: Step, tiles: bool = True, chunk: int = CHUNK):
    """The Memory of a step, each where it is most.

    Weights that are gathered, or copied to the products' dtype, once for all microbatches, stand
    beside the stored ones. In a loop over microbatches or turns there are the sums of the gradients
    and those of one. What goes into the stages of a pipeline and comes out of them is there of all
    microbatches. layer: of one layer whose backward pass runs, on top of what all of them keep.
    tiles: as on a TPU; chunk: tokens of one device whose logits are there at once. Raises
    ValueError for experts without a capacity.
    """
    check_slots(step)
    plan, numbers, size = step.plan, step.numbers, size_of(step, tiles)
    rows = step.rows // plan.microbatches
    fill = lambda table, flags: _bytes(table, flags | _flags(plan), step.config, step.layout, rows,
                                       size)
    layers = layers_of(step)
    inputs = plan.microbatches * fill(step.table.inputs, frozenset())
    if plan.stage > 1 and plan.schedule == "gpipe":
        both = size.numbers("BD", [plan.microbatches * step.numbers_of("BW"), step.sizes["D"]])
        inputs += 2 * size.number * both
    return Memory(4 * numbers["stored"], 8 * numbers["moments"], inputs,
                _gathered(step, size, layers), 4 * _gradients(step),
                _activations(step, size, layers, fill), _layer(step, size, layers, fill),
                _logits(step, size, chunk))


def _flags(plan):
    """What a plan adds to the flags of its layers."""
    exchanged = plan.context > 1 and plan.method == "ulysses"
    return frozenset(["model"] * (plan.model > 1) + ["exchanged"] * exchanged)


def loops(plan: Plan):
    """Whether a plan's step is a loop over microbatches or turns."""
    return plan.microbatches > 1 or plan.stage > 1


def _is_scattered(step):
    """Whether gradients of layers are split over the rows as soon as a layer has made them."""
    by_hand = step.layout.rules.gradients is not None
    return step.numbers["gradients"] < step.numbers["used"] and step.plan.stage == 1 and (
        by_hand or not loops(step.plan)) and step.table.stacked


def _gradients(step):
    """Numbers of gradients; in a loop there are those of one turn beside their sums."""
    if not loops(step.plan):
        return step.numbers["gradients"]
    return 2 * step.numbers["gradients" if _is_scattered(step) else "used"]


def _gathered(step, size, layers):
    """Bytes of weights for products: all, or of one turn of the loop where they are made again.

    Weights that are not gathered are copied where products have narrower numbers. A TPU gathers
    what its products read.
    """
    plan, rules = step.plan, step.layout.rules
    split = [each for each in step.placed if each.used != each.stored]
    if not step.table.stacked:
        return size.number * sum(each.used for each in split)
    made = step.placed if size.number < 4 else split
    again = step.remat != "none" if rules.gradients is None else rules.regather
    used = sum(each.used for each in made)
    by_layer = plan.stage == 1 if rules.gradients is not None else not loops(plan)
    if split and again and by_layer:
        inside = sum(each.used for each in made if each.in_layers)
        used += inside // min(layers.values()) - inside
    return (2 if size.tiles else size.number) * used


def _activations(step, size, layers, fill):
    """Bytes that wait for the backward pass, of all microbatches that a schedule has begun."""
    plan, waits = step.plan, kept_bytes(step, step.remat, size.tiles)
    if plan.stage == 1:
        return waits
    turns = turns_of(plan.schedule, plan.stage, plan.microbatches)
    begun = turns.kept
    if plan.schedule == "lockstep":  # of the others only what came into the stage
        return waits + begun * fill(step.table.kept["all"], next(iter(layers)))
    more = 0
    if turns.waiting and step.remat != "none":  # what B keeps for W, and what is at work
        more = (turns.waiting + 1) * _for_weights(step, size)
    return begun * waits + more


def _for_weights(step, size):
    """Bytes from which the gradients of weights are made: what products read, gradients of what
    they make.
    """
    read, total = set(), 0
    for each in step.placed:
        row = each.row
        if each.in_layers and row.is_product and row.is_parameter:
            name = each.flags, row.reads or row.letters
            if name not in read:
                total += each.layers * step.numbers_of("BT" + row.summed)
                read.add(name)
            total += each.layers * row.number(each.flags) * step.numbers_of("BT" + row.made)
    return size.number * total


def _layer(step, size, layers, fill):
    """Bytes of the layer whose backward pass runs: all that it makes, if it is made again.

    Its MLP goes back first, then its attention. Where a scan goes back over a period of layers, the
    products for gradients of weights are put off to its end: of the other layers there are hidden
    units, and the gradients of these.
    """
    table = step.table
    if not table.stacked:
        again = step.remat != "none"
        return again * max(fill(table.kept["none"], flags) - fill(table.kept[step.remat], flags)
                           for flags in layers)
    part = lambda name, flags: fill(table.working[name], flags)
    most = max(part("layer", flags) + max(
        part("MLP", flags), part("attention", flags) + _blocks(step, flags, size))
        for flags in layers)
    hidden = size.numbers("BF", [step.numbers_of("BW"), step.sizes["F"] // step.layout.parts("F")])
    most += 2 * size.number * hidden * (sum(layers.values()) // min(layers.values()) - 1)
    if _is_scattered(step):  # before they are scattered: of the table, and of a period
        most += 4 * sum(each.used // (min(layers.values()) if each.in_layers else 1)
                        for each in step.placed if each.in_layers or each.row.shape == "VD")
    return most


def _blocks(step, flags, size):
    """Bytes of attention in blocks where it goes back: two blocks of scores of all heads, gradients
    in float32, and the keys and values of other devices.

    A ring has the gradients of a device's keys and values, and others that arrive; a device that
    gathered has those of all.
    """
    if "blocks" not in flags or "fused" in flags:
        return 0
    plan, sizes, ways = step.plan, step.sizes, step.plan.context
    heads = sizes["H"] // step.layout.parts("H") // (ways if plan.method == "ulysses" else 1)
    side = min(BLOCK, sizes["T"] // ways)
    of_keys = {"ring": 2 * 8, "gather": ways * (2 * size.number + 8), "ulysses": 8}[plan.method]
    return (2 * 4 * step.microbatch * heads * side * side + 4 * step.numbers_of("BTHK")
            + (of_keys if ways > 1 else 8) * step.numbers_of("BTGK"))


def _logits(step, size, chunk):
    """Bytes of the logits, of a chunk or of all, with the gradient of the head."""
    row = next(each.row for each in step.placed if each.row.reads == "head")
    count, tokens = step.numbers_of(row.made), step.numbers_of(row.tokens)
    if step.sizes.get("V"):
        tokens, head = min(tokens, chunk), size.numbers("DV", [step.sizes["D"], count])
    else:
        head = sum(each.used for each in step.placed[-len(step.table.last):])
    return (step.table.logits or size.number) * size.numbers("BV", [tokens, count]) + 4 * head


def zero_state(stage: int, parameters: int, devices: int, narrow: bool = False):
    """{what: bytes} of the training state on one device, as this stage of ZeRO splits it.

    stage: 0 for data parallelism, or 1 to 3; parameters: those that the devices along "batch"
    divide, as this book's rules divide what has a D. All is float32, and Adam has two moments.
    narrow: weights and gradients in bfloat16, with "master weights" in float32 beside the moments.
    Raises ValueError for another stage.

    Source: Rajbhandari et al. 2020, section 3.1 (2 + 2 + 12 bytes for a parameter).
    """
    if stage not in range(4):
        raise ValueError(f"expected stage 0, 1, 2 or 3 of ZeRO; found {stage}")
    number = 2 if narrow else 4
    each = {"parameters": (number, 3), "gradients": (number, 2), "moments": (8, 1)}
    if narrow:
        each["master weights"] = 4, 1
    return {what: size * parameters // (devices if stage >= first else 1)
            for what, (size, first) in each.items()}
