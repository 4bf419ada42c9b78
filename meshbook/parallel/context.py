"""Attention over tokens that are split over a mesh axis: a row too long for one device.

Each device has the queries, keys and values of its own tokens, and causal attention needs the keys
of all others before them. They are gathered (`gather_kv`), or come by in a ring (`ring_attention`),
or tokens are exchanged for heads (`ulysses`). All find the same, and none ever has the scores of
more than a block of queries and a block of keys.

Everything here stands in a `shard_map` that is manual over the axis; for a model under the rules of
an Explicit mesh see `meshbook.models.context_attention`.

Sources: Liu et al. 2023 (ring); Llama Team 2024 (keys and values gathered); Jacobs et al. 2023,
"DeepSpeed Ulysses".
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from meshbook.parallel import blockwise
from meshbook.parallel.ring_attention import (
    Segments, in_blocks, in_order, joined_results, of_each_query, of_queries, ring_backward,
    ring_forward, with_number
)
from meshbook.parallel.zigzag import Tokens, filled_up, zigzag, zigzag_order
from meshbook.sharding import axes_of

__all__ = ["Context", "filled_up", "gather_kv", "ring_attention", "ulysses", "zigzag",
           "zigzag_order"]
BLOCK = 512  # tokens of a block of queries, and of one of keys
Queries, Keys, Values = (
    Float[Array, "B t H K"], Float[Array, "B t G K"], Float[Array, "B t G V"])


@dataclass(frozen=True)
class Context:
    """How queries reach the keys of other devices.

    method: "ring", "gather" or "ulysses"; axis: the mesh axis that splits tokens; zigzagged:
    whether they lie in the order of `zigzag`; block: tokens of a block, at most. Raises ValueError
    for another method, and for Ulysses in zigzag order.
    """

    method: str = "ring"
    axis: str = "context"
    zigzagged: bool = False
    block: int = BLOCK

    def __post_init__(self):
        if self.method not in METHODS:
            raise ValueError(f"method is one of {', '.join(METHODS)}; found {self.method!r}")
        if self.method == "ulysses" and self.zigzagged:
            raise ValueError("ulysses has all tokens of a row on each device: expected them in "
                             "their own order, found zigzagged=True")

    @property
    def exchanges(self):
        """Whether what is kept for the gradient is of some heads and all tokens."""
        return self.method == "ulysses"

    def tokens(self, each: int):
        """The Tokens of a device that has so many of them."""
        return Tokens(jax.lax.axis_size(self.axis), each, self.zigzagged, self.block)

    def kept_spec(self, spec: P):
        """Where what is kept of (B, T, H, ...) lies, from where that lies."""
        if not self.exchanges:
            return spec
        rows, _, heads, *rest = (*spec, None, None, None)[:max(3, len(spec))]
        return P(rows, None, (*axes_of(heads), self.axis), *rest)

    def places(self, tokens: int, ways: int):
        """The place in a row of each of its tokens, (T,), as they lie on so many devices."""
        return zigzag_order(tokens, ways) if self.zigzagged else jnp.arange(tokens)

    def forward(self, q: Queries, k: Keys, v: Values, segments_BT: Segments = None):
        """(what is found, what `backward` needs): both of this device."""
        return METHODS[self.method][0](self, q, k, v, segments_BT)

    def backward(self, kept: tuple, segments_BT: Segments, dy: Float[Array, "B t H V"]):
        """The gradients of q, k and v."""
        return METHODS[self.method][1](self, kept, segments_BT, dy)


def in_ring(context: Context, q: Queries, k: Keys, v: Values, segments_BT: Segments):
    y, log_sum = ring_forward(q, k, v, segments_BT, context.tokens(q.shape[1]), context.axis)
    return y, (q, k, v, y, log_sum)


def in_ring_back(context: Context, kept: tuple, segments_BT: Segments, dy: Float[Array, "B t H V"]):
    return ring_backward(*kept, segments_BT, dy, context.tokens(dy.shape[1]), context.axis)


def with_gather(context: Context, q: Queries, k: Keys, v: Values, segments_BT: Segments):
    """Each device has the keys and values of all while it looks, and keeps its own."""
    tokens = context.tokens(q.shape[1])
    queries, keys, values, pairs = all_keys(context, q, k, v, segments_BT)
    carried = blockwise.look(blockwise.begun(queries, values), queries, keys, values, pairs)
    y, log_sum = joined_results(carried, q, v, tokens)
    return y, (q, k, v, y, log_sum)


def all_keys(context: Context, q: Queries, k: Keys, v: Values, segments_BT: Segments):
    """Queries of this device, keys and values of all, in blocks, and the pairs that meet."""
    tokens = context.tokens(q.shape[1])
    q, me = with_number(q, context.axis, tokens)
    k, v = (jax.lax.all_gather(x, context.axis, axis=1, tiled=True) for x in (k, v))
    n, m = tokens.ways, tokens.chunks * tokens.in_chunk
    places = jnp.concatenate([tokens.places(whose) for whose in range(n)])
    documents = None if segments_BT is None else tokens.cut(segments_BT)
    pairs = [tokens.own_pairs() + jnp.array([0, m]) * me]
    for step in range(1, n):
        whose = (me - step) % n
        pairs.append(tokens.pairs(me, whose) + jnp.array([0, m]) * whose)
    queries = of_queries(q, k.shape[2], segments_BT, tokens, me)
    keys, values = (in_blocks(x, tokens) for x in (k, v))
    return queries, (keys, places, documents), values, jnp.concatenate(pairs)


def with_gather_back(context: Context, kept: tuple, segments_BT: Segments,
                     dy: Float[Array, "B t H V"]):
    """Keys and values are gathered once more; all devices' parts of their gradients are summed."""
    (q, k, v, y, log_sum), tokens = kept, context.tokens(dy.shape[1])
    queries, keys, values, pairs = all_keys(context, q, k, v, segments_BT)
    of_query = of_each_query(y, log_sum, dy, k.shape[2], tokens)
    dq = jnp.zeros_like(queries[0], dtype=jnp.float32)
    dq, *parts = blockwise.gradient(dq, queries, keys, values, of_query, pairs)
    dk, dv = (jax.lax.psum_scatter(in_order(x, tokens), context.axis,
                                   scatter_dimension=1, tiled=True) for x in parts)
    dq = in_order(dq, tokens).reshape(q.shape)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def with_exchange(context: Context, q: Queries, k: Keys, v: Values, segments_BT: Segments):
    """Ulysses: all tokens of some heads, in place of some tokens of all heads.

    Raises ValueError where devices cannot have equal numbers of groups.
    """
    n, groups = jax.lax.axis_size(context.axis), k.shape[2]
    if groups % n:
        raise ValueError(f"ulysses gives each device of {context.axis!r} whole groups of heads: "
                         f"expected a multiple of {n} groups, found {groups}")
    q, k, v = (to_heads(x, context.axis) for x in (q, k, v))
    y, log_sum = ring_forward(q, k, v, segments_BT, whole_rows(context, q), context.axis)
    return to_tokens(y, context.axis), (q, k, v, y, log_sum)


