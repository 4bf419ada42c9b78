"""The arrays of a training run, and what it is besides them: parameters, optimizer, loss.

A model is an `nnx.Module` called as `model(inputs, key=None)`: with a key it trains
(dropout on), without one it evaluates. It is taken apart once, when the state is
created; a step sees only nested dicts of arrays, so nothing walks an object tree.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.serialization import from_state_dict, to_state_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Shaped

from meshbook.hlo.options import compiled_fast
from meshbook.parallel import zero
from meshbook.sharding import axes_of, make_mesh, place


def weighted_mean(
    x: Shaped[Array | np.ndarray, "..."],
    weight: Shaped[Array | np.ndarray, "..."] | None = None,
):
    """Mean of x; with weight (0 for padding), of what counts."""
    if weight is None:
        return x.mean()
    return jnp.where(weight != 0, x * weight, 0).sum() / weight.sum()


def check_labels(labels: Shaped[Array | np.ndarray, "..."], classes: int):
    """TypeError for labels that are no integers, ValueError for one out of range.

    Only a NumPy array can be looked at. Inside a step, the loss of a label that
    is not among so many classes is NaN.
    """
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(
            f"labels are numbers of classes: expected integers, found {labels.dtype}"
        )
    if isinstance(labels, np.ndarray):
        strange = labels[(labels < 0) | (labels >= classes)]
        if strange.size:
            raise ValueError(
                f"expected labels from 0 to {classes - 1}, found {strange[0]}"
            )


def loss_and_metrics(
    params: Any, program: Program, batch: Mapping[str, Array | np.ndarray],
    key: jax.Array | None = None,
):
    """Mean cross-entropy in nats, and the metrics of one batch.

    batch: inputs (B, ...), labels (B, ...) integer, and optionally weight of the
    same shape as labels (0 for padding). key None: evaluation.
    """
    keys = (None, None) if key is None else jax.random.split(key)
    with jax.named_scope("prepare"):
        inputs = program.prepare(batch["inputs"], keys[0])
    logits = program.apply(params, inputs, keys[1]).astype(jnp.float32)
    with jax.named_scope("loss"):
        check_labels(batch["labels"], classes := logits.shape[-1])
        rows = P(*jax.typeof(logits).sharding.spec[:logits.ndim - 1])
        labels = jax.reshard(batch["labels"], rows)
        known = (labels >= 0) & (labels < classes)
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, labels
        )
        losses = jnp.where(known, losses, jnp.nan)
        right = (logits.argmax(-1) == labels).astype(jnp.float32)
        mean = partial(weighted_mean, weight=batch.get("weight"))
        loss = mean(losses)
        return loss, {"loss": loss, "accuracy": mean(right)}


@dataclass(frozen=True, eq=False)
class Program:
    """What a training run is besides its arrays: model, optimizer, mesh, layouts, loss.

    loss(params, program, batch, key=None) -> (loss, metrics): see loss_and_metrics.
    rows: the mesh axis, or axes, that split a batch's rows. waits: whether the loss may leave sums
    over devices to whoever asks for it, who adds up parts of the batch before.
    """

    graph: Any
    variables: Any
    optimizer: optax.GradientTransformation
    mesh: jax.sharding.Mesh
    prepare: Callable
    loss: Callable
    rows: str | tuple
    waits: bool = False

    @property
    def ways(self):
        """Into how many parts a batch is split."""
        return math.prod(self.mesh.shape[axis] for axis in axes_of(self.rows))

    def place(self, batch: Mapping[str, Array | np.ndarray]):
        """A batch of NumPy arrays, its rows on the mesh: see sharding.place."""
        return place(batch, self.mesh, self.rows)

    def model(self, params: Any):
        """The model, put together again with these parameters."""
        params = params if self.lives is None else zero.gathered_once(params, self.lives)
        return nnx.merge(self.graph, numbered(params))

    def apply(
        self, params: Any, inputs: Any, key: jax.Array | None = None
    ):
        """The model's logits with these parameters; with a key, dropout is on."""
        return self.model(params)(inputs, key=key)

    @property
    def lives(self):
        """A sharding.Lives for every parameter, or None where gradients are not summed by hand."""
        found = nested(jax.tree.map(
            lambda w: w.get_metadata().get("lives"), self.variables,
            is_leaf=lambda w: isinstance(w, nnx.Variable)))
        return found if jax.tree.leaves(found) else None

    @property
    def specs(self):
        """The PartitionSpec of every parameter and of every optimizer leaf."""
        params = owned = nested(nnx.get_partition_spec(self.variables))
        if self.lives is not None:
            owned = jax.tree.map(lambda each: each.moments, self.lives)
        state = jax.eval_shape(self.optimizer.init, nested(self.variables))
        moments = optax.tree_utils.tree_map_params(
            self.optimizer, lambda _, spec: spec, state, owned,
            transform_non_params=lambda _: P(),
        )
        return params, to_state_dict(moments)

    def update(self, grads: Any, opt_state: Any, params: Any):
        """The optimizer's step on nested dicts: (new parameters, new state).

        A device updates what its moments are of; where they are of a part, parts are gathered.
        """
        specs, lives = jax.tree.map(lambda w: jax.typeof(w).sharding.spec, params), self.lives
        params = params if lives is None else zero.own_part(params, lives)
        empty = jax.eval_shape(self.optimizer.init, params)
        old = from_state_dict(empty, opt_state)
        updates, new = self.optimizer.update(grads, old, params)
        params = optax.apply_updates(params, updates)
        params = params if lives is None else jax.tree.map(jax.reshard, params, specs)
        return params, to_state_dict(new)


