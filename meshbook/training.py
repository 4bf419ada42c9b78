"""State, loss, one step, the loop: for any model that maps inputs to logits.

A model is an `nnx.Module` called as `model(inputs, key=None)`: with a key it trains
(dropout on), without one it evaluates. It is taken apart once, when the state is
created; a step sees only nested dicts of arrays, so nothing walks an object tree.
"""
from __future__ import annotations

import collections
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.serialization import from_state_dict, to_state_dict
from jax.sharding import NamedSharding, PartitionSpec as P

from meshbook.sharding import inside, on, pin, place


def weighted_mean(x, weight=None):
    """Mean of x; with weight (0 for padding), of what counts."""
    return x.mean() if weight is None else (x * weight).sum() / weight.sum()


def loss_and_metrics(params, program, batch, key=None):
    """Mean cross-entropy in nats, and the metrics of one batch.

    batch: inputs (B, ...), labels (B, ...) integer, and optionally weight of the
    same shape as labels (0 for padding). key None: evaluation.
    """
    keys = (None, None) if key is None else jax.random.split(key)
    with jax.named_scope("prepare"):
        inputs = program.prepare(batch["inputs"], keys[0])
    logits = program.apply(params, inputs, keys[1]).astype(jnp.float32)
    with jax.named_scope("loss"):
        labels = batch["labels"]
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, labels
        )
        right = (logits.argmax(-1) == labels).astype(jnp.float32)
        mean = partial(weighted_mean, weight=batch.get("weight"))
        loss = mean(losses)
        return loss, {"loss": loss, "accuracy": mean(right)}


@dataclass(frozen=True, eq=False)
class Program:
    """What a training run is besides its arrays: model, optimizer, mesh, layouts, loss.

    loss(params, program, batch, key=None) -> (loss, metrics): see loss_and_metrics.
    """

    graph: Any
    variables: Any
    optimizer: optax.GradientTransformation
    mesh: jax.sharding.Mesh | None
    prepare: Callable
    loss: Callable = loss_and_metrics

    def model(self, params):
        """The model, put together again with these parameters."""
        variables = jax.tree.map(lambda x: x, self.variables)
        pure = from_state_dict(nnx.to_pure_dict(variables), params)
        nnx.replace_by_pure_dict(variables, pure)
        return nnx.merge(self.graph, variables)

    def apply(self, params, inputs, key=None):
        """The model's logits with these parameters; with a key, dropout is on."""
        return self.model(params)(inputs, key=key)

    @property
    def specs(self):
        """The PartitionSpec of every parameter and of every optimizer leaf."""
        params = nested(nnx.get_partition_spec(self.variables))
        state = jax.eval_shape(self.optimizer.init, nested(self.variables))
        moments = optax.tree_utils.tree_map_params(
            self.optimizer, lambda _, spec: spec, state, params,
            transform_non_params=lambda _: P(),
        )
        return params, to_state_dict(moments)

    def update(self, grads, opt_state, params):
        """The optimizer's step on nested dicts: (new parameters, new state)."""
        empty = jax.eval_shape(self.optimizer.init, params)
        old = from_state_dict(empty, opt_state)
        updates, new = self.optimizer.update(grads, old, params)
        return optax.apply_updates(params, updates), to_state_dict(new)


def nested(variables):
    """The values of an nnx.State as nested dicts with string keys."""
    return to_state_dict(nnx.to_pure_dict(variables))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """A run's arrays, and the program that they belong to.

    step: int32 scalar; params and opt_state: nested dicts of arrays.
    """

    step: jax.Array
    params: dict
    opt_state: dict
    program: Program = field(metadata={"static": True})


