"""Compile JAXformer on meshes of 32 TPU v4 that are not here: results/tpu-meshes.json.

    python -m benchmarks.aot meshes                  all of these programs
    python -m benchmarks.aot meshes "stage 2"        those whose names have these words

The plans that `meshbook.planning.meshes` ranks first, the mesh of the sources, and plans that the
formulas put far behind, to see whether they are.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

import train
from meshbook.models.decoder import Decoder
from meshbook.parallel.pipeline import by_tick
from meshbook.parallel.slots import table_of
from meshbook.parallel import schedules
from meshbook.planning import topologies
from meshbook.planning.clocks import clocked, device_of
from meshbook.planning.decoder_costs import PRESETS
from meshbook.planning.meshes import RECORD, Plan
from meshbook.profiling.estimated_runs import estimated_run
from meshbook.training import abstract_state, as_it_is, train_step

RESULTS = topologies.RESULTS / RECORD
NAMES = "inputs", "labels", "segments", "positions"
TAKEN = {"gpipe": lambda p, m: None, "lockstep": by_tick,
         "zero_bubble": lambda p, m: table_of(schedules.zero_bubble(p, m)).by_turn}
SCHEDULES = {"gpipe": "gpipe", "lockstep": "1f1b", "zero_bubble": "zero-bubble"}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One program: a plan, a TPU, and rows of text in a step."""

    plan: Plan
    tpu: str = "v4:2x4x4"
    batch: int = 256

    @property
    def name(self):
        """That of the plan."""
        return self.plan.name

    @property
    def config(self):
        """The settings of `train.py`."""
        run = train.PRESETS["jaxformer-1b"]
        model = dataclasses.replace(run.model, remat=self.plan.remat)
        return dataclasses.replace(run, model=model, batch=self.batch, rules="fully_sharded",
                                   microbatches=self.plan.microbatches,
                                   schedule=SCHEDULES[self.plan.schedule])


def program(cell):
    """A cell as a jitted step and the shapes and layouts of its arguments, without arrays."""
    axes, config = cell.plan.mesh, cell.config
    mesh = topologies.tpu_mesh(cell.tpu, tuple(axes.values()), tuple(axes))
    parts = train.parts(config, axes)
    if cell.plan.rules != config.rules:
        rules = PRESETS[cell.plan.rules]()
        if axes.get("expert", 1) > 1:
            rules = rules.also(E="expert", B=("batch", "expert"))
        rules = rules.in_stages() if axes.get("stage", 1) > 1 else rules
        parts["make_model"] = lambda: Decoder(config.model, rules, rngs=nnx.Rngs(0))
    state = abstract_state(mesh=mesh, prepare=as_it_is, **parts)
    ids = jax.ShapeDtypeStruct((cell.batch, config.model.tokens), jnp.int32,
                               sharding=NamedSharding(mesh, P(state.program.rows)))
    return train_step, state, dict.fromkeys(NAMES, ids), jax.eval_shape(lambda: jax.random.key(0))


def compiled(cell, cache=None):
    """The Compilation of a cell, its time with the branches that its schedule takes in each turn."""
    taken = None
    if cell.plan.stage > 1:
        taken = TAKEN[cell.plan.schedule](cell.plan.stage, cell.plan.microbatches)
    return topologies.compile_for(cell.tpu, *program(cell), cache=cache,
                                  look=partial(looked, cell.tpu, taken),
                                  clock=partial(clocked, taken=taken))


def looked(tpu, taken, text, mesh):
    """{"step", "exposed": ms if mesh axes are lines; "exchanges": {kind: [ms on links, waiting]}}.
    """
    run = estimated_run(text, mesh, device_of(tpu), ring=False, taken=taken)
    return {"step": run.step, "exposed": sum(run.exposed().values()),
            "exchanges": run.by_exchange()}
