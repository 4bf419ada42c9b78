"""Attention whose keys and values travel around a ring of devices, and its gradient by hand.

Each device keeps its own queries. Keys and values of all devices come by, one device's at a time,
and the softmax is finished when the last of them was looked at. In the backward pass they go around
once more, and with them the sums of their gradients, which end at home. Written by hand it keeps no
keys of others: JAX's own gradient of the forward ring would keep all of them. They go the other way
round then, or a compiler would keep those of the first step, which both passes would have alike.

Everything here stands in a `shard_map` that is manual over the ring's axis.

Source: Liu et al. 2023, "Ring attention with blockwise transformers for near-infinite context".
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from meshbook.parallel import blockwise
from meshbook.parallel.overlap import sent
from meshbook.parallel.zigzag import Tokens

Segments = Int[Array, "B T"] | None


def ring_forward(q_BtHK: Float[Array, "B t H K"], k_BtGK: Float[Array, "B t G K"],
                 v_BtGV: Float[Array, "B t G V"], segments_BT: Segments, tokens: Tokens, axis: str):
    """What queries find in the keys and values of all devices, and what the gradient needs of it.

    q (B, t, H, K), k (B, t, G, K) and v (B, t, G, V): of this device's tokens; segments (B, T): of
    all tokens, in the order in which they lie. Returns (B, t, H, V) and, float32, (B, t, H): the
    logarithm of the sum of each softmax. n - 1 permutes of k, and as many of v.
    """
    q_BtHK, me = with_number(q_BtHK, axis, tokens)
    queries = of_queries(q_BtHK, k_BtGK.shape[2], segments_BT, tokens, me)

    def look(carried, kept, whose, pairs):
        keys, values = of_keys(*kept, segments_BT, tokens, whose)
        return blockwise.look(carried, queries, keys, values, pairs)

    def from_device(carried, kept, whose):
        return look(carried, kept, whose, tokens.pairs(me, whose))

    kept = k_BtGK, v_BtGV
    carried = blockwise.begun(queries, in_blocks(v_BtGV, tokens))
    carried = look(carried, kept, me, tokens.own_pairs())
    carried = past_the_others(from_device, carried, kept, tokens.ways, axis, way=1)
    return joined_results(carried, q_BtHK, v_BtGV, tokens)


def past_the_others(turn: Callable, carried: Any, kept: tuple, ways: int, axis: str, way: int,
                    first: Callable | None = None):
    """carried after turn(carried, kept, whose) of the keys and values of each of the n - 1 others.

    They come up the ring, way 1, or down, -1. The next ones are on their way while a turn works.
    first: what is done in place of the first turn.
    """
    if ways == 1:
        return carried

    me = jax.lax.axis_index(axis)
    next_ones = lambda kept: tuple(sent(x, axis, way) for x in kept)
    from_device = lambda turn, carried, kept, step: turn(carried, kept, (me - way * step) % ways)

    def both(turn, state, step):
        carried, kept = state
        arriving = next_ones(kept)
        return (from_device(turn, carried, kept, step), arriving), None

    state, begin = (carried, next_ones(kept)), 1
    if ways > 2:
        if first:
            (state, _), begin = both(first, state, 1), 2
        state, _ = jax.lax.scan(partial(both, turn), state, jnp.arange(begin, ways - 1))
        first = None
    return from_device(first or turn, *state, ways - 1)


def ring_backward(q_BtHK: Float[Array, "B t H K"], k_BtGK: Float[Array, "B t G K"],
                  v_BtGV: Float[Array, "B t G V"], y_BtHV: Float[Array, "B t H V"],
                  log_sum_BtH: Float[Array, "B t H"], segments_BT: Segments,
                  dy_BtHV: Float[Array, "B t H V"], tokens: Tokens, axis: str):
    """The gradients of q, k and v, from that of y: 4·(n - 1) permutes.

    The sums for a device's keys and values begin at the next device, gather what all others add,
    and come home with the last of n - 1 permutes, in float32. What a device adds to its own never
    leaves it. Sums are on their way, too, while a turn works: it adds to those that arrive.
    """
    (dy_BtHV, me), G = with_number(dy_BtHV, axis, tokens), k_BtGK.shape[2]
    queries = of_queries(q_BtHK, G, segments_BT, tokens, me)
    of_query = of_each_query(y_BtHV, log_sum_BtH, dy_BtHV, G, tokens)

    def gradient(dq, kept, whose, pairs):
        keys, values = of_keys(*kept, segments_BT, tokens, whose)
        return blockwise.gradient(dq, queries, keys, values, of_query, pairs)

    def begin(carried, kept, whose):
        dq, *more = gradient(*carried, kept, whose, tokens.pairs(me, whose))
        return dq, *(in_order(x, tokens) for x in more)

    def go_on(carried, kept, whose):
        dq, *sums = carried
        arriving = [sent(x, axis, -1) for x in sums]
        dq, *more = begin((dq,), kept, whose)
        return dq, *(x + y for x, y in zip(arriving, more, strict=True))

    kept = k_BtGK, v_BtGV
    dq = jnp.zeros_like(queries[0], dtype=jnp.float32)
    dq, *own = gradient(dq, kept, me, tokens.own_pairs())
    dq, *sums = past_the_others(go_on, (dq,), kept, tokens.ways, axis, way=-1, first=begin)
    home = [sent(x, axis, -1) for x in sums] or [0.0, 0.0]
    dk, dv = (x + in_order(y, tokens) for x, y in zip(home, own, strict=True))
    dq_BtHK = in_order(dq, tokens).reshape(q_BtHK.shape)
    return dq_BtHK.astype(q_BtHK.dtype), dk.astype(k_BtGK.dtype), dv.astype(v_BtGV.dtype)


def with_number(x: Float[Array, "..."], axis: str, tokens: Tokens):
    """x, and this device's number among those that share a sequence, as if it were made of x.

    Masks are made of it. If they depended on nothing that has a gradient, JAX would make those of
    all blocks in front of a loop of layers: as many numbers as there are scores.
    """
    # Where each device has all tokens, as in Ulysses, tokens.ways is 1 and each is number 0: with
    # its number on the axis its tokens would stand behind the filling of the last block, and see
    # it.
    return jax.lax.optimization_barrier((x, jax.lax.axis_index(axis) % tokens.ways))


def of_queries(q_BtHK: Float[Array, "B t H K"], groups: int, segments_BT: Segments, tokens: Tokens,
               me: Any):
    """This device's queries in blocks, heads in groups, with their places and documents."""
    return in_groups(q_BtHK, groups, tokens), tokens.places(me), tokens.documents(segments_BT, me)


