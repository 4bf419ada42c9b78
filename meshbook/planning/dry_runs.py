"""A run on TPUs that are not here, before it begins: its step, compiled, and what follows."""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec as P

from meshbook.costs.devices import GIB
from meshbook.planning.clocks import device_of
from meshbook.planning.topologies import Compilation, compile_for, tpu_mesh
from meshbook.text import scaled, sized_bytes
from meshbook.training import abstract_state, train_step


def compile_run(topology: str, axes: Mapping[str, int], batch: Mapping[str, Any], **parts: Any):
    """The training step of a run for a TPU that is not here: (Compilation, its parameters).

    axes: {mesh axis: devices}; batch: {name: shape and dtype}, of all devices together; parts: of
    `abstract_state`. Raises what `compile_for` raises.
    """
    mesh = tpu_mesh(topology, tuple(axes.values()), tuple(axes))
    state = abstract_state(mesh=mesh, **parts)
    rows = NamedSharding(mesh, P(state.program.rows))
    batch = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=rows)
             for name, (shape, dtype) in batch.items()}
    key = jax.eval_shape(lambda: jax.random.key(0))
    made = compile_for(topology, train_step, state, batch, key)
    return made, sum(leaf.size for leaf in jax.tree.leaves(state.params))


def said_of(made: Compilation, parameters: int, steps: int, labels: Sequence[int],
            useful: int | float):
    """What a Compilation says of a run of so many steps, as text.

    labels: the shape of a batch's, (B,) of images or (B, T) of tokens; useful: FLOPs of a step that
    has to be done, by all devices together. Times are those of the compiler's clock, an estimate.
    """
    chip = device_of(made.topology)
    lines = [f"{parameters:,} parameters on {made.mesh or 'one device'} of {made.topology}, "
             f"compiled in {made.seconds:.0f} s"]
    if not made.fits:
        return "\n".join([*lines, f"does not fit: a device would need {made.peak / GIB:.1f} GiB, "
                          f"and has {made.available / GIB:.1f}"])
    lines.append(f"memory     {made.peak / GIB:.1f} of {chip.memory / GIB:.0f} GiB on each device, "
                 f"{made.arguments / GIB:.1f} of them the state and the batch")
    for axes in dict.fromkeys(axes for _, axes in made.traffic):
        sent = sized_bytes(made.traffic.wire(*axes))
        lines.append(f"wire       {sent} per device and step along {', '.join(axes)}")
    devices = math.prod(made.mesh.values()) if made.mesh else 1
    lines.append(f"work       {scaled(made.flops, 'FLOP')} per device and step, "
                 f"{made.flops * devices / useful:.2f} of the useful work")
    if made.clock is None:
        return "\n".join([*lines, "time       the compiler's clock has none for this program"])
    step, exposed = made.clock["step"], made.clock["exposed"]
    hours, count = steps * step / 1e3 / 3_600, steps * math.prod(labels)
    takes = f"{hours:.1f} hours" if hours < 48 else f"{hours / 24:.1f} days"
    what = "tokens" if len(labels) == 2 else "images"
    lines += [f"time       {step:,.0f} ms a step by the compiler's clock, {exposed:,.0f} of them "
              f"waiting for links; {useful / devices / (step / 1e3) / chip.flops:.0%} MFU",
              f"the run    {steps:,} steps, {count:,} {what}, {takes}"]
    return "\n".join(lines)
