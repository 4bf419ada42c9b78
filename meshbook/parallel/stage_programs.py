"""Three programs of a pipeline stage: F, its output; B, its input's gradient; W, its weights'.

Each is compiled for the devices of the stage. Between them wait the results of matmuls, so that no
matmul is done twice; what is elementwise is made of them again, and slices of weights are sliced
again, so that no microbatch keeps a weight. See `meshbook.parallel.backward`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Var
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from meshbook.hlo.options import compiled_fast
from meshbook.parallel.backward import Three, in_three, solved
from meshbook.sharding import place


class CompiledPart(NamedTuple):
    """F, B or W of a stage: program(arrays that it reads, totals) -> what it makes."""
    reads: list[Var]
    makes: list[Var]
    program: Callable


class Stage(NamedTuple):
    """One stage of a model on the devices of a mesh, ready to run.

    weights: a tree of arrays there. parts: by kind, F, B and W. three: which variables are weights,
    x, y, and their gradients. batch: the variables of a microbatch, by name.
    """
    mesh: Mesh
    weights: Any
    parts: dict[str, CompiledPart]
    three: Three
    batch: dict[str, Var]

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
        x = type_on(stages[-1].three.y.aval, mesh) if stages else given["inputs"]
        stages.append(compile_stage(function, each, x, given, mesh))
    if shape := stages[-1].three.y.aval.shape:
        raise ValueError(f"the last stage finds the loss, a scalar; found {shape}")
    return stages


def compile_stage(function: Callable, weights: Any, x: Any, batch: Mapping[str, Any], mesh: Mesh):
    """The three programs of one stage, y = function(weights, x, batch)."""
    batch = dict(batch)
    with jax.set_mesh(mesh), jax.disable_jit():  # in a loop B and W could not be told apart
        three = in_three(function, weights, x, batch)
    names = jax.tree.unflatten(jax.tree.structure(batch), three.own)
    parts = {kind: compile_part(three, kind, mesh) for kind in three.parts}
    return Stage(mesh, weights, parts, three, names)


def compile_part(three: Three, kind: str, mesh: Mesh):
    """One of the three as a program. W adds to totals of the step, in their memory."""
    equations, reads, makes = three.parts[kind]

    def program(given, totals):
        found = solved(equations, dict(zip(reads, given)) | three.constants, makes)
        return list(map(jnp.add, totals, found)) if totals else found

    totals = [type_on(v.aval, mesh) for v in makes] if kind == "W" else []
    with jax.set_mesh(mesh):
        lowered = jax.jit(program, donate_argnums=1).lower(
            [type_on(v.aval, mesh) for v in reads], totals)
    return CompiledPart(reads, makes, lowered.compile(compiled_fast(mesh)))


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
    unmade |= {stage.three.dy} if kind == "F" else set()
    return later - unmade - {*stage.three.weights}
