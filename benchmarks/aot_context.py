"""Compile steps with ever longer rows for a TPU v5e: results/tpu-context.json.

    python -m benchmarks.aot context              all of these programs
    python -m benchmarks.aot context ring gather  those whose names have one of these words

For each way of doing attention, one row of text with twice as many tokens until it does not fit.
And one row of TIMED tokens by each way with eight chips, played by the compiler's clock.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

from meshbook.models.decoder import Decoder
from meshbook.models.losses import chunked_cross_entropy, language_loss
from meshbook.parallel.context import Context, zigzag
from meshbook.planning import topologies
from meshbook.planning.clocks import device_of
from meshbook.planning.recorded_steps import asked_step
from meshbook.profiling.estimated_runs import estimated_run
from meshbook.sharding import Sharding
from meshbook.training import abstract_state, as_it_is, train_step

RESULTS = topologies.RESULTS / "tpu-context.json"
WAYS = {  # how attention is done, and the powers of two of the tokens
    ("all scores", 1): (None, (12, 13, 14)),
    ("blocks", 1): (Context(), (16, 17, 18)),
    ("gather", 8): (Context("gather", zigzagged=True), (19, 20)),
    ("ring", 8): (Context("ring", zigzagged=True), (19, 20, 21)),
    ("ulysses", 8): (Context("ulysses"), (19, 20)),
}
TIMED = 65_536  # the clock plays each of a longer row's many blocks


@dataclasses.dataclass(frozen=True)
class Cell:
    """One program: a way of doing attention, one of WAYS, on so many devices, and the tokens.

    timed: whether the compiler's clock plays it.
    """

    way: str
    devices: int
    tokens: int
    timed: bool = False
    tpu: str = "v5e-8"

    @property
    def name(self):
        """Such as "ring 8 524288", or "ring 8 65536 timed"."""
        return f"{self.way} {self.devices} {self.tokens}" + self.timed * " timed"

    @property
    def config(self):
        """The DecoderConfig."""
        return asked_step("tpu-context", dataclasses.asdict(self)).config


def cells():
    """All that is recorded."""
    for (way, devices), (_, powers) in WAYS.items():
        yield from (Cell(way, devices, 2 ** power) for power in powers)
    yield from (Cell(way, devices, TIMED, True) for way, devices in WAYS if devices > 1)


def in_order(context, params, program, batch, key=None):
    """The chunked loss of a batch, in zigzag order where the context asks for it."""
    if context and context.zigzagged:
        batch = zigzag(batch, program.mesh.shape[context.axis])
    chunked = partial(chunked_cross_entropy, chunk=2048)
    return language_loss(params, program, batch, key, cross_entropy=chunked)


def program(cell):
    """A cell as a jitted step and the shapes and layouts of its arguments, without arrays."""
    context, _ = WAYS[cell.way, cell.devices]
    mesh = topologies.tpu_mesh(cell.tpu, (1, cell.devices), ("batch", "context"))
    rules = Sharding.context_parallel(context) if context else Sharding.data_parallel()
    config = cell.config
    state = abstract_state(lambda: Decoder(config, rules, rngs=nnx.Rngs(0)),
                           optax.adamw(6e-4, weight_decay=0.1), mesh, as_it_is,
                           partial(in_order, context))
    ids = jax.ShapeDtypeStruct((1, cell.tokens), jnp.int32,
                               sharding=NamedSharding(mesh, P("batch")))
    batch = {"inputs": ids, "labels": ids}
    return train_step, state, batch, jax.eval_shape(lambda: jax.random.key(0))


def compiled(cell, cache=None):
    """The Compilation of a cell, and of a timed one how long its exchanges take."""
    if cell.timed:
        look = partial(exchanges, cell.tpu)
        return topologies.compile_for(cell.tpu, *program(cell), cache=cache, look=look)
    found = topologies.compile_for(cell.tpu, *program(cell), cache=cache, clock=None)
    return dataclasses.replace(found, clock=None)


def exchanges(tpu, text, mesh):
    """{kind: [ms on the links, ms of them in which nothing else runs]}."""
    return estimated_run(text, mesh, device_of(tpu)).by_exchange()
