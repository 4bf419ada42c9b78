"""Compile JAXformer on meshes of 32 TPU v4 that are not here: results/tpu-meshes.json.

    python -m benchmarks.aot meshes                  all of these programs
    python -m benchmarks.aot meshes "stage 2"        those whose names have these words

The plans that `meshbook.planning.meshes` ranks first, the mesh of the sources, and plans that the
formulas put far behind, to see whether they are.
"""

import dataclasses
from functools import partial

import train
from meshbook.planning import topologies
from meshbook.planning.clocks import clocked, device_of
from meshbook.planning.meshes import RECORD, Plan
from meshbook.planning.plan_programs import plan_program, taken_by
from meshbook.profiling.estimated_runs import estimated_run

RESULTS = topologies.RESULTS / RECORD
RUN = train.PRESETS["jaxformer-1b"]
NAMES = "inputs", "labels", "segments", "positions"
WHOLE = dict(rules="tensor_parallel", microbatches=2, remat="none")
ZERO1 = WHOLE | {"rules": "zero1"}
STAGED = dict(rules="fully_sharded", schedule="zero_bubble", remat="none")
SOURCE = Plan(8, stage=2, model=2, rules="fully_sharded")
BEST = (  # of their meshes, by formula
    Plan(2, expert=16, rules="tensor_parallel", microbatches=2, remat="none"),
)
OWN = (  # the source's mesh: its four microbatches, and what fits
    Plan(8, stage=2, model=2, rules="fully_sharded", microbatches=16),
    Plan(8, stage=2, model=2, rules="fully_sharded", schedule="lockstep", microbatches=16, remat="none"),
)
OTHERS = (  # other ways to use the chips, which the formula ranks lower
    Plan(32),
    Plan(16, model=2),
    Plan(32, remat="attention"),
    Plan(16, model=2, rules="tensor_parallel", remat="attention"),
)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One program: a plan, a TPU, and rows of text in a step."""

    plan: Plan
    tpu: str = "v4:2x4x4"
    rows: int = RUN.batch

    @property
    def name(self):
        """That of the plan."""
        return self.plan.name


def cells():
    """All that is recorded."""
    yield from map(Cell, (*BEST, *OWN, *OTHERS))


def program(cell):
    """A cell as a jitted step and the shapes and layouts of its arguments, without arrays."""
    axes = cell.plan.mesh
    mesh = topologies.tpu_mesh(cell.tpu, tuple(axes.values()), tuple(axes))
    optimizer = train.parts(RUN, {"batch": 1, "model": 1})["optimizer"]
    return plan_program(RUN.model, cell.plan, cell.rows, mesh, optimizer, NAMES)


def compiled(cell, cache=None):
    """The Compilation of a cell, its time with the branches that its schedule takes in each turn."""
    taken = taken_by(cell.plan)
    return topologies.compile_for(cell.tpu, *program(cell), cache=cache,
                                  look=partial(looked, cell.tpu, taken),
                                  clock=partial(clocked, taken=taken))


def looked(tpu, taken, text, mesh):
    """{"step", "exposed": ms if mesh axes are lines; "exchanges": {kind: [ms on links, waiting]}}.
    """
    run = estimated_run(text, mesh, device_of(tpu), ring=False, taken=taken)
    return {"step": run.step, "exposed": sum(run.exposed().values()),
            "exchanges": run.by_exchange()}
