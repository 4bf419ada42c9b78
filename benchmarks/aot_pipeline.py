"""Compile a decoder's step in four stages for TPUs that are not here: results/tpu-pipeline.json.

    python -m benchmarks.aot pipeline            all of these programs
    python -m benchmarks.aot pipeline v4 ZB-H1   those whose names have one of these words

Each schedule of chapter 14, with few and with many microbatches.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

from meshbook.models.decoder import Decoder
from meshbook.models.pipelined import pipelined
from meshbook.parallel import schedules
from meshbook.parallel.pipeline import by_tick, gpipe, one_f_one_b
from meshbook.parallel.slots import SLOT_PARTS, in_slots, table_of
from meshbook.planning import topologies
from meshbook.planning.clocks import clocked
from meshbook.planning.recorded_steps import asked_step
from meshbook.sharding import Sharding
from meshbook.training import abstract_state, as_it_is, train_step

RESULTS = topologies.RESULTS / "tpu-pipeline.json"
TABLES = {"1F1B": lambda p, m: schedules.split_backward(schedules.one_f_one_b(p, m)),
          "ZB-H1": schedules.zero_bubble}
SCHEDULES = {"GPipe": gpipe, "checkpointed GPipe": partial(gpipe, recompute=True),
             "lockstep 1F1B": one_f_one_b} | {
                 name: in_slots(make) for name, make in TABLES.items()}
EVERY_TURN = {"GPipe", "checkpointed GPipe"}  # without branches
TAKEN = {"lockstep 1F1B": by_tick} | dict.fromkeys(EVERY_TURN, lambda p, m: None) | {
    name: lambda p, m, make=make: table_of(make(p, m)).by_turn for name, make in TABLES.items()}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One program: a TPU, a schedule, its microbatches, and rows of text in each on each device.

    The mesh is two devices along "batch" by four stages. The others are sizes of the decoder, which
    are recorded so that its useful work can be counted.
    """

    tpu: str
    schedule: str
    microbatches: int
    rows: int = 4
    shape: tuple = (2, 4)
    vocabulary: int = 50_257
    tokens: int = 1024
    embed: int = 1024
    hidden: int = 4096
    heads: int = 16
    layers: int = 8

    @property
    def name(self):
        """Such as "v5e-8 ZB-H1 8"."""
        return f"{self.tpu} {self.schedule} {self.microbatches}"

    @property
    def step(self):
        """The Step."""
        return asked_step("tpu-pipeline", dataclasses.asdict(self))


def cells():
    """All that is recorded."""
    for tpu in ("v5e-8", "v4:2x2x2"):
        for microbatches in (8, 32):
            yield from (Cell(tpu, schedule, microbatches) for schedule in SCHEDULES)


def program(cell):
    """A cell as a jitted step and the shapes and layouts of its arguments, without arrays."""
    mesh = topologies.tpu_mesh(cell.tpu, cell.shape, ("batch", "stage"))
    rules, config = Sharding.data_parallel().in_stages(), cell.step.config
    state = abstract_state(
        lambda: Decoder(config, rules, rngs=nnx.Rngs(0)), optax.adamw(6e-4, weight_decay=0.1),
        mesh, as_it_is, pipelined(SCHEDULES[cell.schedule], cell.microbatches))
    ids = jax.ShapeDtypeStruct((cell.step.rows, config.tokens), jnp.int32,
                               sharding=NamedSharding(mesh, P("batch")))
    batch = {"inputs": ids, "labels": ids}
    return train_step, state, batch, jax.eval_shape(lambda: jax.random.key(0))


def compiled(cell, cache=None):
    """The Compilation of a cell, its time with the branches that its schedule takes in each turn."""
    taken = TAKEN[cell.schedule](cell.shape[1], cell.microbatches)
    look = partial(parts, cell.tpu, taken) if cell.schedule in TABLES else None
    return topologies.compile_for(cell.tpu, *program(cell), cache=cache, look=look,
                                  clock=partial(clocked, taken=taken))


def parts(tpu, taken, text, mesh):
    """{F, B or W: how many ms it makes a slot longer in which all devices do it}."""
    step = lambda part: clocked(text, mesh, tpu, taken | {"part": [{part}] * slots})["step"]
    slots = len(taken["part"])
    nothing, *others = map(step, range(len(SLOT_PARTS)))
    return {name: (each - nothing) / slots
            for name, each in zip(SLOT_PARTS[1:], others, strict=True)}
