"""Where gradients are summed: types that make them wait, and sums by hand.

A gradient is summed over the devices whose rows it comes from. An array that is typed `reduced`
along a mesh axis has a gradient that is not yet: a partial sum, typed `unreduced`.

Source: Rajbhandari et al. 2020, "ZeRO" (each device sums the gradients of its own part).
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from meshbook.sharding.meshes import axes_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WithOwn:
    """A parameter that is whole on each device, and the device's own part, which has the gradient.

    It can be used like the parameter where that is cast, indexed or transposed, or asked for its
    shape.
    """

    whole: Any
    own: Any

    def both(self, change: Callable):
        """The same change made to the whole and to the part."""
        return WithOwn(change(self.whole), change(self.own))

    def astype(self, dtype: DTypeLike):
        return self.both(lambda x: x.astype(dtype))

    def __getitem__(self, index: Any):
        return self.both(lambda x: x[index])

    def __len__(self):
        return len(self.whole)

    @property
    def T(self):
        return self.both(lambda x: x.T)

    @property
    def shape(self):
        return self.whole.shape


def own_parts(params: Any):
    """The arrays of a tree of parameters that have gradients."""
    return jax.tree.map(lambda w: w.own if isinstance(w, WithOwn) else w, params, is_leaf=is_pair)


def with_parts(params: Any, parts: Any):
    """The parameters with other own parts."""
    return jax.tree.map(lambda w, own: WithOwn(w.whole, own) if isinstance(w, WithOwn) else own,
                        params, parts, is_leaf=is_pair)


def of_parts(params: Any, gradients: Any):
    """The gradient of the parameters, by those of their own parts: a whole has none."""
    return jax.tree.map(lambda w, g: WithOwn(None, g) if isinstance(w, WithOwn) else g,
                        params, gradients, is_leaf=is_pair)


def is_pair(w: Any):
    """Whether this is a parameter with an own part beside it."""
    return isinstance(w, WithOwn)


Parameter = Float[Array | np.ndarray, "..."] | WithOwn


def reduced(x: Float[Array, "..."], *rules: str | tuple[str, ...] | None):
    """x, typed `reduced` along these mesh axes: its gradient is summed over them here, once.

    Until then each device keeps its own part of the gradient. Without it every product with x sums
    its part over the devices at once. Axes that split x, or are manual in an enclosing shard_map,
    are left out.
    """
    spec = jax.typeof(x).sharding.spec
    found = waiting(spec, *rules)
    return x if found == spec else jax.reshard(x, found)


def summed_once(x: Float[Array, "..."], *rules: str | tuple[str, ...] | None):
    """x, `reduced` along these mesh axes, and `varying` along those that are manual here."""
    return reduced(varying(x, [axis for rule in rules for axis in axes_of(rule)]), *rules)


def varying(x: Shaped[Array, "..."], axes: Iterable[str]):
    """x as an array of its own on each device along these axes, of those that are manual here.

    Each device has its own part of the gradient, which is summed here.
    """
    manual = set(jax.sharding.get_abstract_mesh().manual_axes)
    axes = tuple(axis for axis in axes if axis in manual - varies(x))
    return jax.lax.pcast(x, axes, to="varying") if axes else x


def varies(x: Any):
    """The manual axes along which an array, or a shape of one, is another on each device."""
    return jax.typeof(x).manual_axis_type.varying


def waiting(spec: P, *rules: str | tuple[str, ...] | None):
    """A spec that is `reduced` along these mesh axes, too, where they split nothing in it.

    On a mesh of one device nothing waits, and JAX 0.10 refuses to compile such types there.
    """
    if jax.sharding.get_abstract_mesh().size == 1:
        return spec
    taken = {axis for rule in spec.partitions for axis in axes_of(rule)}
    taken |= set(jax.sharding.get_abstract_mesh().manual_axes)
    axes = {axis for rule in rules for axis in axes_of(rule)} - taken
    return P(*spec.partitions, reduced=axes | spec.reduced)


def still_reduced(x: Float[Array, "..."], spec: P):
    """x in this sharding; its gradient goes on waiting along the axes along which it did."""
    return jax.reshard(x, P(*spec.partitions, reduced=jax.typeof(x).sharding.spec.reduced))


def opened(w: Parameter, used: P, dtype: DTypeLike | None = None):
    """A parameter as it is used: in the sharding `used`, along whose `reduced` axes its gradient
    waits, until it is summed to where the parameter, or the own part of it, is stored.

    dtype: in which it is used and gathered, while its gradient is summed in the type in which it is
    stored; None: all in the type of the parameter as given.

    What storage alone splits is gathered by hand, and its gradient is a reduce-scatter: where JAX
    resharded it, a CPU's compiler would all-reduce the gradient. Axes that split a dimension in
    storage alone must stand last there. The gradient is written out, because JAX cannot
    differentiate a shard_map inside another one.
    """
    whole, own = (w.whole, w.own) if isinstance(w, WithOwn) else (None, w)
    stored, dtype = jax.typeof(own).sharding.spec, dtype or own.dtype
    if not extra_axes(stored, used):
        own = jax.reshard(own, P(*used.partitions, reduced=used.reduced | stored.reduced))
        return own.astype(dtype)
    return whole_of((used, stored, jnp.dtype(dtype), own.dtype), own, whole)


def extra_axes(stored: P, used: P):
    """{dimension: the axes that split it in storage alone}."""
    found = {}
    for dim, rules in enumerate(zip_longest(stored.partitions, used.partitions)):
        there, here = map(axes_of, rules)
        if there[:len(here)] != here:
            raise ValueError(f"dimension {dim} of a parameter is stored as {stored} and used as "
                             f"{used}: expected the axes of its use first in storage")
        if there != here:
            found[dim] = there[len(here):]
    return found


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def whole_of(specs: tuple, own: Float[Array, "..."], whole: Float[Array, "..."] | None):
    """The whole of a parameter from all devices' own parts; nothing moves where it is given.

    specs: (as it is used, as the own part is stored, the types of both).
    """
    return whole_forward(specs, own, whole)[0]


def whole_forward(specs: tuple, own: Float[Array, "..."], whole: Float[Array, "..."] | None):
    """The whole, and that nothing is kept; a checkpoint's policy sees the gather in here."""
    used, stored, dtype, _ = specs
    if whole is not None:
        return jax.reshard(whole.astype(dtype), used), None
    cuts = extra_axes(stored, used)

    def local(x):
        for dim, axes in cuts.items():
            x = jax.lax.all_gather(x, axes, axis=dim, tiled=True, to="reduced")
        return x

    gathered = P(*used.partitions, reduced={axis for axes in cuts.values() for axis in axes})
    whole = shard_map_over_the_rest(local, stored, gathered)(own.astype(dtype))
    return jax.reshard(whole, used), None