def with_exchange_back(context: Context, kept: tuple, segments_BT: Segments,
                  dy: Float[Array, "B t H V"]):
    dy = to_heads(dy, context.axis)
    gradients = ring_backward(*kept, segments_BT, dy, whole_rows(context, dy), context.axis)
    return tuple(to_tokens(x, context.axis) for x in gradients)


def whole_rows(context: Context, x: Float[Array, "B T h K"]):
    """The Tokens of a device that has all of them."""
    return Tokens(1, x.shape[1], False, context.block)


def to_heads(x: Float[Array, "B t H K"], axis: str):
    """Some tokens of all heads for all tokens of some heads: an all-to-all."""
    return jax.lax.all_to_all(x, axis, split_axis=2, concat_axis=1, tiled=True)


def to_tokens(x: Float[Array, "B T h K"], axis: str):
    """All tokens of some heads for some tokens of all heads: an all-to-all."""
    return jax.lax.all_to_all(x, axis, split_axis=1, concat_axis=2, tiled=True)


METHODS = {"ring": (in_ring, in_ring_back), "gather": (with_gather, with_gather_back),
           "ulysses": (with_exchange, with_exchange_back)}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(context: Context, q: Queries, k: Keys, v: Values, segments_BT: Segments):
    """Attention inside a shard_map that is manual over the context's axis."""
    return context.forward(q, k, v, segments_BT)[0]


def attend_forward(context: Context, q: Queries, k: Keys, v: Values, segments_BT: Segments):
    y, kept = context.forward(q, k, v, segments_BT)
    return y, (kept, segments_BT)


def attend_backward(context: Context, kept: tuple, dy: Float[Array, "B t H V"]):
    return *context.backward(*kept, dy), None


attend.defvjp(attend_forward, attend_backward)


def ring_attention(q: Queries, k: Keys, v: Values, axis: str = "context", *,
                   segments: Segments = None, zigzagged: bool = False, block: int = BLOCK):
    """Causal attention over the tokens of all devices, whose keys and values come by in a ring.

    q (B, t, H, K), k (B, t, G, K), v (B, t, G, V): this device's t tokens; H is a multiple of G.
    Returns (B, t, H, V), of v's type. segments (B, T): documents of all T = n·t tokens, in the
    order in which they lie; queries look at their own document. zigzagged: tokens lie in the order
    of `zigzag`, and all devices have the same work. block: tokens of a block. With u the bytes of
    a device's keys, 2·(n - 1)·u travel forward and 4·(n - 1)·u backward, or 8·(n - 1)·u in all
    where sums of gradients are float32 beside bfloat16 keys. Not for second derivatives.
    """
    return attend(Context("ring", axis, zigzagged, block), q, k, v, segments)


def gather_kv(q: Queries, k: Keys, v: Values, axis: str = "context", *,
              segments: Segments = None, zigzagged: bool = False, block: int = BLOCK):
    """Causal attention over the tokens of all devices, whose keys and values are gathered.

    As `ring_attention`, with two all-gathers of n·u in each direction, and two reduce-scatters.
    """
    return attend(Context("gather", axis, zigzagged, block), q, k, v, segments)


def ulysses(q: Queries, k: Keys, v: Values, axis: str = "context", *,
            segments: Segments = None, block: int = BLOCK):
    """Causal attention over the tokens of all devices, of which each has some of the heads.

    As `ring_attention`, with four all-to-alls in each direction. Raises ValueError where devices
    cannot have equal numbers of groups.
    """
    return attend(Context("ulysses", axis, block=block), q, k, v, segments)
