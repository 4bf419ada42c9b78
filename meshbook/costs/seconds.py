"""How long a step takes on one device: its parts, one after the other.

A chip runs one operation after the other, so a step's parts are added: products, by the FLOPs that
the matrix units spend (on a GPU: execute); every other array, by the bytes that go to memory and
back; random numbers of dropout, by the vector units; and collectives, by the links of their axes,
which nothing hides.
What stands in a pipeline's turns is multiplied by the turns, those for nothing among them.
"""
from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshbook.costs.devices import Device
from meshbook.costs.machines import Group, along_all, link_seconds
from meshbook.costs.memory import kept_bytes, size_of, step_memory
from meshbook.costs.step import Step
from meshbook.costs.traffic import step_traffic
from meshbook.costs.turns import passes_of, slots_of
from meshbook.costs.work import least_work, step_work
from meshbook.hlo.clock import LANES

# Eight of ten published times of programs on TPUs lie between these multiples of their compiler's
# clock (results/clock.json), which the estimate follows, and all published steps on GPUs between
# those of their bounds, added up (results/published-steps.toml).
OF_ESTIMATE, OF_BOUNDS = (0.62, 1.7), (1.3, 2.5)
DRAWN = 32  # steps of a vector unit for an element: 20 rounds of Threefry for four, and a test


def bytes_moved(step: Step, tiles: bool = True):
    """{what: bytes} to and from the memory of one device in a step with Adam.

    Every array that a layer makes is written once and read once; in the backward pass it is read
    again, and its gradient is written and read. Scores are arrays, too, but in a fused kernel.
    Where layers are made again, the first pass moves only what products make or read; the rest is
    fused with them. What is kept goes into a stack of all layers and comes out of it; in a table of
    slots all that is kept passes through a conditional in every slot. Each microbatch reads the
    weights in every pass and adds to the gradients, which are float32.
    """
    plan, numbers, number = step.plan, step.numbers, size_of(step, tiles).number
    forward, redone, backward = passes_of(plan)
    m, again, slots = plan.microbatches, redone * (step.remat != "none"), slots_of(plan)
    passes, first = (2 * slots, 0) if slots else (2 * again + 3 * backward, 2 * forward)
    made = lambda policy: m * kept_bytes(step, policy, tiles, scores=True)
    stacked = m * kept_bytes(step, step.remat, tiles) * forward
    if slots:
        stacked = m * slots * step_memory(step, tiles).activations
    can_keep = step.remat != "none" and "products" in step.table.kept
    begun = made("products" if can_keep else "none")
    logits = step.numbers_of("BTV") if "V" in step.sizes else 0
    return {"activations": made("none") * passes + begun * first, "copies": 2 * stacked,
            "weights": m * number * numbers["used"] * (forward + again + backward),
            "gradients": 2 * 4 * numbers["used"] * m * backward,
            "update": 8 * 4 * numbers["stored"],
            "logits": 4 * 4 * m * logits}


def bytes_at_least(step: Step, tiles: bool = True):
    """Bytes to and from the memory of one device in a step with Adam, at the least.

    What waits for the backward pass is written once and read once; logits need not be, a compiler
    may fuse them into the loss. The weights are read forward and backward; Adam reads weights,
    gradients and both moments, and writes three of them back; the gradients had to be written.
    """
    held = step_memory(step, tiles)
    kept = step.plan.microbatches * kept_bytes(step, step.remat, tiles)
    return 2 * (kept + (held.gathered or held.parameters)) + 8 * held.parameters


def numbers_drawn(step: Step):
    """Random numbers that one device draws for dropout: those of its own rows and layers."""
    forward, redone, _ = passes_of(step.plan)
    passes = slots_of(step.plan) or forward + redone * (step.remat != "none")
    layers = step.config.layers / step.plan.stage
    rows = step.rows / step.layout.parts("B") if step.config.dropout else 0
    return passes * rows * step.sizes["T"] * step.sizes["D"] * 2 * layers


def step_seconds(step: Step, device: Device, groups: Mapping[str, Group]):
    """{what: seconds} of a step: "products", "memory", "random", and one for each axis of links.

    groups: of `meshbook.costs.machines.Machine.groups`. Raises ValueError for dropout on a device
    whose clock is not known.
    """
    cycles = numbers_drawn(step) * DRAWN / LANES
    if cycles and not device.clock:
        raise ValueError(f"how long random numbers of dropout take on {device.name} is not known")
    work = step_work(step)
    found = {"products": (work.spent if device.tiles else work.done) / device.flops,
             "memory": sum(bytes_moved(step, device.tiles).values()) / device.bandwidth,
             "random": cycles and cycles / device.clock}
    for axis, time in axis_seconds(step, device, groups).items():
        found[axis] = found.get(axis, 0) + time
    return found


def axis_seconds(step: Step, device: Device, groups: Mapping[str, Group]):
    """{mesh axis: seconds in which its collectives use the links}; the first of several has all."""
    found = {}
    for (kind, axes), each in step_traffic(step, np.dtype(step.config.dtype).itemsize).items():
        time = link_seconds(kind, along_all([groups[axis] for axis in axes]), each.bytes, device)
        found[axes[0]] = found.get(axes[0], 0) + time
    return found


def bounds(step: Step, device: Device, groups: Mapping[str, Group]):
    """{what: seconds} that no program for this plan beats: "compute", "memory", "links".

    compute: products at the full rate, attention of text for the pairs of tokens that are not
    masked; memory: `bytes_at_least`; links: of the axis that needs most, all axes at once.
    """
    return {"compute": least_work(step) / device.flops,
            "memory": bytes_at_least(step, device.tiles) / device.bandwidth,
            "links": max(axis_seconds(step, device, groups).values(), default=0.0)}


def likely_seconds(step: Step, device: Device, groups: Mapping[str, Group]):
    """(least, most) seconds of a step, as far as published times say.

    On a TPU, of the estimate, the sum of `step_seconds`; on a GPU, whose compiler has no clock, of
    the sum of `bounds`. Neither is below the largest of the bounds.
    """
    least = bounds(step, device, groups)
    whole, (low, high) = ((sum(least.values()), OF_BOUNDS) if device.switch else
                          (sum(step_seconds(step, device, groups).values()), OF_ESTIMATE))
    most = max(least.values())
    return max(low * whole, most), max(high * whole, most)