def whole_backward(specs: tuple, _: None, gradient: Float[Array, "..."]):
    """The own part of the gradient: partial sums reduce-scattered, and the rest all-reduced."""
    used, stored, _, dtype = specs
    cuts = extra_axes(stored, used)
    rest = tuple(used.reduced - {axis for axes in cuts.values() for axis in axes})

    def local(g):
        for dim, axes in cuts.items():
            g = jax.lax.psum_scatter(g, axes, scatter_dimension=dim, tiled=True)
        return jax.lax.psum(g, rest)

    waits = P(*used.partitions, unreduced=used.reduced)
    return shard_map_over_the_rest(local, waits, stored)(gradient.astype(dtype)), None


whole_of.defvjp(whole_forward, whole_backward)


def summed(x: Any, axes: tuple[str, ...], waits: Iterable[str] = ()):
    """A device's part of a sum, inside a shard_map: summed over axes, but a partial sum over waits.

    An axis of waits splits what was added up; where it is among axes, too, its sum is left out.
    """
    now = tuple(axis for axis in axes if axis not in waits)
    x = jax.lax.psum(x, now)
    return jax.lax.pcast(x, tuple(waits), to="unreduced") if waits else x


def shard_map_over_the_rest(function: Callable, in_specs: Any, out_specs: Any):
    """shard_map over all axes of the current mesh that no enclosing shard_map is manual over.

    Where it stands inside another one, JAX cannot take its gradient: give it a custom_vjp.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = set(mesh.axis_names) - set(mesh.manual_axes)
    if not axes:
        return function
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, axis_names=axes)