def recipe(steps, peak=4e-3):
    """The book's optimizer: AdamW, whose learning rate warms up and falls again.

    steps: how many there will be; the rate rises to peak during the first tenth
    and then follows half a cosine down to 0. Source: Loshchilov and Hutter 2019.
    """
    rate = optax.warmup_cosine_decay_schedule(0, peak, steps // 10, steps)
    return optax.adamw(rate, b2=0.99, weight_decay=0.05)


def language_recipe(steps, peak=2e-3):
    """The same for a language model: gradients of a norm above 1 are cut to 1 first."""
    return optax.chain(optax.clip_by_global_norm(1.0), recipe(steps, peak))


def as_it_is(inputs, key=None):
    """The default `prepare`: inputs reach the model unchanged."""
    return inputs


def create_state(
    make_model, optimizer, mesh=None, prepare=as_it_is, loss=loss_and_metrics
):
    """Parameters and optimizer state, created directly where they will live.

    make_model: a function without arguments that returns the nnx.Module; it is
    traced, so no array is ever whole on one device first. prepare(inputs, key)
    runs inside the step, before the model (key None: evaluation);
    loss(params, program, batch, key=None) -> (loss, metrics) is what is trained.
    Raises ValueError for a model with variables that are not nnx.Param, and for
    sizes that the mesh cannot divide.
    """
    with on(mesh):
        program = take_apart(make_model, optimizer, mesh, prepare, loss)
        return TrainState(*initialiser(make_model, program)(), program)


def take_apart(make_model, optimizer, mesh, prepare, loss=loss_and_metrics):
    """The Program of a model, found without making any array."""
    graph, variables, rest = nnx.split(
        nnx.eval_shape(make_model), nnx.Param, ...
    )
    if jax.tree.leaves(rest):
        paths = {"/".join(map(str, p)) for p, _ in nnx.to_flat_state(rest)}
        raise ValueError(
            "training carries nnx.Param only; this model also holds "
            f"{', '.join(sorted(paths))}. Give it its keys when it is called: "
            "model(inputs, key=key)"
        )
    return Program(graph, variables, optimizer, mesh, prepare, loss)


def abstract_state(
    make_model, optimizer, mesh=None, prepare=as_it_is, loss=loss_and_metrics
):
    """What create_state would make, as shapes and layouts without arrays.

    With it a step is lowered and compiled where nothing is run, also for a mesh of
    devices that are not here (`meshbook.topologies`).
    """
    with on(mesh):
        program = take_apart(make_model, optimizer, mesh, prepare, loss)
        arrays = jax.eval_shape(partial(initial_arrays, make_model, program))
    if mesh is None:
        return TrainState(*arrays, program)

    def lay_out(x, spec):
        where = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    layouts = P(), *program.specs
    return TrainState(*jax.tree.map(lay_out, arrays, layouts), program)


def initial_arrays(make_model, program):
    """Step number, parameters and optimizer state of a run that begins."""
    params = nested(nnx.state(make_model(), nnx.Param))
    opt_state = to_state_dict(program.optimizer.init(params))
    return jnp.zeros((), jnp.int32), params, opt_state


def initialiser(make_model, program):
    """A jitted function that makes the initial arrays, each in place.

    It runs once: where the devices are CPUs, LLVM takes a third of the time
    over it, for the same HLO.
    """
    init, mesh = partial(initial_arrays, make_model, program), program.mesh
    layouts, devices = None, jax.devices()
    if mesh is not None:
        place_on = partial(NamedSharding, mesh)
        layouts = jax.tree.map(place_on, (P(), *program.specs))
        devices = mesh.devices.flat
    options = {}
    if devices[0].platform == "cpu":
        options["xla_backend_optimization_level"] = 0
    return jax.jit(init, out_shardings=layouts, compiler_options=options)


def value_and_gradients(state, batch, key):
    """((loss, metrics), gradients) of one training batch; the key is folded with step."""
    key = jax.random.fold_in(key, state.step)
    grad = jax.value_and_grad(state.program.loss, has_aux=True)
    return grad(state.params, state.program, batch, key)


@jax.jit
def gradients(state, batch, key):
    """The gradients that train_step would use, laid out like the parameters."""
    with inside(state.program.mesh):
        return value_and_gradients(state, batch, key)[1]


@partial(jax.jit, donate_argnums=0)
def train_step(state, batch, key):
    """One step: (state, metrics). The old state's memory is given to the new one.

    batch: a dict with inputs (B, ...) and labels (B, ...), on the state's mesh;
    key: one for the whole run, the step number is folded in. metrics: loss
    (nats) and accuracy, scalars on the devices.
    """
    with inside(state.program.mesh):
        (_, metrics), grads = value_and_gradients(state, batch, key)
        with jax.named_scope("update"):
            new = state.program.update(grads, state.opt_state, state.params)
            params, opt_state = jax.tree.map(pin, new, state.program.specs)
        new = replace(
            state, step=state.step + 1, params=params, opt_state=opt_state
        )
        return new, metrics


@jax.jit
def evaluation_step(state, batch):
    """Sums over one batch, dropout off: (loss, right answers, labels that count)."""
    with inside(state.program.mesh):
        _, metrics = state.program.loss(state.params, state.program, batch)
        count = batch["weight"].sum()
        return metrics["loss"] * count, metrics["accuracy"] * count, count


def evaluate(state, batches):
    """Mean loss (nats) and accuracy over batches, with dropout and augmentation off.

    A batch may carry weight, of the shape of its labels (B,) or (B, T): 0 marks
    padding. Raises ValueError where there is no batch.
    """
    totals = None
    for batch in batches:
        weight = jnp.ones(batch["labels"].shape, jnp.float32)
        batch = place({"weight": weight} | batch, state.program.mesh)
        sums = evaluation_step(state, batch)
        totals = sums if totals is None else jax.tree.map(jnp.add, totals, sums)
    if totals is None:
        raise ValueError(
            "evaluate() needs at least one batch; the iterator was empty"
        )
    loss, right, count = map(float, totals)
    return {"loss": loss / count, "accuracy": right / count}


def fit(state, batches, key, on_step=None):
    """Train on every batch: (state, history), history a list of dicts of floats.

    on_step(state, metrics) is called after each step was dispatched; its metrics are
    still on the devices. The loop itself reads them one step late, so that the host
    never waits for the step that is running.
    """
    history, waiting = [], collections.deque()
    for batch in batches:
        batch = place(batch, state.program.mesh)
        state, metrics = train_step(state, batch, key)
        waiting.append(metrics)
        if on_step is not None:
            on_step(state, metrics)
        if len(waiting) > 1:
            history.append(jax.tree.map(float, waiting.popleft()))
    history += [jax.tree.map(float, metrics) for metrics in waiting]
    return state, history