def of_keys(k_BtGK: Float[Array, "B t G K"], v_BtGV: Float[Array, "B t G V"],
            segments_BT: Segments, tokens: Tokens, whose: Any):
    """Keys of device `whose` in blocks, with their places and documents, and values."""
    places, documents = tokens.places(whose), tokens.documents(segments_BT, whose)
    return (in_blocks(k_BtGK, tokens), places, documents), in_blocks(v_BtGV, tokens)


def of_each_query(y_BtHV: Float[Array, "B t H V"], log_sum_BtH: Float[Array, "B t H"],
                  dy_BtHV: Float[Array, "B t H V"], groups: int, tokens: Tokens):
    """What the gradient needs of each query, in blocks: see `blockwise.gradient`."""
    y, dy = (in_groups(x, groups, tokens) for x in (y_BtHV, dy_BtHV))
    log_sum = in_groups(log_sum_BtH[..., None], groups, tokens)[..., 0]
    return log_sum, dy, blockwise.shared(y, dy)


def joined_results(carried: tuple, q_BtHK: Float[Array, "B t H K"],
                   v_BtGV: Float[Array, "B t G V"], tokens: Tokens):
    """What was found, (B, t, H, V) of v's type, and the logarithm of each sum, (B, t, H)."""
    y, log_sum = blockwise.finished(carried)
    y_BtHV = in_order(y, tokens).reshape(*q_BtHK.shape[:3], -1)
    log_sum_BtH = in_order(log_sum[..., None], tokens).reshape(q_BtHK.shape[:3])
    return y_BtHV.astype(v_BtGV.dtype), log_sum_BtH


def in_blocks(x: Float[Array, "B t ... K"], tokens: Tokens):
    """Tokens as `blockwise` has them: (m, B, ..., b, K)."""
    return jnp.moveaxis(tokens.cut(x), 2, -2)


def in_groups(x: Float[Array, "B t H K"], groups: int, tokens: Tokens):
    """The same with heads in groups: (m, B, G, N, b, K)."""
    return in_blocks(x.reshape(*x.shape[:2], groups, -1, x.shape[-1]), tokens)


def in_order(x: Float[Array, "m B ... b K"], tokens: Tokens):
    """Tokens as they lie: (B, t, ..., K)."""
    return tokens.joined(jnp.moveaxis(x, -2, 2))
