"""A mesh of devices, and the table that says where every tensor lives.

One model source runs on Explicit meshes, on Auto meshes and without a mesh.
What differs between the three is in this module and nowhere else.
"""
from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P


def make_mesh(shape, axis_names=("batch", "model"), axis_types=AxisType.Explicit):
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


def on(mesh):
    """The context in which PartitionSpecs mean axes of this mesh; None: no mesh."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def inside(mesh):
    """The same while a function is traced: its arguments already live on the mesh."""
    if mesh is None:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def on_explicit_mesh():
    """Whether the current mesh makes layouts a part of types."""
    return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def pin(x, spec):
    """x with this layout: a change of type on an Explicit mesh, a constraint on Auto.

    Without a mesh there is nothing to lay out, and x comes back as it is.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return x
    if on_explicit_mesh():
        return jax.sharding.reshard(x, spec)
    return jax.lax.with_sharding_constraint(x, spec)


def aligned(x, y):
    """x with the layout of those dimensions of y that it has: labels (B,), logits (B, C).

    Only an Explicit mesh asks for that; on Auto the compiler sees to it.
    """
    if not on_explicit_mesh():
        return x
    return pin(x, P(*jax.typeof(y).sharding.spec[:x.ndim]))


def reshape(x, shape, spec):
    """x in another shape; on an Explicit mesh its new layout has to be said."""
    if on_explicit_mesh():
        return jax.lax.reshape(x, shape, out_sharding=spec)
    return pin(x.reshape(shape), spec)


def place(batch, mesh):
    """A dict of NumPy arrays onto the mesh, rows (B) split over its "batch" axis.

    With several JAX processes each gives its own rows of the global batch.
    Raises ValueError where the rows cannot be divided evenly.
    """
    if mesh is None:
        return jax.device_put(batch)
    if "batch" not in mesh.shape:
        raise ValueError(f"place() splits rows over a mesh axis 'batch'; found {mesh.axis_names}")
    ways, sharding = mesh.shape["batch"], NamedSharding(mesh, P("batch"))
    for name, x in batch.items():
        rows = np.shape(x)[0] * jax.process_count()
        if rows % ways:
            raise ValueError(
                f"a batch of {rows} rows ({name!r}) does not divide over mesh axis "
                f"'batch' of size {ways}: {rows} = {ways}·{rows // ways} + {rows % ways}"
            )
    if jax.process_count() == 1:
        return jax.device_put(batch, sharding)
    put = lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x))
    return jax.tree.map(put, batch)


ROWS = P("batch")
DATA = dict(
    BTX=ROWS, BTD=ROWS, BD=ROWS, BTSHK=ROWS, BTHK=ROWS, BTF=ROWS, BC=ROWS,
    BT=ROWS, BTV=ROWS,
)
TENSOR = DATA | dict(
    BTSHK=P("batch", None, None, "model"),
    BTHK=P("batch", None, "model"),
    BTF=P("batch", None, "model"),
    DSHK=P(None, None, "model"),
    SHK=P(None, "model"),
    HKD=P("model"),
    DF=P(None, "model"),
    F=P("model"),
    FD=P("model"),
    BTV=P("batch", None, "model"),
    VD=P("model"),
    DV=P(None, "model"),
    V=P("model"),
)
FULL = TENSOR | dict(
    XD=P(None, "batch"),
    TD=P(None, "batch"),
    D=P("batch"),
    DSHK=P("batch", None, "model"),
    HKD=P("model", None, "batch"),
    DF=P("batch", "model"),
    FD=P("model", "batch"),
    DC=P("batch"),
    VD=P("model", "batch"),
    DV=P("batch", "model"),
)


