"""The decoder's dropout: a device draws the random bits of its own rows and tokens, and no others.

A random word is a function of the key, the token and the place in the token's vector. So whatever a
device holds, it can draw alone, and the mask is the same on every mesh.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Threefry).
"""
from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Shaped, UInt32

from meshbook.sharding import Sharding, axes_of, varies, varying

SHARING = 4  # elements that share a word of 32 bits


def dropped(x_BTD: Float[Array, "B T D"], rate: int | float, key: jax.Array | None,
            sharding: Sharding):
    """x with a share of its elements 0 and the rest scaled up; without a key, x.

    The share is the rate rounded to a 256th. Of which elements, no mesh changes, unless the key is
    of a generator that needs no Threefry, such as `jax.random.key(0, impl="rbg")`.
    """
    if key is None or rate == 0:
        return x_BTD
    least = round(256 * rate)
    keep_BTD = kept(key, x_BTD, least, sharding)
    return jnp.where(keep_BTD, x_BTD * (256 / (256 - least)), 0).astype(x_BTD.dtype)


def kept(key: jax.Array, x_BTD: Shaped[Array, "B T D"], least: int, sharding: Sharding):
    """Where a random byte is `least` or more: bool (B, T, D), laid out as x.

    Four elements of a token share a word: the first quarter of D has its lowest byte, the last its
    highest.
    """
    D = x_BTD.shape[-1]
    words = jax.lax.optimization_barrier(words_of(key, x_BTD, sharding))  # or each byte draws them
    keep = [(words >> shift) % 256 >= least for shift in (0, 8, 16, 24)]
    return jax.lax.optimization_barrier(jnp.concatenate(keep, -1))[..., :D]  # or drawn twice


def words_of(key: jax.Array, x_BTD: Shaped[Array, "B T D"], sharding: Sharding):
    """The random words of a device's rows and tokens, (B, T, D / 4)."""
    *tokens, D = x_BTD.shape
    shape, spec = (*tokens, -(-D // SHARING)), jax.typeof(x_BTD).sharding.spec
    spec = P(*spec.partitions[:2], None)
    if jax.random.key_impl(key) != "threefry2x32":
        return of_each_device(key, shape, spec, x_BTD)
    number_BT = token_numbers(x_BTD, sharding)
    first = jax.lax.broadcast_in_dim(number_BT, shape, (0, 1), out_sharding=spec)
    second = jax.lax.broadcasted_iota(jnp.uint32, shape, 2, out_sharding=spec)
    return threefry(key, first, second)


def threefry(key: jax.Array, first: UInt32[Array, "..."], second: UInt32[Array, "..."]):
    """A random word for each pair of counters: of a slice of these, the slice of the words.

    For counters (0, i) they are those of `jax.random.bits(key, (n,))`.
    """
    axes = varies(first) | varies(key)  # the primitive itself takes no notice of them
    parts = [part.reshape((1,) * first.ndim) for part in jax.random.key_data(key)]
    found = threefry2x32_p.bind(*(varying(x, axes) for x in (*parts, first, second)))
    high, low = (varying(x, axes) for x in found)
    return high ^ low


def token_numbers(x_BTD: Shaped[Array, "B T D"], sharding: Sharding):
    """The number of each of a device's tokens among those of the batch, row by row: (B, T).

    In a shard_map that is manual over axes that split the rows, x has the rows of one device. A
    token's number is its place in the row, wherever on the mesh it lies.
    """
    B, T, _ = x_BTD.shape
    spec, context = P(*jax.typeof(x_BTD).sharding.spec.partitions[:2]), sharding.context
    mesh = jax.sharding.get_abstract_mesh()
    row_BT = jax.lax.broadcasted_iota(jnp.uint32, (B, T), 0, out_sharding=spec)
    manual = tuple(axis for axis in axes_of(sharding.activations["B"]) if axis in mesh.manual_axes)
    if manual:
        row_BT = row_BT + B * jax.lax.axis_index(manual).astype(jnp.uint32)
    if context is None:
        return row_BT * T + jax.lax.broadcasted_iota(jnp.uint32, (B, T), 1, out_sharding=spec)
    place_T = jnp.asarray(context.places(T, mesh.shape[context.axis]), jnp.uint32)
    place_T = jax.reshard(place_T, P(spec[1]))
    return row_BT * T + jax.lax.broadcast_in_dim(place_T, (B, T), (1,), out_sharding=spec)


def of_each_device(key: jax.Array, shape: tuple, spec: P, x_BTD: Shaped[Array, "B T D"]):
    """Words of a generator that gives no slices: each device draws its own, by its place.

    They depend on how the mesh splits x.
    """
    axes = tuple(axis for rule in spec.partitions for axis in axes_of(rule))
    mesh = jax.sharding.get_abstract_mesh()
    split = [math.prod(mesh.shape[axis] for axis in axes_of(rule)) for rule in spec.partitions]
    own = [size // ways for size, ways in zip(shape, split, strict=True)]

    def drawn(key):
        here = axes or tuple(varies(x_BTD))
        mine = jax.random.fold_in(key, jax.lax.axis_index(here)) if here else key
        return jax.random.bits(mine, own, jnp.uint32)

    return jax.shard_map(drawn, in_specs=P(), out_specs=spec)(key) if axes else drawn(key)
