"""The step of a plan, compiled for simulated devices, beside the Step that the formulas see."""
import functools
import math
from typing import Any, NamedTuple

import jax
import optax

from meshbook.costs.plans import Plan
from meshbook.costs.step import Step, describe
from meshbook.costs.timeline import step_peak
from meshbook.costs.memory import step_memory
from meshbook.models.decoder import DecoderConfig
from meshbook.planning.plan_programs import plan_program
from meshbook.sharding import make_mesh
from meshbook.training import clipped


class Compiled(NamedTuple):
    """A step by formula, its mesh, its state as shapes, and the program."""

    step: Step
    mesh: Any
    state: Any
    program: Any


@functools.cache
def compiled(config: DecoderConfig, plan: Plan, rows: int = 16, clip: bool = False,
             optimizer: Any = optax.sgd(0.1)):
    """The Compiled step of a decoder by a plan."""
    mesh = make_mesh(tuple(plan.mesh.values()), tuple(plan.mesh))
    optimizer = optax.chain(clipped(1.0), optimizer) if clip else optimizer
    step, state, *given = plan_program(config, plan, rows, mesh, optimizer)
    with jax.set_mesh(mesh):
        program = step.lower(state, *given).compile()
    return Compiled(describe(config, plan, rows), mesh, state, program)


def numbers_held(tree: Any):
    """How many numbers one device holds of these leaves."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(tree))


def temporaries_of(step: Step):
    """Bytes at the peak, on a device without tiles, that are no arguments of the step."""
    held = step_memory(step, tiles=False)
    return step_peak(step, tiles=False) - held.parameters - held.moments - held.inputs
