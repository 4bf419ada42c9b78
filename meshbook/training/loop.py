"""One step, the loop, evaluation: for any model that maps inputs to logits.

The arrays that a step takes and returns are those of `meshbook.training.state`.
"""
from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxtyping import Array

from meshbook import proofs
from meshbook.hlo.options import compiled_fast
from meshbook.parallel.zero import value_and_grad
from meshbook.training.optimizers import (
    found_in, last_gradients, weights_of_moments
)
from meshbook.training.state import TrainState


def value_and_gradients(
    state: TrainState, batch: Mapping[str, Array | np.ndarray], key: jax.Array
):
    """((loss, metrics), gradients) of one training batch; the key is folded with step."""
    key = jax.random.fold_in(key, state.step)
    grad = value_and_grad(state.program.loss)
    return grad(state.params, state.program, batch, key)


@partial(jax.jit, donate_argnums=0)
def train_step(
    state: TrainState, batch: Mapping[str, Array | np.ndarray], key: jax.Array
):
    """One step: (state, metrics). The old state's memory is given to the new one.

    To be called under `jax.set_mesh`, as `fit` does.
    batch: a dict with inputs (B, ...) and labels (B, ...), on the state's mesh;
    key: one for the whole run, the step number is folded in. metrics: loss
    (nats) and accuracy, scalars on the devices.
    """
    (_, metrics), grads = value_and_gradients(state, batch, key)
    with jax.named_scope("update"):
        params, opt_state = state.program.update(
            grads, state.opt_state, state.params
        )
    new = replace(
        state, step=state.step + 1, params=params, opt_state=opt_state
    )
    return new, metrics


def compile_step(
    state: TrainState,
    batch: Mapping[str, Array | np.ndarray | jax.ShapeDtypeStruct],
    key: jax.Array | jax.ShapeDtypeStruct,
):
    """The program that train_step is for these arrays, at the highest matmul precision.

    state, batch: arrays, or shapes with shardings. On a CPU, products of float32
    are that precise anyway; a TPU would round their factors to bfloat16, a recent
    GPU to TF32.
    """
    mesh = state.program.mesh
    options = compiled_fast(mesh)
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        return train_step.lower(state, batch, key).compile(options)


def run(state: TrainState, key: jax.Array, program: Callable | None = None):
    """This training as one side of `proofs.assert_same_training`: a proofs.Run.

    program: what `compile_step` made of the state; without it, the first batch
    compiles it. A step is one call of it on a NumPy batch. The gradients are read
    from the program too: an optimizer's first moments before and after a step say
    what its gradient was (of which Adam's losses depend on the direction only).
    Their norm is a metric: before clipping where the optimizer keeps that, as
    `language_recipe` does. Parameters are compared if it has no second moments.
    `optax.sgd(rate, momentum=0.0)` is plain SGD that keeps its gradient.
    Raises ValueError for an optimizer that keeps none.
    """
    mesh, programs = state.program.mesh, [program] if program else []
    adaptive = found_in(state.opt_state, "nu") is not None
    moment = "mu" if adaptive else "trace"
    if found_in(state.opt_state, moment) is None:
        raise ValueError(
            "expected an optimizer that keeps its gradients, such as "
            "optax.sgd(rate, momentum=0.0) or Adam; found a state with "
            f"{', '.join(sorted(state.opt_state)) or 'nothing'}"
        )
    weights = weights_of_moments(state.program.optimizer, moment)
    key, weights = jax.device_put((key, weights), NamedSharding(mesh, P()))

    def observed(state, batch):
        batch = state.program.place(batch)
        if not programs:
            programs.append(compile_step(state, batch, key))
        before = copied(found_in(state.opt_state, moment))  # the step donates it
        state, metrics = programs[0](state, batch, key)
        after = found_in(state.opt_state, moment)
        return state, metrics, *last_gradients(before, after, *weights)

    def step(state, batch):
        state, metrics, _, norm = observed(state, batch)
        unclipped = found_in(state.opt_state, "gradient_norm")
        norm = norm if unclipped is None else unclipped
        return state, metrics | {"gradient_norm": norm}

    params = None if adaptive else lambda state: state.params
    gradients = lambda state, batch: observed(state, batch)[2]
    return proofs.Run(step, state, gradients, params)


@jax.jit
def copied(tree: Any):
    """The same arrays in memory of their own."""
    return jax.tree.map(jnp.copy, tree)


@jax.jit
def evaluation_step(
    state: TrainState, batch: Mapping[str, Array | np.ndarray]
):
    """Sums over one batch, dropout off: (loss, right answers, labels that count)."""
    _, metrics = state.program.loss(state.params, state.program, batch)
    count = batch["weight"].sum()
    return metrics["loss"] * count, metrics["accuracy"] * count, count


def evaluate(
    state: TrainState, batches: Iterable[Mapping[str, Array | np.ndarray]]
):
    """Mean loss (nats) and accuracy over batches, with dropout and augmentation off.

    The host is one batch ahead of the devices, and no more: more than 32 programs
    in flight can lock simulated CPU devices up. A batch may carry weight, of the
    shape of its labels (B,) or (B, T): 0 marks padding. Raises ValueError where
    there is no batch.
    """
    sums = []
    for batch in batches:
        weight = np.ones(batch["labels"].shape, np.float32)
        batch = state.program.place({"weight": weight} | batch)
        with jax.set_mesh(state.program.mesh):
            sums.append(evaluation_step(state, batch))
        jax.block_until_ready(sums[-2:-1])  # the host is one batch ahead
    if not sums:
        raise ValueError(
            "evaluate() needs at least one batch; the iterator was empty"
        )
    loss, right, count = map(float, np.float64(jax.device_get(sums)).sum(0))
    return {"loss": loss / count, "accuracy": right / count}


@jax.jit
def metrics_of(state: TrainState, batch: Mapping[str, Array | np.ndarray]):
    """The metrics of the loss that is trained, dropout off."""
    program = state.program
    return program.loss(state.params, program, batch)[1]


def mean_metrics(state: TrainState, batches: Iterable[Mapping[str, Array | np.ndarray]]):
    """Means of the loss's metrics over whole batches, with dropout and augmentation off.

    Of any loss, also in microbatches or by a pipeline, which `evaluate` and its weights are
    not. Raises ValueError where there is no batch.
    """
    found = []
    for batch in batches:
        batch = state.program.place(batch)
        with jax.set_mesh(state.program.mesh):
            found.append(metrics_of(state, batch))
        jax.block_until_ready(found[-2:-1])  # the host is one batch ahead
    if not found:
        raise ValueError("mean_metrics() needs at least one batch; the iterator was empty")
    return jax.tree.map(lambda *values: float(np.mean(values)), *jax.device_get(found))


def fit(
    state: TrainState, batches: Iterable[Mapping[str, Array | np.ndarray]],
    key: jax.Array, on_step: Callable | None = None,
):
    """Train on every batch: (state, history), history a list of dicts of floats.

    on_step(state, metrics) is called after each step was dispatched; its metrics are
    still on the devices. The loop itself reads them one step late, so that the host
    never waits for the step that is running.
    """
    history, waiting = [], collections.deque()
    for batch in batches:
        batch = state.program.place(batch)
        with jax.set_mesh(state.program.mesh):
            state, metrics = train_step(state, batch, key)
        waiting.append(metrics)
        if on_step is not None:
            on_step(state, metrics)
        if len(waiting) > 1:
            history.append(jax.tree.map(float, waiting.popleft()))
    history += [jax.tree.map(float, metrics) for metrics in waiting]
    return state, history
