"""Host time of dispatching one training step of a six-layer ViT, by how it is called.

A step is dispatched by Python on the main thread and computed on others. What is
measured is CPU time of the main thread during the call, the devices being idle; the
result is waited for outside the measurement. It depends on the number of arrays and
not on their sizes, so the model has the source's depth and is otherwise tiny.
"""

import itertools
import statistics
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from helpers import start
from meshbook.models import ViT, ViTConfig
from meshbook.models.published import PublishedViT
from meshbook.sharding import Sharding
from meshbook.training import create_state, train_step

CONFIG = ViTConfig(patch=16, embed=16, hidden=16, heads=2, layers=6)
ROUNDS, WARM = 60, 5
OURS, FLOOR = "this book's train_step", "the same step on a flat list of arrays"


def cross_entropy(model, batch):
    """Mean loss of a model that is an object."""
    logits = model(batch["inputs"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def object_step(model, optimizer, batch):
    """A training step that changes its objects in place."""
    loss, grads = nnx.value_and_grad(cross_entropy)(model, batch)
    optimizer.update(model, grads)
    return loss


def tree_step(model, optimizer, batch):
    """The same where modules are plain pytrees: dropout's state goes through by hand."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss_and_rest(params):
        whole = nnx.merge(graph, params, rest, copy=True)
        return cross_entropy(whole, batch), nnx.state(whole, nnx.Not(nnx.Param))

    (loss, rest), grads = jax.value_and_grad(loss_and_rest, has_aux=True)(params)
    nnx.update(model, rest)
    optimizer.update(model, grads)
    return loss


def objects():
    """A fresh model with its optimizer."""
    with nnx.use_eager_sharding(False):
        model = PublishedViT(CONFIG, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def callers(batch):
    """Each way of calling a step: a function without arguments that dispatches one."""
    jitted, as_tree = nnx.jit(object_step), nnx.jit(tree_step, graph=False)
    first, second = objects(), objects()
    cached = nnx.cached_partial(nnx.jit(object_step), *objects())
    return {
        "nnx.jit on the object tree": lambda: jitted(*first, batch),
        "nnx.jit(graph=False)": lambda: as_tree(*second, batch),
        "nnx.cached_partial": lambda: cached(batch),
        OURS: nested(batch),
        FLOOR: flat(batch),
    }


def new_state():
    """This book's state: nested dicts of arrays."""
    make_model = lambda: ViT(CONFIG, Sharding.none(), rngs=nnx.Rngs(0))
    return create_state(make_model, optax.adam(1e-3))


def nested(batch):
    """This book's step as the book calls it."""
    states, key = [new_state()], jax.random.key(0)

    def call():
        with jax.set_mesh(states[0].program.mesh):
            states[0], metrics = train_step(states[0], batch, key)
        return states[0], metrics

    return call


def flat(batch):
    """The same step on a flat list of arrays: what jax.jit itself takes for so many."""
    state, key = new_state(), jax.random.key(0)
    (leaves, structure), mesh = jax.tree.flatten(state), state.program.mesh
    lists = [leaves]

    @partial(jax.jit, donate_argnums=0)
    def step(leaves, batch):
        state = jax.tree.unflatten(structure, leaves)
        state, metrics = train_step.__wrapped__(state, batch, key)
        return jax.tree.leaves(state), metrics

    def call():
        with jax.set_mesh(mesh):
            lists[0], metrics = step(lists[0], batch)
        return lists[0], metrics

    return call


def dispatch_times(calls, rounds):
    """Milliseconds of the main thread's CPU time of each call, in turns: {name: list}."""
    times = {name: [] for name in calls}
    for _, (name, call) in itertools.product(range(rounds), calls.items()):
        before = time.thread_time()
        result = call()
        times[name].append(1e3 * (time.thread_time() - before))
        jax.block_until_ready(result)
    return times


def run():
    """Median host milliseconds a step, and each as a multiple of this book's."""
    start(1)
    inputs = np.random.default_rng(0).random((2, 32, 32, 3), np.float32)
    batch = jax.device_put({"inputs": inputs, "labels": np.zeros(2, np.int32)})
    calls = callers(batch)
    dispatch_times(calls, WARM)
    times = dispatch_times(calls, ROUNDS)
    medians = {name: statistics.median(values) for name, values in times.items()}
    floor, ours = medians.pop(FLOOR), medians[OURS]
    notes = {name: f"{value / ours:.1f} times this book's" for name, value in medians.items()}
    notes[OURS] = f"floor: {FLOOR}"
    return [
        {"name": name, "value": value, "unit": "ms CPU a step", "floor": floor,
         "note": notes[name]}
        for name, value in medians.items()
    ]


if __name__ == "__main__":
    for row in run():
        print(row)
