"""A mesh of devices, and the rules that say over which of its axes each dimension is split.

Models are written for Explicit meshes, where an array's sharding is a part of its type. One device
is a mesh of one.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from flax.core import FrozenDict
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float


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

    With several JAX processes each gives its own rows of the global batch.
    Raises ValueError where the rows cannot be divided evenly, or there is no such axis.
    """
    if missing := [axis for axis in axes_of(rows) if axis not in mesh.shape]:
        raise ValueError(f"place() splits rows over mesh axis {missing[0]!r}; the mesh has "
                         f"{mesh.axis_names}")
    ways = math.prod(mesh.shape[axis] for axis in axes_of(rows))
    for name, x in batch.items():
        count = np.shape(x)[0] * jax.process_count()
        if count % ways:
            raise ValueError(
                f"a batch of {count} rows ({name!r}) does not divide over mesh axis "
                f"{rows!r} of size {ways}: {count} = {ways}·{count // ways} + {count % ways}"
            )
    sharding = NamedSharding(mesh, P(rows))
    if jax.process_count() == 1:
        return jax.device_put(batch, sharding)
    put = lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x))
    return jax.tree.map(put, batch)


LETTERS = "BTSHKDFXCV"  # dimensions of this book's models; `also` adds others


def axes_of(rule: str | tuple[str, ...] | None):
    """The mesh axes of a rule: None is no axis, a name is one, a tuple is several."""
    return (rule,) if isinstance(rule, str) else tuple(rule or ())


def spec_of(letters: str, rules: Mapping):
    """The PartitionSpec of a tensor with these dimensions, by one rule per letter.

    A mesh axis can split one dimension of a tensor only: the last that asks for it. Axes that are
    manual in an enclosing shard_map are left out: there an array is one device's part already.
    Raises KeyError for a letter without a rule.
    """
    taken, spec = set(jax.sharding.get_abstract_mesh().manual_axes), []
    for letter in reversed(letters):
        if letter not in rules:
            raise KeyError(f"no rule for dimension {letter} of {letters}: rules exist for "
                           f"{', '.join(sorted(rules))}; also({letter}=None) adds one")
        axes = tuple(axis for axis in axes_of(rules[letter]) if axis not in taken)
        taken.update(axes)
        spec.insert(0, axes[0] if len(axes) == 1 else axes or None)
    while spec and spec[-1] is None:
        spec.pop()
    return P(*spec)


@dataclass(frozen=True)
class Sharding:
    """Over which mesh axes each dimension is split: one rule per letter.

    A rule is a mesh axis, a tuple of axes, or None. activations, parameters: {letter: rule}; a
    letter of LETTERS that is not named is not split. B batch, T tokens, S the three of query, key
    and value, H heads, K head size, D embed, F hidden, X numbers in a patch, C classes, V
    vocabulary. A parameter is used as an activation of its letters lies: what only `parameters`
    split is gathered before.

    none() splits nothing; data_parallel() splits the batch; tensor_parallel() heads, hidden units
    and vocabulary over "model" too, column then row (Shoeybi et al. 2019); fully_sharded() every D
    of a parameter over "batch" as well, as ZeRO stage 3 stores them (Rajbhandari 2020), gathered
    once per step and kept for the backward pass.
    """

    activations: Mapping = FrozenDict()
    parameters: Mapping = FrozenDict()

    def __post_init__(self):
        for name in ("activations", "parameters"):
            rules = dict.fromkeys(LETTERS) | dict(getattr(self, name))
            object.__setattr__(self, name, FrozenDict(rules))

    def activation(self, letters: str):
        """Where an activation of these letters lies; KeyError for an unknown letter."""
        return spec_of(letters, self.activations)

    def parameter(self, letters: str):
        """Where a parameter of these letters is stored; KeyError for an unknown letter."""
        return spec_of(letters, self.parameters)

    def gather(self, letters: str, w: Float[Array | np.ndarray, "..."], dtype: DTypeLike):
        """A parameter as a sum needs it: in dtype, gathered where only parameters are split."""
        return jax.reshard(w.astype(dtype), self.activation(letters))

    def weight(self, letters: str, w: Float[Array | np.ndarray, "..."], dtype: DTypeLike):
        """A parameter as products with rows (B, T) need it: gathered, its gradient summed once."""
        return reduced(self.gather(letters, w, dtype), *map(self.activations.get, "BT"))

    def also(self, activations: Mapping | tuple = (), parameters: Mapping | tuple = (),
             **both: str | tuple[str, ...] | None):
        """These rules and more: for both kinds by letter, or for one of them; the new one wins."""
        return replace(
            self, activations=dict(self.activations) | both | dict(activations),
            parameters=dict(self.parameters) | both | dict(parameters),
        )

    @classmethod
    def none(cls):
        return cls()

    @classmethod
    def data_parallel(cls):
        return cls({"B": "batch"})

    @classmethod
    def tensor_parallel(cls):
        return cls.data_parallel().also(H="model", F="model", V="model")

    @classmethod
    def fully_sharded(cls):
        return cls.tensor_parallel().also(parameters={"D": "batch"})


def reduced(x: Float[Array, "..."], *rules: str | tuple[str, ...] | None):
    """x, typed `reduced` along these mesh axes: its gradient is summed over them here, once.

    Until then each device keeps its own part of the gradient. Without it every product with x sums
    its part over the devices at once. Axes that split x, or are manual in an enclosing shard_map,
    are left out.
    """
    spec = jax.typeof(x).sharding.spec
    taken = {axis for rule in spec.partitions for axis in axes_of(rule)}
    taken |= set(jax.sharding.get_abstract_mesh().manual_axes)
    axes = {axis for rule in rules for axis in axes_of(rule)} - taken
    return jax.reshard(x, P(*spec.partitions, reduced=axes)) if axes else x


def shard_map_over_the_rest(function: Callable, in_specs: Any, out_specs: Any):
    """shard_map over all axes of the current mesh that no enclosing shard_map is manual over.

    Where it stands inside another one, JAX cannot take its gradient: give it a custom_vjp.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = set(mesh.axis_names) - set(mesh.manual_axes)
    if not axes:
        return function
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, axis_names=axes)


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