class Layout:
    """How a table of layouts is used: letters in, arrays laid out accordingly."""

    def spec(self, letters):
        """Where the tensor of these letters is stored; KeyError if unknown."""
        if letters not in self.__dataclass_fields__:
            known = ", ".join(self.__dataclass_fields__)
            raise KeyError(f"no tensor {letters!r} in this table of {known}")
        return getattr(self, letters)

    def use(self, letters, x, dtype):
        """A parameter as products need it: in dtype, and whole along "batch"."""
        spec, x = self.spec(letters), x.astype(dtype)
        if "batch" not in spec or letters.startswith("B"):
            return x
        return pin(x, P(*(None if axis == "batch" else axis for axis in spec)))

    def einsum(self, pattern, x, w):
        """einsum of activation x and parameter w; the letters say the layouts.

        On an Explicit mesh the result's layout is part of its type, on Auto it
        is a constraint, without a mesh nothing. w is cast to the dtype of x.
        """
        operands, out = pattern.split("->")
        w, spec = self.use(operands.split(",")[1], w, x.dtype), self.spec(out)
        if on_explicit_mesh():
            return jnp.einsum(pattern, x, w, out_sharding=spec)
        return pin(jnp.einsum(pattern, x, w), spec)


@dataclass(frozen=True)
class Sharding(Layout):
    """On which mesh axes every kind of tensor is split; a field is its letters.

    B batch, T tokens, D embed, F hidden, H heads, K head size, C classes,
    S the three of query, key and value, X the numbers in one patch, V vocabulary.
    Letters that begin with B are activations, the others are parameters.
    A parameter split over "batch" is gathered just before it is used.

    The rows: none() splits nothing. data_parallel(): all parameters everywhere,
    each device its rows of the batch. tensor_parallel(): heads and hidden units
    over "model" too, column then row (Shoeybi et al. 2019). fully_sharded():
    every D of a parameter over "batch" as well, as ZeRO stage 3 stores them
    (Rajbhandari 2020); gathered once per step, and kept for the backward pass.
    """

    BTX: P = P()  # activations
    BTD: P = P()
    BD: P = P()
    BTSHK: P = P()
    BTHK: P = P()
    BTF: P = P()
    BC: P = P()
    BT: P = P()
    BTV: P = P()
    XD: P = P()  # parameters
    TD: P = P()
    D: P = P()
    DSHK: P = P()
    SHK: P = P()
    HKD: P = P()
    DF: P = P()
    F: P = P()
    FD: P = P()
    DC: P = P()
    C: P = P()
    VD: P = P()
    DV: P = P()
    V: P = P()

    none = classmethod(lambda table: table())
    data_parallel = classmethod(lambda table: table(**DATA))
    tensor_parallel = classmethod(lambda table: table(**TENSOR))
    fully_sharded = classmethod(lambda table: table(**FULL))


def as_in_the_sources():
    """The layout of the sources as far as labels say it, for Auto meshes: a Sharding.

    The MLP, the head, biases and norms are split on their last axis, attention's kernels on their
    second (HKD: inside the heads); of activations only rows.
    """
    free = P.UNCONSTRAINED
    return Sharding(
        DSHK=P(None, None, "model"), SHK=P(None, "model"),
        HKD=P(None, "model"), DF=P(None, "model"), FD=P(None, "model"),
        D=P("model"), F=P("model"), DC=P(None, "model"), C=P("model"),
        BTX=P("batch"), BTD=P("batch", free, free), BD=P("batch", free),
        BTSHK=P("batch", *[free] * 4), BTHK=P("batch", *[free] * 3),
        BTF=P("batch", free, free), BC=P("batch", free),
    )


def check_split(letters, shape, spec, mesh=None):
    """ValueError unless this mesh (default: the current one) can split the shape so."""
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    for letter, size, axis in zip(letters, shape, spec):
        for name in (axis,) if isinstance(axis, str) else axis or ():
            if name not in mesh.shape:
                found = f"the mesh has {tuple(mesh.shape)}" if mesh.shape else "there is no mesh"
                raise ValueError(
                    f"{letters}{tuple(shape)} is to be split over mesh axis {name!r}, but {found}"
                )
            if size % mesh.shape[name]:
                raise ValueError(
                    f"{letters}{tuple(shape)}: {letter}={size} does not divide over mesh axis "
                    f"{name!r} of size {mesh.shape[name]}"
                )
