"""Attention a block of queries and a block of keys at a time: a softmax that is not finished.

A softmax needs the largest score of a row and the sum over all of them. Both can be carried along:
where a later block has a larger score, what was summed before is scaled down. So keys can come in
any order and from anywhere, and no array ever has more scores than those of two blocks.

Blocks come first in arrays here, and heads before tokens: (m, B, G, N, b, K) are m blocks of b
queries, and G groups of N heads share keys and values. So each pair of blocks is a product for each
head, of which a TPU has nothing to write in another order. What is carried along is float32.

Sources: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; Dao 2023,
"FlashAttention-2" (what is kept, and the gradient).
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

LOWEST = float(jnp.finfo(jnp.float32).min)  # finite, or rows that see nothing yet would be NaN
product = partial(jnp.einsum, preferred_element_type=jnp.float32)
Pairs = Int[Array, "p 2"]  # numbers of a block of queries and of a block of keys


def begun(queries: tuple, values: Float[Array, "j B G s V"]):
    """What queries (m, B, G, N, b, K) carry along before they look: (largest score, sum, found)."""
    m, B, G, N, b, _ = queries[0].shape
    of = partial(jnp.zeros_like, queries[0], dtype=jnp.float32)
    sums = of(shape=(m, B, G, N, b))
    return sums + LOWEST, sums, of(shape=(m, B, G, N, b, values.shape[-1]))


def finished(carried: tuple):
    """What was found, (m, B, G, N, b, V) in float32, and the logarithm of the softmax's sum.

    A query that saw nothing has found zeros.
    """
    top, total, found = carried
    total = jnp.where(total > 0, total, 1)
    return found / total[..., None], top + jnp.log(total)


def look(carried: tuple, queries: tuple, keys: tuple, values: Float[Array, "j B G s V"],
         pairs: Pairs):
    """What is carried along after each pair's queries have looked at its keys.

    queries, keys: (m, B, G, N, b, K) and (j, B, G, s, K), each with where its tokens stand in their
    rows, (m, b), and their documents, (m, B, b), or None; values (j, B, G, s, V).
    """
    def turn(carried, pair):
        i, j = pair
        after = looked(taken(carried, i), taken(queries, i), taken(keys, j), taken(values, j))
        return put(carried, i, after), None

    return jax.lax.scan(turn, carried, pairs)[0]


def looked(carried: tuple, queries: tuple, keys: tuple, v_BGsV: Float[Array, "B G s V"]):
    """The same for one pair of blocks."""
    (top, total, found), sees = carried, seen(queries, keys)
    scores = jnp.where(sees, scores_of(queries, keys), LOWEST)
    highest = jnp.maximum(top, scores.max(-1))
    weights = jnp.where(sees, jnp.exp(scores - highest[..., None]), 0)
    scale = jnp.exp(top - highest)  # of what was summed when the largest score was smaller
    more = product("BGNbs,BGsV->BGNbV", weights.astype(v_BGsV.dtype), v_BGsV)
    return highest, total * scale + weights.sum(-1), found * scale[..., None] + more


def scores_of(queries: tuple, keys: tuple):
    """The scores (B, G, N, b, s) of two blocks, in float32."""
    q_BGNbK, k_BGsK = queries[0], keys[0]
    return product("BGNbK,BGsK->BGNbs", q_BGNbK, k_BGsK) * q_BGNbK.shape[-1] ** -0.5


def seen(queries: tuple, keys: tuple):
    """Which keys a query looks at: none behind it, and none of another document."""
    (_, place_b, document_Bb), (_, place_s, document_Bs) = queries, keys
    sees = (place_b[:, None] >= place_s)[None]
    if document_Bb is not None:
        sees = sees & (document_Bb[:, :, None] == document_Bs[:, None])
    return sees[:, None, None]


def gradient(dq: Float[Array, "m B G N b K"], queries: tuple, keys: tuple,
             values: Float[Array, "j B G s V"], kept: tuple, pairs: Pairs):
    """(dq with what these pairs add, dk, dv), in float32: the softmax is made again.

    kept, of each query: the logarithm of its sum, (m, B, G, N, b), the gradient of what it found,
    (m, B, G, N, b, V), and the sum of both products, (m, B, G, N, b): see `shared`.
    """
    def turn(sums, pair):
        i, j = pair
        parts = of_pair(taken(queries, i), taken(keys, j), taken(values, j), taken(kept, i))
        return tuple(put(total, at, taken(total, at) + part) for total, at, part in zip(
            sums, (i, j, j), parts, strict=True)), None

    zeros = [jnp.zeros_like(x, dtype=jnp.float32) for x in (keys[0], values)]
    return jax.lax.scan(turn, (dq, *zeros), pairs)[0]


def of_pair(queries: tuple, keys: tuple, v_BGsV: Float[Array, "B G s V"], kept: tuple):
    """What one pair of blocks adds to the gradients of queries, keys and values."""
    (q, *_), (k, *_), (log_sum, dy, shared) = queries, keys, kept
    scores = scores_of(queries, keys) - log_sum[..., None]
    weights = jnp.where(seen(queries, keys), jnp.exp(scores), 0)
    dv = product("BGNbs,BGNbV->BGsV", weights.astype(dy.dtype), dy)
    dweights = product("BGNbV,BGsV->BGNbs", dy, v_BGsV)
    dscores = (weights * (dweights - shared[..., None]) * q.shape[-1] ** -0.5).astype(q.dtype)
    return (product("BGNbs,BGsK->BGNbK", dscores, k), product("BGNbs,BGNbK->BGsK", dscores, q), dv)


def shared(y: Float[Array, "m B G N b V"], dy: Float[Array, "m B G N b V"]):
    """What the gradients of all scores of a query have in common: (m, B, G, N, b)."""
    return (y.astype(jnp.float32) * dy).sum(-1)


def taken(arrays: Any, at: Int[Array, ""]):
    """Block number `at` of every array."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, at, 0, keepdims=False), arrays)


def put(arrays: Any, at: Int[Array, ""], blocks: Any):
    """The arrays with these blocks at number `at`."""
    write: Callable = partial(jax.lax.dynamic_update_index_in_dim, index=at, axis=0)
    return jax.tree.map(write, arrays, blocks)
