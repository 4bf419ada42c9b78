"""Attention to the keys and values of tokens that were read, and where new tokens stand.

A cache has W columns, as many as the window, one for each token of a text. Rows of a batch may
begin in different columns.
"""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from meshbook.models.layers import Attention
from meshbook.models.text_models import MASKED


def positions_and_seen(
    count: int, window: int, column: int | Array,
    first_B: Int[Array | np.ndarray, "B"],
):
    """Of `count` new tokens: (positions (B, T), which columns each sees, (B, T, W)).

    They stand in `column` and those after it; a row's text begins in its first_B, and a token
    sees the columns from there to its own.
    """
    at_T, columns_W = column + jnp.arange(count), jnp.arange(window)
    positions_BT = jnp.clip(at_T - first_B[:, None], 0, window - 1)
    seen_BTW = columns_W <= at_T[:, None]
    seen_BTW = seen_BTW & (columns_W >= first_B[:, None, None])
    return positions_BT, seen_BTW


def attend(
    attention: Attention, x_BTD: Float[Array, "B T D"],
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
