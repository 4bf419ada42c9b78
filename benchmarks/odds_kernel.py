"""The odds of `meshbook.models.fused_loss` in one kernel for NVIDIA GPUs: a product and its exp.

XLA writes the product's float32 logits to memory and reads them again for the exp. Here a tile of
logits never leaves the processor: what is written is its odds, in the type of the model, and the
sum and maximum of each of its rows.

It stands beside the book and not in it, because JAX means to drop this way of writing kernels.

Source: Tillet et al. 2019, "Triton"; it is compiled through JAX's Pallas.
"""
from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

ROWS, COLUMNS, DEPTH = 128, 128, 64  # of a tile: tokens, vocabulary, numbers summed at a time


def kernel_odds(h_nD, w_Dv, b_v, label_n, interpret=False):
    """The same as fused_loss.plain_odds, by a kernel; interpret: step by step, on any device.

    Odds and maxima have the type of h, because a GPU writes them to its memory.
    Raises ValueError where n or v is no multiple of 128, or D none of 64.
    """
    (n, D), v = h_nD.shape, len(b_v)
    for name, size, step in ("n", n, ROWS), ("v", v, COLUMNS), ("D", D, DEPTH):
        if size % step:
            raise ValueError(f"the kernel's tiles need {name} to be a multiple of {step}; "
                             f"found {name}={size}")
    part_vn = jax.ShapeDtypeStruct((v // COLUMNS, n), jnp.float32)
    odds_nv, totals, tops = pl.pallas_call(
        tile, grid=(n // ROWS, v // COLUMNS),
        in_specs=[
            pl.BlockSpec((ROWS, D), lambda i, j: (i, 0)),
            pl.BlockSpec((D, COLUMNS), lambda i, j: (0, j)),
            pl.BlockSpec((COLUMNS,), lambda i, j: (j,)),
            pl.BlockSpec((ROWS,), lambda i, j: (i,))],
        out_specs=[
            pl.BlockSpec((ROWS, COLUMNS), lambda i, j: (i, j)),
            pl.BlockSpec((None, ROWS), lambda i, j: (j, i)),
            pl.BlockSpec((None, ROWS), lambda i, j: (j, i))],
        out_shape=[jax.ShapeDtypeStruct((n, v), h_nD.dtype), part_vn, part_vn],
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=3),
        interpret=interpret, name="odds",
    )(h_nD, w_Dv, b_v, label_n)
    return odds_nv, totals.sum(0), tops.max(0).astype(h_nD.dtype)


def tile(h_ref, w_ref, b_ref, label_ref, odds_ref, total_ref, top_ref):
    """One tile of odds, and the sum and the maximum of each of its rows."""
    def add(at, logits_nv):
        part = pl.ds(at * DEPTH, DEPTH)
        return logits_nv + jnp.dot(
            h_ref[:, part], w_ref[part, :], preferred_element_type=jnp.float32)

    logits_nv = jnp.zeros(odds_ref.shape, jnp.float32)
    logits_nv = jax.lax.fori_loop(0, h_ref.shape[1] // DEPTH, add, logits_nv)
    odds_nv = jnp.exp(logits_nv + b_ref[...][None] - label_ref[...][:, None])
    odds_ref[...] = odds_nv.astype(odds_ref.dtype)
    odds_nv = odds_nv.astype(odds_ref.dtype).astype(jnp.float32)
    total_ref[...], top_ref[...] = odds_nv.sum(1), odds_nv.max(1)
