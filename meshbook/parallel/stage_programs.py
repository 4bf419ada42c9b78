"""Three programs of a pipeline stage: F, its output; B, its input's gradient; W, its weights'.

Forward and backward pass are traced as one list of equations. F is what the output needs, B what
the input's gradient needs besides, and W what is left, so that no matmul is done twice. Between the
programs wait the results of matmuls; what is elementwise is made of them again, and slices of
weights are sliced again, so that no microbatch keeps a weight.

Source: Qi et al. 2023, "Zero bubble pipeline parallelism" (the gradient in two parts).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array

from meshbook.hlo.options import compiled_fast
from meshbook.sharding import place

KEPT = ("dot_general", "conv_general_dilated", "shard_map")  # what later programs do not repeat


class Part(NamedTuple):
    """One program of a stage, compiled: program(arrays that it reads, totals) -> what it makes."""
    reads: list[Var]
    makes: list[Var]
    program: Callable


class Stage(NamedTuple):
    """One stage of a model on the devices of a mesh, ready to run.

    weights: a tree of arrays there. parts: by kind, F, B and W. names: which variables are weights,
    x, batch, y, and the gradients dy, dx and dw; dx is empty where x is no float.
    """
    mesh: Mesh
    weights: Any
    parts: dict[str, Part]
    names: Mapping[str, Any]

    def bytes_of(self, variable: Var):
        """The bytes of a variable on each device of the stage."""
        return bytes_of_shard(type_on(variable.aval, self.mesh))


def stage_meshes(stages: int, shape: Sequence[int] = (1, 1),
                 axis_names: Sequence[str] = ("batch", "model")):
    """A mesh of this shape for each stage, of devices that no other stage has."""
    each = int(np.prod(shape))
    if stages < 1 or stages * each > len(jax.devices()):
        raise ValueError(f"{stages} stages of {each} devices need {stages * each}; JAX has "
                         f"{len(jax.devices())}")
    groups = np.array(jax.devices()[:stages * each]).reshape(stages, *shape)
    types = (AxisType.Explicit,) * len(shape)
    return [Mesh(group, tuple(axis_names), axis_types=types) for group in groups]


def compile_stages(functions: Sequence[Callable], weights: Sequence[Any], meshes: Sequence[Mesh],
                   batch: Mapping[str, Any]):
    """Compile a model that is cut into stages, each for its own mesh: a list of Stages.

    functions: y = function(weights, x, batch) of each stage. x is batch["inputs"] for the first and
    what the stage before found for all others; the last one's y is the loss. weights: a tree of
    each, on its mesh. meshes: one per device of the pipeline; with more stages they are taken in
    turn. batch: a microbatch of NumPy arrays. Raises ValueError where stages and weights differ in
    number, or the last one's y is no scalar.
    """
    if len(functions) != len(weights):
        raise ValueError(f"expected weights of {len(functions)} stages; found {len(weights)}")
    stages = []
    for number, (function, each) in enumerate(zip(functions, weights)):
        mesh = meshes[number % len(meshes)]
        given = place(batch, mesh)
        x = type_on(stages[-1].names["y"].aval, mesh) if stages else given["inputs"]
        stages.append(compile_stage(function, each, x, given, mesh))
    if shape := stages[-1].names["y"].aval.shape:
        raise ValueError(f"the last stage finds the loss, a scalar; found {shape}")
    return stages


def compile_stage(function: Callable, weights: Any, x: Any, batch: Mapping[str, Any], mesh: Mesh):
    """The three programs of one stage, y = function(weights, x, batch)."""
    with jax.set_mesh(mesh):
        equations, names = both_passes(function, weights, x, batch)
    known, parts = {*names["weights"], names["x"], names["dy"], *names["batch"].values()}, {}
    for kind, makes in {"F": [names["y"]], "B": names["dx"], "W": names["dw"]}.items():
        parts[kind] = needed(equations, makes, known)
        known = known | {v for each in parts[kind][0] for v in each.outvars
                         if each.primitive.name in KEPT}
    return Stage(mesh, weights, compile_parts(parts, names, mesh), names)


def both_passes(function: Callable, weights: Any, x: Any, batch: Mapping[str, Any]):
    """The equations of a stage's forward and backward pass, and what its variables are.

    Nothing is left inside of a loop or of an inner jit, where B and W could not be told apart.
    """
    floats = jnp.issubdtype(x.dtype, jnp.floating)  # tokens have no gradient

    def both(weights, x, batch, dy):
        given = (weights, x) if floats else (weights,)
        y, backward = jax.vjp(lambda w, x=x: function(w, x, batch), *given)
        dw, *dx = backward(dy)
        return y, dx, jax.tree.leaves(dw)

    y = jax.eval_shape(function, weights, x, batch)
    with jax.disable_jit():
        jaxpr, found = jax.make_jaxpr(both, return_shape=True)(weights, x, batch, y)
    taken = iter(jaxpr.jaxpr.invars)
    names = {key: jax.tree.map(lambda _: next(taken), each) for key, each in {
        "weights": jax.tree.leaves(weights), "x": x, "batch": dict(batch), "dy": y}.items()}
    made = iter(jaxpr.jaxpr.outvars)
    names |= zip(("y", "dx", "dw"), jax.tree.map(lambda _: next(made), found))
    names["constants"] = dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts))
    return jaxpr.jaxpr.eqns, names


def needed(equations: Sequence[JaxprEqn], makes: Iterable[Var | Literal], known: set[Var]):
    """The equations that make something of what is known, and what of that they read."""
    found, wanted = [], {v for v in makes if isinstance(v, Var)}
    for each in reversed(equations):
        if any(v in wanted and v not in known for v in each.outvars):
            found.append(each)
            wanted |= {v for v in each.invars if isinstance(v, Var)}
    return found[::-1], wanted & known


def compile_parts(parts: Mapping[str, tuple], names: Mapping[str, Any], mesh: Mesh):
    """The Parts of a stage. Each also makes what later ones read; W adds to totals of the step."""
    later, out = set(), {}
    for kind, (equations, reads) in reversed(parts.items()):
        made = {v for each in equations for v in each.outvars if each.primitive.name in KEPT}
        makes = {"F": [names["y"]], "B": names["dx"], "W": names["dw"]}[kind]
        makes = [*makes, *(made & later - {*makes})]
        program = partial(make_values, equations, list(reads), makes, names["constants"])
        totals = [type_on(v.aval, mesh) for v in names["dw"]] if kind == "W" else []
        with jax.set_mesh(mesh):
            lowered = jax.jit(program, donate_argnums=1).lower(
                [type_on(v.aval, mesh) for v in reads], totals)
        out[kind] = Part(list(reads), makes, lowered.compile(compiled_fast(mesh)))
        later |= reads
    return {kind: out[kind] for kind in parts}


def make_values(equations: Sequence[JaxprEqn], reads: Sequence[Var],
                makes: Sequence[Var | Literal], constants: Mapping, given: Sequence[Array],
                totals: Sequence[Array]):
    """What equations make of values, added to totals if there are any."""
    values = dict(zip(reads, given)) | constants
    value = lambda atom: values[atom] if isinstance(atom, Var) else atom.val
    for each in equations:
        params = each.primitive.get_bind_params(each.params)
        with each.ctx.manager:  # the axes of the mesh may be of another type here
            found = each.primitive.bind(*map(value, each.invars), **params)
        values |= zip(each.outvars, found if each.primitive.multiple_results else [found])
    made = list(map(value, makes))
    return list(map(jnp.add, totals, made)) if totals else made


def type_on(x: Any, mesh: Mesh):
    """An array's type on the devices of a mesh, sharded as it is."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, x.sharding.spec))


def bytes_of_shard(x: Any):
    """The bytes of an array, or of its type, on each of its devices."""
    return int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize


def kept_after(stage: Stage, kind: str):
    """The variables of a microbatch that a stage keeps after a program, for those after it."""
    done = "FBW".index(kind) + 1
    later = {v for each in "FBW"[done:] for v in stage.parts[each].reads}
    unmade = {v for each in "FBW"[done:] for v in stage.parts[each].makes if isinstance(v, Var)}
    unmade |= {stage.names["dy"]} if kind == "F" else set()
    return later - unmade - {*stage.names["weights"]}
