"""A mesh of devices, and a batch whose rows are divided over it.

Models are written for Explicit meshes, where an array's sharding is a part of its type. One device
is a mesh of one.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array


def axes_of(rule: str | tuple[str, ...] | None):
    """The mesh axes of a rule: None is no axis, a name is one, a tuple is several."""
    return (rule,) if isinstance(rule, str) else tuple(rule or ())


def axis_sizes(text: str):
    """{axis: devices along it} of a mesh as one writes it: "batch=4,model=2".

    `data` is another name for the axis `batch`. Raises ValueError for another form, for an axis
    that comes twice, and for a size below 1.
    """
    sizes = {}
    for part in filter(None, text.split(",")):
        name, _, size = (each.strip() for each in part.partition("="))
        name = "batch" if name == "data" else name
        if not name.isidentifier() or not size.isdecimal() or int(size) < 1 or name in sizes:
            raise ValueError("a mesh is written as axes with their sizes, each once, such as "
                             f"data=4,model=2; found {text!r}, and in it {part!r}")
        sizes[name] = int(size)
    return sizes


def make_mesh(shape: Sequence[int], axis_names: Sequence[str] = ("batch", "model"),
              axis_types: AxisType | tuple[AxisType, ...] = AxisType.Explicit):
    """A mesh of the first devices, one name and one type an axis.

    shape: devices along each axis; axis_types: one type for all axes, or one each.
    Raises ValueError for a shape that does not fit its names or the devices.
    """
    if len(shape) != len(axis_names):
        raise ValueError(
            f"a mesh needs one name for each axis: got shape {tuple(shape)} "
            f"and names {tuple(axis_names)}"
        )
    needed, devices = math.prod(shape), jax.devices()
    if needed > len(devices) or needed < 1:
        raise ValueError(
            f"mesh {tuple(shape)} needs {needed} devices; JAX has {len(devices)} "
            f"({devices[0].platform}). Before anything else runs, call "
            f"helpers.start(devices={needed})"
        )
    if isinstance(axis_types, AxisType):
        axis_types = (axis_types,) * len(shape)
    return jax.make_mesh(
        tuple(shape), tuple(axis_names), axis_types=axis_types, devices=devices[:needed]
    )


def place(batch: Mapping[str, Array | np.ndarray], mesh: Mesh,
          rows: str | tuple[str, ...] = "batch"):
    """A dict of NumPy arrays onto the mesh, rows (B) split over its axis or axes `rows`.

    With several JAX processes each gives the rows of its group: see row_groups().
    Raises ValueError where the rows cannot be divided evenly, or there is no such axis.
    """
    if missing := [axis for axis in axes_of(rows) if axis not in mesh.shape]:
        raise ValueError(f"place() splits rows over mesh axis {missing[0]!r}; the mesh has "
                         f"{mesh.axis_names}")
    ways = math.prod(mesh.shape[axis] for axis in axes_of(rows))
    groups = row_groups(mesh, rows)[1]
    for name, x in batch.items():
        count = np.shape(x)[0] * groups
        if count % ways:
            raise ValueError(
                f"a batch of {count} rows ({name!r}) does not divide over mesh axis "
                f"{rows!r} of size {ways}: {count} = {ways}·{count // ways} + {count % ways}"
            )
    sharding = NamedSharding(mesh, P(rows))
    if jax.process_count() == 1:
        return jax.device_put(batch, sharding)
    put = lambda x: jax.make_array_from_process_local_data(
        sharding, x, (len(x) * groups, *x.shape[1:]))
    return {name: put(np.asarray(x)) for name, x in batch.items()}


def row_groups(mesh: Mesh, rows: str | tuple[str, ...] = "batch"):
    """(group of this process, number of groups): processes of one group hold the same rows.

    A process loads the share of its group, so where another axis of the mesh crosses processes,
    several of them load the same. Raises ValueError where their rows are neither the same nor
    apart, and for a mesh that leaves out devices of other processes.
    """
    if jax.process_count() == 1:
        return 0, 1
    if mesh.size < jax.device_count():
        raise ValueError(f"mesh {dict(mesh.shape)} has {mesh.size} devices, and "
                         f"{jax.process_count()} processes have {jax.device_count()}: expected a "
                         "mesh of all of them")
    ways = math.prod(mesh.shape[axis] for axis in axes_of(rows))
    held, split = {}, P(rows)
    for device, index in NamedSharding(mesh, split).devices_indices_map((ways,)).items():
        held.setdefault(device.process_index, set()).add(index[0].indices(ways)[0])
    groups = sorted({tuple(sorted(each)) for each in held.values()})
    if sum(map(len, groups)) != ways:
        raise ValueError(f"mesh {dict(mesh.shape)} splits rows into {ways}, of which some "
                         "processes hold partly the same: expected the same rows or none in common")
    return groups.index(tuple(sorted(held[jax.process_index()]))), len(groups)


def whole(x: Array):
    """A NumPy array of all of x, also where parts of it lie on the devices of other processes."""
    if not x.is_fully_addressable and not x.is_fully_replicated:
        x = jax.jit(lambda x: x, out_shardings=NamedSharding(x.sharding.mesh, P()))(x)
    return np.asarray(x)


def check_split(letters: str, shape: Sequence[int], spec: P):
    """ValueError unless the current mesh is an Explicit one that can split the shape so."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or AxisType.Auto in mesh.axis_types:
        found = f"an Auto mesh, {tuple(mesh.shape)}" if mesh.shape else "no mesh"
        raise ValueError(
            f"{letters}{tuple(shape)} needs an Explicit mesh around it, as in "
            f"`with jax.set_mesh(make_mesh((1, 1))):`; found {found}"
        )
    for letter, size, rule in zip(letters, shape, spec):
        for name in axes_of(rule):
            if name not in mesh.shape:
                raise ValueError(
                    f"{letters}{tuple(shape)} is to be split over mesh axis {name!r}, but "
                    f"the mesh has {tuple(mesh.shape)}"
                )
            if size % mesh.shape[name]:
                raise ValueError(
                    f"{letters}{tuple(shape)}: {letter}={size} does not divide over mesh axis "
                    f"{name!r} of size {mesh.shape[name]}"
                )
