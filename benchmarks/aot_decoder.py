"""Compile training steps of the decoder for TPUs that are not here: results/tpu-decoder.json.

    python -m benchmarks.aot decoder                all of these programs
    python -m benchmarks.aot decoder v6e-8 remat    those whose names have one of these words

At the sizes of JAXformer, whose experts are replaced by dense layers of the same active size: of
every six layers one has, per token, two experts of 3,072 hidden units and a shared one that
multiplies as much as 768, so that six dense layers of 3,712 multiply as much. And small ones, which
show how each TPU's compiler sums gradients of weights that are split.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

from meshbook.models.decoder import Decoder, DecoderConfig
from meshbook.models.losses import chunked_cross_entropy, language_loss
from meshbook.parallel.accumulation import in_microbatches
from meshbook.planning import topologies
from meshbook.planning.decoder_programs import look
from meshbook.planning.recorded_steps import asked_step
from meshbook.sharding import Sharding, spec_of
from meshbook.training import abstract_state, as_it_is, train_step

RESULTS = topologies.RESULTS / "tpu-decoder.json"


@dataclasses.dataclass(frozen=True)
class Cell:
    """One program: a TPU, a mesh, a global batch of rows, and what is special about it.

    row: a preset of Sharding, with regather and overlapped as it takes them. sharded: whether the
    parameters' D is split over the rows besides. parts: of a batch whose gradients are summed once,
    at the end; 0 as they come. The others are of DecoderConfig and of the loss.
    """

    tpu: str
    shape: tuple
    batch: int
    row: str = "fully_sharded"
    regather: bool | None = None
    overlapped: bool = False
    sharded: bool = False
    parts: int = 0
    remat: str = "attention"
    by_row: bool = True
    dropout: float = 0.2
    hidden: int = 3712
    chunk: int = 2048
    dtype: str = "bfloat16"

    @property
    def name(self):
        """Such as "v5e-8 (8, 1) 64": what is as usual is not said."""
        said = [f"{each.name}={getattr(self, each.name)}" for each in dataclasses.fields(self)[3:]
                if getattr(self, each.name) != each.default]
        return " ".join([self.tpu, str(self.shape), str(self.batch), *said])

    @property
    def config(self):
        """The DecoderConfig: sizes of JAXformer."""
        return asked_step("tpu-decoder", dataclasses.asdict(self)).config

    @property
    def rules(self):
        """The Sharding."""
        return asked_step("tpu-decoder", dataclasses.asdict(self)).layout.rules

    @property
    def loss(self):
        """The loss, whose gradients are taken."""
        loss = partial(language_loss, cross_entropy=partial(chunked_cross_entropy,
                                                            chunk=self.chunk))
        return in_microbatches(loss, self.parts) if self.parts else loss

    @property
    def optimizer(self):
        """AdamW, its gradients clipped."""
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(6e-4, weight_decay=0.1))


@dataclasses.dataclass(frozen=True)
class Gradients:
    """A small step that shows how gradients of weights that are split over "batch" are summed.

    split: "D" as `Sharding.fully_sharded` does it, or the "first" or "last" letter of each weight,
    S passed over; other: letters of weights, apart by commas, that are split along the other one of
    the two. by_hand: by `regather=True`; kind: of attention, "latent" or "groups".
    """

    tpu: str
    dtype: str
    split: str = "D"
    other: str = ""
    by_hand: bool = False
    kind: str = "latent"
    shape: tuple = (8, 1)
    batch: int = 64

    @property
    def name(self):
        """Such as "gradients v5e-8 bfloat16 D latent"."""
        hand, other = " by hand" * self.by_hand, f" but {self.other}" if self.other else ""
        return f"gradients {self.tpu} {self.dtype} {self.split}{other} {self.kind}{hand}"

    @property
    def config(self):
        """The DecoderConfig of a small decoder."""
        kind = {"groups": dict(groups=4), "latent": dict(latent=128, rotary=128)}[self.kind]
        return DecoderConfig(vocabulary=4000, tokens=256, embed=512, hidden=1536, heads=8, layers=4,
                             dtype=jnp.dtype(self.dtype), **kind)

    @property
    def rules(self):
        """The Sharding."""
        rules = Sharding.fully_sharded(regather=self.by_hand or None)
        if self.split == "D":
            return rules
        return ByWeight(**vars(Sharding.tensor_parallel()), last=self.split == "last",
                        other=frozenset(self.other.split(",")))

    loss, optimizer = staticmethod(language_loss), optax.sgd(0.1)


@dataclasses.dataclass(frozen=True)
class ByWeight(Sharding):
    """Rules that split each parameter over "batch" along its first letter, or its last one.

    other: letters of those that are split along the other one of the two.
    """

    last: bool = False
    other: frozenset = frozenset()

    def parameter(self, letters: str):
        own = letters.removeprefix("L")
        letter = own.replace("S", "")[-(self.last != (own in self.other))]
        return spec_of(letters, dict(self.parameters) | {letter: "batch"})


NOW = Cell("v5e-8", (8, 1), 64)
UNTUNED = dict(by_row=False, remat="all")


def cells():
    """All that is recorded."""
    for tpu in ("v5e-8", "v6e-8"):
        yield Cell(tpu, (8, 1), 64)
        yield Cell(tpu, (4, 2), 64)
    yield dataclasses.replace(NOW, **UNTUNED)
    yield from (dataclasses.replace(NOW, remat=each) for each in ("all", "products", "none"))
    for more in ({"dropout": 0.0}, {"dtype": "float32"}, {"parts": 4}):
        yield dataclasses.replace(NOW, **more)
    yield from (dataclasses.replace(NOW, row=each) for each in ("data_parallel", "zero1", "zero2"))
    yield from (dataclasses.replace(NOW, regather=each) for each in (True, False))
    for row in ("tensor_parallel", "sequence_parallel"):
        yield Cell("v5e-8", (4, 2), 64, row=row)
    for more in ({"sharded": True}, {"overlapped": True}):
        yield Cell("v5e-8", (4, 2), 64, row="sequence_parallel", **more)
    yield dataclasses.replace(NOW, row="data_parallel", parts=1)
    for tpu in ("v5e-8", "v6e-8", "v4:2x2x2"):
        for dtype in ("bfloat16", "float32"):
            yield from (Gradients(tpu, dtype, split) for split in ("D", "first", "last"))
            yield Gradients(tpu, dtype, by_hand=True)
    yield from (Gradients(tpu, "float32", "first", other="RSHK") for tpu in ("v5e-8", "v6e-8"))
    yield from (Gradients("v5e-8", "bfloat16", split, kind="groups") for split in ("first", "last"))


def program(cell):
    """A cell as a jitted step and the shapes and layouts of its arguments, without arrays."""
    mesh, config, rules = topologies.tpu_mesh(cell.tpu, cell.shape), cell.config, cell.rules
    state = abstract_state(lambda: Decoder(config, rules, rngs=nnx.Rngs(0)), cell.optimizer, mesh,
                           as_it_is, cell.loss)
    batch = {name: jax.ShapeDtypeStruct((cell.batch, config.tokens), jnp.int32,
                                        sharding=NamedSharding(mesh, P("batch")))
             for name in ("inputs", "labels")}
    return train_step, state, batch, jax.eval_shape(lambda: jax.random.key(0))


def compiled(cell, cache=None):
    """The Compilation of a cell."""
    step, state, *others = program(cell)
    return topologies.compile_for(cell.tpu, step, state, *others, cache=cache,
                                  look=partial(look, cell.tpu, weights_of(state)))


def weights_of(state):
    """{path: (dims of its gradient on one device, dims of its part of the sum)} of matrices.

    Of layers' weights, which are stacked, one layer's. What is not split over the rows is left out.
    """
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.params):
        name = "/".join(str(each.key) for each in path)
        spec, part = leaf.sharding.spec.partitions, leaf.sharding.shard_shape(leaf.shape)
        looped = name.startswith("layers")
        rows = leaf.sharding.mesh.shape["batch"]
        whole = [size * rows if at < len(spec) and spec[at] == "batch" else size
                 for at, size in enumerate(part)]
        if leaf.ndim - looped > 1 and whole != list(part):
            found[name] = tuple(whole[looped:]), tuple(part[looped:])
    return found
