"""A tiny ViT: its states, its compiled steps, its batches, and where its tensors lie."""
import dataclasses
import functools

import jax
import numpy as np
import optax
from flax import nnx

from meshbook import training
from meshbook.data.augmentation import Preparation
from meshbook.models import ViT, ViTConfig
from meshbook.sharding import Sharding, make_mesh

KEY = jax.random.key(7)
TENSOR_PARALLEL = {"H": "model", "F": "model", "V": "model"}
# Written down once more: what a test expects must not come from the rules that it checks.
RULES = {
    "tensor_parallel": TENSOR_PARALLEL,
    "fully_sharded": TENSOR_PARALLEL | {"D": "batch"},
}
CONFIG = ViTConfig(embed=32, hidden=64, heads=4, layers=2, patch=8)
STILL = dataclasses.replace(CONFIG, dropout=0.0)  # with `normalised`, nothing is drawn
B = 16
PREPARE = Preparation((0.5,) * 3, (0.25,) * 3, True)


def normalised(inputs, key=None):
    return PREPARE(inputs)


def batch(seed, rows=B):
    random = np.random.default_rng(seed)
    labels = random.integers(0, 10, rows).astype(np.int32)
    images = random.integers(0, 256, (rows, 32, 32, 3)).astype(np.uint8)
    return {"inputs": images, "labels": labels}


BATCHES = [batch(seed) for seed in range(20)]


ADAM, SGD = optax.adam(1e-3), optax.sgd(0.05, momentum=0.0)


@functools.cache
def first_state(row="none", shape=(1, 1), optimizer=ADAM, config=CONFIG, *, model=ViT,
                prepare=PREPARE, loss=training.loss_and_metrics):
    """The start of a training, made and compiled once for all tests: none may donate it."""
    make = lambda: model(config, getattr(Sharding, row)(), rngs=nnx.Rngs(0))
    return training.create_state(make, optimizer, make_mesh(shape), prepare, loss)


def make_state(*arguments, **options):
    """A copy of that start, whose steps are compiled once, too."""
    start = first_state(*arguments, **options)
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding, may_alias=False), start)


@functools.cache
def compiled(row="none", shape=(1, 1), config=CONFIG, **options):
    """A state under SGD, and its step as a program."""
    state = first_state(row, shape, SGD, config, **options)
    with jax.set_mesh(state.program.mesh):
        step = training.train_step.lower(state, state.program.place(BATCHES[0]), KEY)
    return state, step.compile()


def run(state, program=None):
    """The training that this program does, from this state."""
    return training.run(state, KEY, program)
