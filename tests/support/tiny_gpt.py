"""A MiniGPT small enough for tests, on any mesh by any preset: no test is in here."""
import functools

import jax
import numpy as np
import optax
from flax import nnx
from flax.serialization import to_state_dict
from jax.sharding import NamedSharding, PartitionSpec as P
from tiny_vit import KEY

from meshbook.models import MiniGPT, MiniGPTConfig
from meshbook.models.losses import language_loss
from meshbook.sharding import Sharding, make_mesh
from meshbook.training import (
    TrainState, as_it_is, clipped, initialiser, take_apart, train_step,
)

B = 16
CLIPPED = optax.chain(clipped(0.5), optax.sgd(0.5, momentum=0.0))  # every step's norm is above
CONFIG = MiniGPTConfig(vocabulary=250, tokens=16, embed=32, hidden=64, heads=4, layers=2)
ROWS = ("none", "data_parallel", "tensor_parallel", "fully_sharded")


def batch(seed):
    tokens = np.random.default_rng(seed).integers(0, 250, (B, 17)).astype(np.int32)
    return {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}


BATCHES = [batch(seed) for seed in range(10)]


def build(config=CONFIG, sharding=Sharding.none()):
    return MiniGPT(config, sharding, rngs=nnx.Rngs(0))


@functools.cache
def weights():
    """The weights that every state of CONFIG starts from, on the host."""
    make, mesh = (lambda: build()), mesh_of((1, 1))
    with jax.set_mesh(mesh):
        init = initialiser(make, take_apart(make, optax.identity(), mesh, as_it_is))
        return jax.tree.map(np.asarray, init.lower().compile()()[1])


@functools.cache
def mesh_of(shape):
    return make_mesh(shape)


def tiny_state(row="none", shape=(1, 1), optimizer=optax.identity(), loss=language_loss):
    """A run of CONFIG with those weights, and an optimizer's state of zeros."""
    make, mesh = (lambda: build(sharding=getattr(Sharding, row)())), mesh_of(shape)
    with jax.set_mesh(mesh):
        program = take_apart(make, optimizer, mesh, as_it_is, loss)
    shapes = to_state_dict(jax.eval_shape(optimizer.init, weights()))
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    arrays = place_all((np.int32(0), weights(), zeros), (P(), *program.specs), mesh)
    return TrainState(*arrays, program)


@functools.cache
def compiled(row="none", shape=(1, 1)):
    """A state under clipped SGD, and its step as a program."""
    state = tiny_state(row, shape, CLIPPED)
    with jax.set_mesh(mesh_of(shape)):
        step = train_step.lower(state, state.program.place(BATCHES[0]), KEY)
    return state, step.compile()


def place_all(tree, specs, mesh):
    """Every leaf where its spec says."""
    return jax.device_put(tree, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))
