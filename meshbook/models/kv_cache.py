"""The keys and values of tokens that were read, and attention to them.

A cache has, for each block, keys and values (B, H, W, K): W columns, as many as the window, one
for each token of a text. Rows of a batch may begin in different columns.
"""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from meshbook.models.minigpt import MASKED, CausalAttention, MiniGPT


def empty_cache(model: MiniGPT, rows: int):
    """The cache of a batch of texts before anything was read: a pair for each block."""
    c, spec = model.config, model.sharding.activation("BTHK")
    empty_BWHK = jnp.zeros((rows, c.tokens, c.heads, c.head_size), c.dtype)
    empty_BHWK = jax.reshard(empty_BWHK, spec).swapaxes(1, 2)
    return [(empty_BHWK, empty_BHWK)] * c.layers


def attend(
    attention: CausalAttention, x_BTD: Float[Array, "B T D"],
    cache: list | tuple, column: int | Array, seen: Bool[Array, "B 1 T W"],
):
    """Attention of new tokens to cached ones and themselves: (y (B, T, D), new cache).

    cache: keys and values (B, H, W, K); those of x are put into `column` and those after it.
    seen: which columns a new token sees.
    """
    q_BTHK, *new = attention.heads(x_BTD)
    put = jax.lax.dynamic_update_slice_in_dim
    k_BHWK, v_BHWK = cache = [
        put(old, x_BTHK.swapaxes(1, 2), column, 2)  # W beside K
        for old, x_BTHK in zip(cache, new)
    ]
    scores = jnp.einsum("BTHK,BHWK->BHTW", q_BTHK, k_BHWK)
    scores = scores.astype(jnp.float32) * q_BTHK.shape[-1] ** -0.5
    p_BHTW = jax.nn.softmax(jnp.where(seen, scores, MASKED))
    p_BHTW = p_BHTW.astype(x_BTD.dtype)
    y_BTHK = jnp.einsum("BHTW,BHWK->BTHK", p_BHTW, v_BHWK)
    return attention.join(y_BTHK), cache


def extend(
    model: MiniGPT, tokens_BT: Int[Array | np.ndarray, "B T"],
    cache: list | tuple, column: int | Array, first_B: Int[Array, "B"],
):
    """Hidden states of tokens that follow cached ones: ((B, T, D), new cache).

    The new tokens stand in `column` and those after it; a row's text begins in its first_B, and
    a token sees the columns from there to its own.
    """
    W = model.config.tokens
    at_T, columns_W = column + jnp.arange(tokens_BT.shape[1]), jnp.arange(W)
    positions_BT = jnp.clip(at_T - first_B[:, None], 0, W - 1)
    seen_BTW = columns_W <= at_T[:, None]
    seen_BTW = seen_BTW & (columns_W >= first_B[:, None, None])
    x_BTD, new = model.embed(tokens_BT, positions_BT), []
    for block, pair in zip(model.blocks, cache):
        y_BTD, pair = attend(
            block.attention, x_BTD, pair, column, seen_BTW[:, None]
        )
        x_BTD = block.add(x_BTD, y_BTD)
        new.append(pair)
    return x_BTD, new
