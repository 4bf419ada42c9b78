"""The book's own ViT and MiniGPT at small sizes on (4, 2), and what a right training must show.

A Trial is made by `create_state`, its step is `train_step`, and it is compared with
`meshbook.models.reference`. What is expected of it comes from the formulas of
`meshbook.costs` and from the sharding rules by letters, never from the program.
meshbook.faults.wrong_models has the wrong ones.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.serialization import to_state_dict
from jax.sharding import Mesh, PartitionSpec as P

from meshbook import proofs, training
from meshbook.costs.plans import Plan
from meshbook.costs.step import describe
from meshbook.costs.traffic import step_traffic
from meshbook.costs.work import step_work
from meshbook.data import tokens
from meshbook.models import reference
from meshbook.models.losses import language_loss
from meshbook.models.minigpt import MiniGPT, MiniGPTConfig
from meshbook.models.vit import ViT, ViTConfig
from meshbook.sharding import Sharding, make_mesh, place
from meshbook.training.optimizers import language_recipe

VIT = ViTConfig(patch=16, embed=16, hidden=32, heads=4, layers=1)
GPT = MiniGPTConfig(vocabulary=256, tokens=16, embed=16, hidden=32, heads=4, layers=1)
B, STEPS, KEY = 16, 3, jax.random.key(7)


@dataclasses.dataclass(frozen=True)
class Trial:
    """A model's training on a mesh, and what a right one would be.

    How it trains: `model(config, table, rngs=...)`, `optimizer`, `loss`, and `put`, which places a
    batch. What a right one shows: the rule of each letter in `rules`, parameters per device
    `weights`, `scalars` in the optimizer's state, `traffic`, `useful` FLOPs and their `factor`; and
    it trains as `alone` does, the reference, which begins at `start`.
    """

    model: Callable
    config: Any
    table: Sharding
    optimizer: optax.GradientTransformation
    loss: Callable
    batches: tuple
    start: dict
    alone: proofs.Run
    rules: dict
    weights: int
    scalars: int
    traffic: dict
    useful: int | float
    factor: float
    mesh: Mesh
    put: Callable = place

    @functools.cached_property
    def state(self):
        """The state at the start."""
        state = created(self.model, self.config, self.table, self.optimizer, self.mesh)
        program = dataclasses.replace(state.program, loss=self.loss)
        return dataclasses.replace(state, program=program)

    @functools.cached_property
    def compiled(self):
        """The training step as a program."""
        return training.compile_step(self.state, self.put(self.batches[0], self.mesh), KEY)

    def checks(self):
        """The four proofs and the check of memory, to be called."""
        held = 4 * (3 * self.weights + self.scalars)
        return {
            "sharded": lambda: self.assert_sharded(held),
            "same": self.assert_same_training,
            "communicates": lambda: proofs.assert_communicates(
                self.compiled, self.mesh, self.traffic),
            "divided": lambda: proofs.assert_divided(
                self.compiled, self.mesh.size, self.useful, self.factor, rtol=1e-9),
            "donated": lambda: proofs.assert_donated(self.compiled, held),
        }

    def assert_sharded(self, held: int):
        """State and batch at the start, by rules, formula and data; the state after a step."""
        batch, whole = self.batches[0], (self.start, to_state_dict(self.optimizer.init(self.start)))
        arrays = self.state.params, self.state.opt_state
        specs = proofs.by_letters(arrays, self.rules)
        proofs.assert_sharded(arrays, specs, self.mesh, held, whole)
        size = sum(x.nbytes for x in batch.values()) // self.mesh.shape["batch"]
        on_devices = self.put(batch, self.mesh)
        proofs.assert_sharded(on_devices, P("batch"), self.mesh, size, batch)
        after, _ = self.compiled(jax.tree.map(jnp.copy, self.state), on_devices, KEY)
        proofs.assert_sharded((after.params, after.opt_state), specs, self.mesh, held)

    def assert_same_training(self):
        """Beside the reference, under the optimizer that trains."""
        placed = lambda program, batch: self.put(batch, program.mesh)
        with mock.patch.object(training.Program, "place", placed):
            ours = training.run(self.state, KEY, self.compiled)
            proofs.assert_same_training(ours, self.alone, self.batches)


@functools.cache
def created(
    model: Callable, config: ViTConfig | MiniGPTConfig, table: Sharding,
    optimizer: optax.GradientTransformation, mesh: Mesh,
):
    """A state by `create_state`."""
    make = lambda: model(config, table, rngs=nnx.Rngs(0))
    return training.create_state(make, optimizer, mesh)


@functools.cache
def mesh_of(shape: tuple[int, int] = (4, 2)):
    """The mesh of every trial, or of one device."""
    return make_mesh(shape)


ADAM, RECIPE = optax.adam(1e-3), language_recipe(10 * STEPS)


@functools.cache
def beside(
    model: Callable, config: ViTConfig | MiniGPTConfig, optimizer: optax.GradientTransformation,
    plain: Callable, **settings: Any,
):
    """The parameters that one device draws, on the host, and the reference's run from there."""
    state = created(model, config, Sharding.none(), optimizer, mesh_of((1, 1)))
    start = jax.device_get(state.params)
    run = reference.Reference(plain, start, optimizer, KEY, rate=config.dropout, **settings)
    return start, run.run(params=False)


