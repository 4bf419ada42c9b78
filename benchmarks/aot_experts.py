"""Compile experts for a TPU v5e, a layer alone and in a decoder: results/tpu-experts.json.

    python -m benchmarks.aot experts               all of these programs
    python -m benchmarks.aot experts layer 1.25    those whose names have one of these words

A layer of `bench_experts` on one chip, by each way of dispatch: what its forward pass computes, and
what the gradients do. And training steps of a decoder on eight chips, with experts spread over two,
four or eight of them, beside the dense decoder of which a token uses as many parameters.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

from benchmarks import bench_experts
from meshbook.costs.work import step_work
from meshbook.models.balanced_loss import balanced_loss
from meshbook.models.decoder import Decoder
from meshbook.models.losses import language_loss
from meshbook.planning import topologies
from meshbook.planning.clocks import device_of
from meshbook.planning.recorded_steps import asked_step
from meshbook.profiling.estimated_runs import estimated_run
from meshbook.sharding import Sharding
from meshbook.training import abstract_state, as_it_is, train_step

RESULTS = topologies.RESULTS / "tpu-experts.json"


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer on one chip: a way of `bench_experts`, and whether gradients are made, too."""

    way: str
    gradients: bool
    tpu: str = "v5e-8"

    @property
    def name(self):
        """Such as "layer one-hot dispatch forward"."""
        return f"layer {self.way} {'gradients' if self.gradients else 'forward'}"

    @property
    def useful(self):
        """FLOPs of all choices' products."""
        return bench_experts.useful(**bench_experts.FULL) // (1 if self.gradients else 3)

    def program(self):
        """The layer as a jitted function, and the shapes and layouts of its arguments."""
        sizes, mesh = dict(bench_experts.FULL), topologies.tpu_mesh(self.tpu, (1, 1))
        given = partial(jax.ShapeDtypeStruct, dtype=jnp.dtype(sizes.pop("dtype")),
                        sharding=NamedSharding(mesh, P()))
        loss = bench_experts.loss_by(self.way, sizes["T"], sizes["E"])
        run = jax.value_and_grad(loss, (0, 1, 2)) if self.gradients else loss
        return jax.jit(run), *jax.tree.map(given, bench_experts.shapes(**sizes),
                                           is_leaf=lambda x: isinstance(x, tuple) and
                                           isinstance(x[0], int))


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step on eight chips of which `across` share the experts; 0: a dense decoder.

    rows: of text on each chip; capacity: of ExpertSizes. The others are sizes of the decoder.
    """

    across: int
    capacity: float = 1.25
    tpu: str = "v5e-8"
    rows: int = 8
    vocabulary: int = 50_257
    tokens: int = 1024
    embed: int = 1024
    hidden: int = 2048
    heads: int = 16
    layers: int = 8
    experts: int = 16
    active: int = 2

    @property
    def name(self):
        """Such as "step 8 1.25"."""
        return f"step {self.across} {self.capacity}"

    @property
    def step(self):
        """The Step."""
        return asked_step("tpu-experts", dataclasses.asdict(self))

    @property
    def useful(self):
        """FLOPs of one chip."""
        return int(step_work(self.step).useful)

    def program(self):
        """The step, and the shapes and layouts of its arguments."""
        across = self.across or 1
        mesh = topologies.tpu_mesh(self.tpu, (8 // across, across), ("batch", "expert"))
        rows = "batch", "expert"
        rules = Sharding.data_parallel().also(B=rows, **{"E": "expert"} if self.across else {})
        loss = balanced_loss if self.across else language_loss
        state = abstract_state(lambda: Decoder(self.step.config, rules, rngs=nnx.Rngs(0)),
                               optax.adamw(6e-4, weight_decay=0.1), mesh, as_it_is, loss)
        ids = jax.ShapeDtypeStruct((8 * self.rows, self.tokens), jnp.int32,
                                   sharding=NamedSharding(mesh, P(rows)))
        batch = {"inputs": ids, "labels": ids}
        return train_step, state, batch, jax.eval_shape(lambda: jax.random.key(0))


def cells():
    """All that is recorded."""
    for way in bench_experts.WAYS:
        yield from (Layer(way, gradients) for gradients in (False, True))
    yield from (Step(across, capacity) for capacity in (1.0, 1.25, 2.0) for across in (2, 4, 8)
                if capacity == 1.25 or across == 8)
    yield Step(0)


def compiled(cell, cache=None):
    """The Compilation of a cell, with what its kinds of collectives take, and what is useful."""
    look = partial(looked, cell)
    return topologies.compile_for(cell.tpu, *cell.program(), cache=cache, look=look)


def looked(cell, text, mesh):
    """{"useful": FLOPs of a chip, "exchanges": {kind: [ms on the links, ms of waiting]}}."""
    run = estimated_run(text, mesh, device_of(cell.tpu))
    return {"useful": cell.useful, "exchanges": run.by_exchange()}
