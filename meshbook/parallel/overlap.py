"""Matmuls whose input, or whose result, travels around a ring of devices while they run.

With sequence parallelism each device of a group has a part of the tokens. What goes into a
column-parallel matmul has to be gathered first, and what comes out of a row-parallel one is summed
and scattered. Both can be done piece by piece: while one piece is multiplied, the next one is on
its way, by `ppermute`. The gradient of one is the other. A weight's gradient is one matmul, of all
tokens: made piece by piece, it would be read and written again for each of them.

Everything here stands in a `shard_map` that is manual over `axis`: x and w are a device's parts.

Sources: Wang et al. 2023, "Overlap communication with dependent computation via decomposition";
Korthikanti et al. 2022 (sequence parallelism).
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meshbook.hlo.in_flight import in_flight

__all__ = ["all_gather_matmul", "in_flight", "matmul_reduce_scatter"]
Piece, Weight = Float[Array, "B t ..."], Float[Array, "..."]
TOKENS = 1  # the dimension that is split over the ring


def all_gather_matmul(x: Piece, w: Any, axis: str, *, ring: bool = True,
                      bidirectional: bool = False):
    """The tokens of all devices times this device's columns: x gathered, times w.

    x (B, t, ...): this device's t tokens; w (..., ...): a weight, or a pytree of them, whose first
    dimensions are the last ones of x; axis: the mesh axis of the ring, of n devices.
    Returns (B, n·t, ...), one for each weight; n - 1 permutes of x, or with ring=False one
    all-gather. bidirectional: pieces come from both neighbours at once, in half the steps.
    """
    if not ring:
        whole = jax.lax.all_gather(x, axis, axis=TOKENS, tiled=True)
        return jax.tree.map(partial(times, whole), w)
    weights, tree = jax.tree.flatten(w)
    weights = [varying_like(x, each) for each in weights]
    return tree.unflatten(gathering(x, weights, axis, bidirectional))


def matmul_reduce_scatter(h: Piece, w: Weight, axis: str, *, ring: bool = True,
                          bidirectional: bool = False):
    """h times w, summed over the devices, of which each keeps the sums of its own tokens.

    h (B, n·t, ...): all tokens, and this device's part of what is summed over; w (..., ...): its
    first dimensions are the last ones of h; axis: the mesh axis of the ring, of n devices.
    Returns (B, t, ...); n - 1 permutes of it, or with ring=False one reduce-scatter. bidirectional:
    sums travel both ways at once, in half the steps. Sums are made and sent in the type of h.
    """
    if not ring:
        return jax.lax.psum_scatter(times(h, w), axis, scatter_dimension=TOKENS, tiled=True)
    return scattering(h, varying_like(h, w), axis, bidirectional)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def gathering(x: Piece, weights: list, axis: str, bidirectional: bool):
    """[x gathered, times each weight]."""
    return gathering_forward(x, weights, axis, bidirectional)[0]


def gathering_forward(x: Piece, weights: list, axis: str, bidirectional: bool):
    pieces, whose = arriving(x, axis, bidirectional)
    found = [put_together([times(piece, w) for piece in pieces], whose) for w in weights]
    return found, (pieces, whose, weights)


def gathering_backward(axis: str, bidirectional: bool, kept: tuple, gradients: list):
    pieces, whose, weights = kept
    both = list(zip(gradients, weights, strict=True))
    back = lambda at: sum(times_transposed(of(dy, at, axis), w) for dy, w in both)
    x = put_together(pieces, whose)
    return summed(back, axis, bidirectional), [of_weight(x, dy) for dy in gradients]


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def scattering(h: Piece, w: Weight, axis: str, bidirectional: bool):
    """h times w, summed and scattered."""
    return scattering_forward(h, w, axis, bidirectional)[0]


def scattering_forward(h: Piece, w: Weight, axis: str, bidirectional: bool):
    return summed(lambda at: times(of(h, at, axis), w), axis, bidirectional), (h, w)


def scattering_backward(axis: str, bidirectional: bool, kept: tuple, dy: Piece):
    h, w = kept
    pieces, whose = arriving(dy, axis, bidirectional)
    dh = put_together([times_transposed(piece, w) for piece in pieces], whose)
    return dh, of_weight(h, put_together(pieces, whose))


# A checkpoint's policy sees the products of a forward rule only where they stand in it: one that
# calls the custom_vjp again would hide them, and what "products" keeps would be done twice.
gathering.defvjp(gathering_forward, gathering_backward)
scattering.defvjp(scattering_forward, scattering_backward)


def arriving(x: Piece, axis: str, bidirectional: bool = False):
    """The pieces of all devices as they come by: ([piece, ...], [whose it is, ...])."""
    n, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    pieces, whose = [x], [me]
    for way, steps in directions(n, bidirectional):
        piece = x
        for far in range(1, steps + 1):
            piece = sent(piece, axis, way)
            pieces.append(piece)
            whose.append((me - far * way) % n)
    return pieces, whose


def summed(part: Callable, axis: str, bidirectional: bool = False):
    """The sum over all devices of part(me): part(at) is what a device adds for device `at`."""
    n, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    result = None
    for way, steps in directions(n, bidirectional):
        total = None
        for far in range(steps, 0, -1):  # a sum begins with the device that is farthest
            more = part((me + far * way) % n)
            total = sent(more if total is None else total + more, axis, way)
        if total is not None:
            result = total if result is None else result + total
    return part(me) if result is None else result + part(me)


def directions(n: int, bidirectional: bool):
    """[(way, steps), ...]: how many steps pieces go up the ring, +1, and how many down, -1."""
    return [(1, n // 2), (-1, (n - 1) // 2)] if bidirectional else [(1, n - 1)]


def sent(x: Float[Array, "..."], axis: str, way: int):
    """x of the neighbour: that of the device before for way +1, of the one behind for -1."""
    n = jax.lax.axis_size(axis)
    return jax.lax.ppermute(x, axis, [(each, (each + way) % n) for each in range(n)])


def of(x: Piece, at: Any, axis: str):
    """The tokens of device `at`, of those of all."""
    size = x.shape[TOKENS] // jax.lax.axis_size(axis)
    return jax.lax.dynamic_slice_in_dim(x, at * size, size, TOKENS)


def put_together(pieces: list, places: list):
    """Pieces (B, t, ...) as one array (B, n·t, ...), each at its place."""
    first = pieces[0]
    shape = (len(first), len(pieces) * first.shape[TOKENS], *first.shape[2:])
    x = jax.lax.empty(shape, first.dtype)  # zeros would be written first
    x = jax.lax.pcast(x, tuple(jax.typeof(first).manual_axis_type.varying), to="varying")
    for piece, at in zip(pieces, places, strict=True):
        x = jax.lax.dynamic_update_slice_in_dim(x, piece, at * first.shape[TOKENS], TOKENS)
    return x


def times(x: Piece, w: Weight):
    """x (B, T, ...) and w, summed over all of x's dimensions but the first two."""
    return jnp.tensordot(x, w, x.ndim - 2)


def times_transposed(dy: Piece, w: Weight):
    """The gradient of the x of `times`: dy (B, T, ...) and w, summed over dy's last dimensions."""
    last = dy.ndim - 2
    return jnp.tensordot(dy, w, (tuple(range(2, dy.ndim)), tuple(range(w.ndim - last, w.ndim))))


def of_weight(x: Piece, dy: Piece):
    """The gradient of the w of `times`."""
    return jnp.tensordot(x, dy, ((0, 1), (0, 1)))


def varying_like(x: Float[Array, "..."], w: Weight):
    """w as a part of its own on every device that has its own x: its gradient is summed there."""
    axes = [jax.typeof(each).manual_axis_type.varying for each in (x, w)]
    return jax.lax.pcast(w, tuple(axes[0] - axes[1]), to="varying")