def images(seed: int):
    """A batch of noise."""
    draw = np.random.default_rng(seed)
    return {"inputs": draw.normal(size=(B, 32, 32, 3)).astype(np.float32),
            "labels": draw.integers(0, VIT.classes, B).astype(np.int32)}


def texts(seed: int):
    """A batch of documents kept apart, of which some labels do not count."""
    draw = np.random.default_rng(seed)
    rows_BT1 = draw.integers(0, GPT.vocabulary, (B, GPT.tokens + 1))
    rows_BT1[:, GPT.tokens // 2] = 0  # each row's second document begins here
    weight_BT = draw.integers(0, 2, (B, GPT.tokens)).astype(np.float32)
    return tokens.as_batch(rows_BT1, end=0) | {"weight": weight_BT}


def vit(preset: str = "tensor_parallel"):
    """The ViT under Adam, dropout on: a Trial that is right."""
    mesh = mesh_of()
    step = describe(VIT, Plan(**mesh.shape, rules=preset), B)
    work = step_work(step)
    return Trial(
        ViT, VIT, getattr(Sharding, preset)(), ADAM, training.loss_and_metrics,
        tuple(map(images, range(STEPS))), *beside(ViT, VIT, ADAM, reference.vit), RULES[preset],
        step.numbers["stored"], 1, step_traffic(step), mesh.size * work.useful, work.factor, mesh)


def gpt():
    """MiniGPT, tensor-parallel, under its recipe: clipping, dropout, documents, weights."""
    mesh = mesh_of()
    step = describe(GPT, Plan(**mesh.shape, rules="tensor_parallel"), B)
    work, traffic = step_work(step), step_traffic(step, clipped=True)
    alone = beside(MiniGPT, GPT, RECIPE, reference.minigpt, classes=GPT.vocabulary)
    count, size = traffic["all-reduce", ("batch",)]
    traffic["all-reduce", ("batch",)] = count + 1, size + 4  # the weights' sum, ahead of the rest
    return Trial(
        MiniGPT, GPT, Sharding.tensor_parallel(), RECIPE, language_loss,
        tuple(map(texts, range(STEPS))), *alone, RULES["tensor_parallel"],
        step.numbers["stored"], 3, traffic, mesh.size * work.useful, work.factor, mesh)


SPLIT = {"H": "model", "F": "model", "V": "model"}  # written down once more, to be compared with
RULES = {"tensor_parallel": SPLIT, "fully_sharded": SPLIT | {"D": "batch"}}
