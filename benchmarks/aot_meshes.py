"""Compile JAXformer on meshes of 32 TPU v4 that are not here: results/tpu-meshes.json.

    python -m benchmarks.aot meshes                  all of these programs
    python -m benchmarks.aot meshes "stage 2"        those whose names have these words

The plans that `meshbook.costs.ranking` ranks first, the mesh of the sources, and plans that the
formulas put far behind, to see whether they are.
"""

import dataclasses
from functools import partial

import optax

from meshbook.costs.plans import Plan
from meshbook.planning import topologies
from meshbook.planning.clocks import clocked, device_of
from meshbook.planning.plan_programs import plan_program, taken_by
from meshbook.planning.recorded_steps import asked_step
from meshbook.profiling.estimated_runs import estimated_run
from meshbook.training import clipped, decayed

RESULTS = topologies.RESULTS / "tpu-meshes.json"
NAMES = "inputs", "labels", "segments", "positions"
BEST = (  # the first twenty meshes by formula, each with its best plan
    Plan(32, remat="products"),
    Plan(16, expert=2, remat="products"),
    Plan(8, expert=4, remat="products"),
    Plan(2, expert=16, rules="tensor_parallel", remat="products"),
    Plan(4, expert=8, rules="tensor_parallel", remat="products"),
    Plan(1, expert=16, stage=2, rules="tensor_parallel", microbatches=16, remat="products"),
    Plan(16, stage=2, rules="fully_sharded", microbatches=8, remat="products"),
    Plan(2, expert=8, stage=2, rules="tensor_parallel", microbatches=16, remat="products"),
    Plan(1, expert=8, stage=4, rules="tensor_parallel", microbatches=32, remat="products"),
    Plan(4, expert=4, stage=2, rules="tensor_parallel", microbatches=16, remat="products"),
    Plan(8, expert=2, stage=2, rules="fully_sharded", microbatches=8, remat="products"),
    Plan(2, expert=4, stage=4, rules="tensor_parallel", microbatches=32, remat="products"),
    Plan(4, expert=2, stage=4, rules="fully_sharded", microbatches=32, remat="products"),
    Plan(8, stage=4, rules="fully_sharded", microbatches=16, remat="products"),
    Plan(1, expert=4, stage=8, rules="tensor_parallel", microbatches=64, remat="products"),
    Plan(2, expert=2, stage=8, rules="fully_sharded", microbatches=64, remat="products"),
    Plan(4, stage=8, rules="fully_sharded", microbatches=64, remat="products"),
    Plan(16, model=2, remat="products"),
    Plan(8, expert=2, model=2, remat="products"),
    Plan(1, expert=16, model=2, rules="tensor_parallel", microbatches=2, remat="none"),
)
OWN = (  # the source's mesh, first as its code has it: four microbatches, every block made again
    Plan(8, stage=2, model=2, rules="fully_sharded", microbatches=4, remat="all"),
    Plan(8, stage=2, model=2, rules="fully_sharded", microbatches=16, remat="all"),
    Plan(8, stage=2, model=2, rules="fully_sharded", schedule="lockstep", microbatches=16,
         remat="none"),
    Plan(8, stage=2, model=2, rules="fully_sharded", schedule="zero_bubble", microbatches=8,
         remat="none"),
    Plan(8, stage=2, model=2, rules="fully_sharded", microbatches=16, remat="products"),
    Plan(8, stage=2, model=2, rules="fully_sharded", microbatches=4, remat="none"),
    Plan(8, stage=2, model=2, rules="fully_sharded", microbatches=16, remat="attention"),
)
OTHERS = (  # other ways to use the chips, which the formula ranks lower
    Plan(32, remat="attention"),
    Plan(32, remat="all"),
    Plan(32, rules="zero1", microbatches=2, remat="none"),
    Plan(32, microbatches=2, remat="none"),
    Plan(16, expert=2, rules="zero1", microbatches=2, remat="none"),
    Plan(8, expert=4, rules="tensor_parallel", microbatches=2, remat="none"),
    Plan(2, expert=16, remat="attention"),
    Plan(2, expert=16, rules="tensor_parallel", microbatches=2, remat="none"),
    Plan(4, expert=8, rules="tensor_parallel", microbatches=2, remat="none"),
    Plan(16, model=2, remat="all"),
    Plan(16, model=2, rules="tensor_parallel", remat="attention"),
    Plan(16, model=2, rules="zero1", microbatches=2, remat="none"),
    Plan(16, model=2, rules="zero1", microbatches=4, remat="none"),
    Plan(8, expert=2, model=2, rules="zero1", microbatches=2, remat="none"),
    Plan(8, model=4, rules="zero1", microbatches=4, remat="none"),
    Plan(2, expert=8, model=2, rules="tensor_parallel", microbatches=2, remat="none"),
    Plan(4, expert=4, model=2, rules="tensor_parallel", microbatches=2, remat="none"),
    Plan(8, stage=4, rules="fully_sharded", microbatches=32, remat="products"),
    Plan(2, stage=8, model=2, rules="fully_sharded", microbatches=64, remat="attention"),
    Plan(1, expert=2, stage=8, model=2, rules="tensor_parallel", microbatches=128,
         remat="attention"),
)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One program: a plan, a TPU, and rows of text in a step."""

    plan: Plan
    tpu: str = "v4:2x4x4"
    rows: int = 256

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
    rate = optax.warmup_cosine_decay_schedule(0, 6e-4, 5_000, 26_100, 6e-5)
    adamw = optax.adamw(rate, b2=0.99, weight_decay=0.05, mask=decayed)
    optimizer = optax.chain(clipped(1.0), adamw)  # of train.py's preset jaxformer-1b
    config = asked_step("tpu-meshes", dataclasses.asdict(cell)).config
    return plan_program(config, cell.plan, cell.rows, mesh, optimizer, NAMES)


def compiled(cell, cache=None):
    """The Compilation of a cell, timed with the branches that its schedule takes in each turn."""
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
