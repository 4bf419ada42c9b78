"""The arrays of a training run, and what it is besides them: parameters, optimizer, loss.

A model is an `nnx.Module` called as `model(inputs, key=None)`: with a key it trains
(dropout on), without one it evaluates. It is taken apart once, when the state is
created; a step sees only nested dicts of arrays, so nothing walks an object tree.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.serialization import from_state_dict, to_state_dict
from jax.sharding import NamedSharding, PartitionSpec as P

from meshbook.sharding import aligned, on


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
        labels = aligned(batch["labels"], logits)
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
    devices that are not here (`meshbook.planning.topologies`).
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
    layouts = None
    if mesh is not None:
        place_on = partial(NamedSharding, mesh)
        layouts = jax.tree.map(place_on, (P(), *program.specs))
    return jax.jit(
        init, out_shardings=layouts, compiler_options=compiled_fast(mesh)
    )


def compiled_fast(mesh):
    """Compiler options for what runs a few times: the same HLO, and on a CPU less LLVM."""
    devices = jax.devices() if mesh is None else mesh.devices.flat
    on_cpu = devices[0].platform == "cpu"
    return {"xla_backend_optimization_level": 0} if on_cpu else {}