def nested(variables: Any):
    """The values of an nnx.State as nested dicts with string keys."""
    return to_state_dict(nnx.to_pure_dict(variables))


def numbered(tree: Any):
    """Nested dicts whose keys "0", "1", ... are numbers again, as nnx has them.

    It goes through a list in the order of its keys, and "10" comes before "2".
    """
    if not isinstance(tree, dict):
        return tree
    return {int(name) if name.isdigit() else name: numbered(each)
            for name, each in tree.items()}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """A run's arrays, and the program that they belong to.

    step: int32 scalar; params and opt_state: nested dicts of arrays.
    """

    step: Any
    params: Any
    opt_state: Any
    program: Program = field(metadata={"static": True})


def as_it_is(inputs: Any, key: jax.Array | None = None):
    """The default `prepare`: inputs reach the model unchanged."""
    return inputs


def create_state(
    make_model: Callable, optimizer: optax.GradientTransformation,
    mesh: Mesh | None = None, prepare: Callable = as_it_is,
    loss: Callable = loss_and_metrics, rows: str | tuple[str, ...] = "batch",
):
    """Parameters and optimizer state, created directly where they will live.

    make_model: a function without arguments that returns the nnx.Module; it is
    traced, so no array is ever whole on one device first. mesh: an Explicit one;
    the default is a mesh of one device. prepare(inputs, key)
    runs inside the step, before the model (key None: evaluation);
    loss(params, program, batch, key=None) -> (loss, metrics) is what is trained;
    rows: the mesh axis, or axes, that split a batch. Raises ValueError for a model
    with variables that are not nnx.Param, and for sizes that the mesh cannot divide.
    """
    mesh = mesh or make_mesh((1, 1))
    with jax.set_mesh(mesh):
        program = take_apart(make_model, optimizer, mesh, prepare, loss, rows)
        return TrainState(*initialiser(make_model, program)(), program)


def take_apart(
    make_model: Callable, optimizer: optax.GradientTransformation, mesh: Mesh,
    prepare: Callable, loss: Callable = loss_and_metrics,
    rows: str | tuple[str, ...] = "batch",
):
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
    return Program(graph, variables, optimizer, mesh, prepare, loss, rows)


def abstract_state(
    make_model: Callable, optimizer: optax.GradientTransformation,
    mesh: Mesh | None = None, prepare: Callable = as_it_is,
    loss: Callable = loss_and_metrics, rows: str | tuple[str, ...] = "batch",
):
    """What create_state would make, as shapes and layouts without arrays.

    With it a step is lowered and compiled where nothing is run, also for a mesh of
    devices that are not here (`meshbook.planning.topologies`).
    """
    mesh = mesh or make_mesh((1, 1))
    with jax.set_mesh(mesh):
        program = take_apart(make_model, optimizer, mesh, prepare, loss, rows)
        arrays = jax.eval_shape(partial(initial_arrays, make_model, program))

    def lay_out(x, spec):
        where = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    layouts = P(), *program.specs
    return TrainState(*jax.tree.map(lay_out, arrays, layouts), program)


def laid_out(state: TrainState, make_model: Callable, rows: str | tuple[str, ...] = "batch"):
    """These parameters as the rules of another model say, which has the same: for reading only.

    A text is written by layers that no axis splits, whatever split them in training. The moments
    stay behind. make_model, rows: of `create_state`. Raises ValueError for other parameters.
    """
    old = state.program
    with jax.set_mesh(old.mesh):
        program = take_apart(make_model, old.optimizer, old.mesh, old.prepare, rows=rows)
    shapes = lambda tree: {jax.tree_util.keystr(path): leaf.shape
                           for path, leaf in jax.tree.leaves_with_path(tree)}
    found, expected = shapes(state.params), shapes(nested(program.variables))
    if found != expected:
        name = min(name for name in found | expected if found.get(name) != expected.get(name))
        raise ValueError(f"expected the parameters of the other model, found others: {name} has "
                         f"the shape {found.get(name, 'of none')} here, and "
                         f"{expected.get(name, 'of none')} there")
    layouts = jax.tree.map(partial(NamedSharding, old.mesh), program.specs[0])
    return replace(state, params=jax.device_put(state.params, layouts), opt_state={},
                   program=program)


def initial_arrays(make_model: Callable, program: Program):
    """Step number, parameters and optimizer state of a run that begins."""
    params = nested(nnx.state(make_model(), nnx.Param))
    opt_state = to_state_dict(program.optimizer.init(params))
    return jnp.zeros((), jnp.int32), params, opt_state


def initialiser(make_model: Callable, program: Program):
    """A jitted function that makes the initial arrays, each in place; it runs once."""
    layouts = jax.tree.map(
        partial(NamedSharding, program.mesh), (P(), *program.specs)
    )
    return jax.jit(
        partial(initial_arrays, make_model, program), out_shardings=layouts,
        compiler_options=compiled_fast(program.mesh),
    )
