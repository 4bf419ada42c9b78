"""Cross-entropy with the logits looked at once: what a GPU's memory has least trouble with.

The chunks of `meshbook.models.losses` write a chunk's logits in float32 and read them again for
their maximum, for their sum and for their errors. Here each token's logits are counted from its
label's, which is a single number, known before the others. So a product ends in an exp and is
written once; its sum is the loss; and all gradients are products of it as it is, because what the
sum divides can be divided in the token's row. Nothing is computed twice.

Sources: Milakov and Gimelshein 2018 (a softmax that does not know its maximum); Wijmans et al.
2024, "Cut your losses" (a loss whose logits are never in memory).
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from meshbook.models.losses import cut, mean_over_devices, split_of
from meshbook.models.text_models import MASKED
from meshbook.sharding import Sharding

CHUNK = 4096  # tokens of one device whose odds are there at once


def one_pass_cross_entropy(
    hidden_BTD: Float[Array | np.ndarray, "B T D"], w_DV: Float[Array | np.ndarray, "D V"],
    b_V: Float[Array | np.ndarray, "V"], labels_BT: Int[Array | np.ndarray, "B T"],
    weight_BT: Float[Array | np.ndarray, "B T"] | None = None, *,
    vocabulary: int, sharding: Sharding, chunk: int = CHUNK, make_odds: Callable | None = None,
):
    """The same mean loss (nats) and accuracy as chunked_cross_entropy, and its gradients.

    Arguments as there; make_odds: see plain_odds, which is the default. A token whose loss is
    above 88 nats makes the loss infinite.
    """
    settings = split_of(sharding), vocabulary, make_odds or plain_odds
    return mean_over_devices(
        partial(one_pass_sums, settings, chunk), partial(sums_and_products, settings, chunk),
        sharding, hidden_BTD, w_DV, b_V, labels_BT, weight_BT)


def one_pass_sums(
    settings: tuple, chunk: int, h_nD: Float[Array, "n D"], w_Dv: Float[Array, "D v"],
    b_v: Float[Array, "v"], labels_n: Int[Array, "n"], weight_n: Float[Array, "n"],
):
    """Sums over this device's tokens: (loss, right answers), weighted."""
    def turn(sums, part):
        more = odds(*settings, w_Dv, b_v, *part)[0]
        return jax.tree.map(jnp.add, sums, more), None

    zero = jnp.zeros_like(weight_n[0])
    return jax.lax.scan(turn, (zero, zero), cut(chunk, h_nD, labels_n, weight_n))[0]


def sums_and_products(
    settings: tuple, chunk: int, h_nD: Float[Array, "n D"], w_Dv: Float[Array, "D v"],
    b_v: Float[Array, "v"], labels_n: Int[Array, "n"], weight_n: Float[Array, "n"],
):
    """The same sums, and the loss's gradients to hidden, weights and bias."""
    def turn(total, part):
        more, errors_nv, share_n = odds(*settings, w_Dv, b_v, *part)
        errors_nv = errors_nv.astype(h_nD.dtype)
        product = partial(jnp.einsum, preferred_element_type=jnp.float32)
        dh_nD = product("nv,Dv->nD", errors_nv, w_Dv) * share_n[:, None]
        # As if hidden had one more number, 1, whose weights are the bias.
        rows_nX = jnp.pad(part[0], [(0, 0), (0, 1)], constant_values=1)
        rows_nX = (rows_nX * share_n[:, None]).astype(h_nD.dtype)
        more = *more, product("nX,nv->Xv", rows_nX, errors_nv)
        return jax.tree.map(jnp.add, total, more), dh_nD.astype(h_nD.dtype)

    (D, v), zero = w_Dv.shape, jnp.zeros_like(weight_n[0])
    start = zero, zero, jnp.zeros_like(w_Dv, jnp.float32, shape=(D + 1, v))
    parts = cut(chunk, h_nD, labels_n, weight_n)
    (loss, right, dw_Xv), dh_cnD = jax.lax.scan(turn, start, parts)
    dh_nD = dh_cnD.reshape(-1, D)[:len(h_nD)]
    return (loss, right), (dh_nD, dw_Xv[:D].astype(w_Dv.dtype), dw_Xv[D].astype(b_v.dtype))


def odds(
    axis: str | tuple[str, ...] | None, vocabulary: int, make_odds: Callable,
    w_Dv: Float[Array, "D v"], b_v: Float[Array, "v"], h_nD: Float[Array, "n D"],
    labels_n: Int[Array, "n"], weight_n: Float[Array, "n"],
):
    """((loss, right answers), errors (n, v), share (n,)) of one chunk of tokens.

    The odds of a token are exp(its logit - the label's): 1 for the label. Their sum is what the
    softmax divides by, its logarithm the loss. errors: the odds, less their sum at the label;
    times share, weight / sum, they are the logits' gradients.
    """
    v, over = len(b_v), partial(jax.lax.psum, axis_name=axis)
    ids_v = jnp.arange(v) + (0 if axis is None else jax.lax.axis_index(axis) * v)
    at_n = labels_n - ids_v[0]
    mine_n, at_n = (at_n >= 0) & (at_n < v), jnp.clip(at_n, 0, v - 1)
    b_v = jnp.where(ids_v < vocabulary, b_v, MASKED).astype(jnp.float32)
    label_n = logits_at(h_nD, w_Dv, b_v, at_n)
    label_n = label_n if axis is None else over(jnp.where(mine_n, label_n, 0))
    label_n = jnp.where(weight_n != 0, label_n, jnp.inf)  # odds of 0 where nothing counts
    odds_nv, total_n, top_n = make_odds(h_nD, w_Dv, b_v, label_n)
    rows_n = jnp.arange(len(labels_n))
    own_n = odds_nv[rows_n, at_n]
    if axis is not None:
        total_n, top_n = over(total_n), jax.lax.pmax(top_n, axis)
    known_n = (labels_n >= 0) & (labels_n < vocabulary)
    loss_n = jnp.where(known_n, jnp.log(total_n), jnp.nan)
    loss_n = jnp.where(weight_n != 0, loss_n * weight_n, 0)
    right_n = jnp.where(mine_n & (own_n >= top_n), weight_n, 0)
    right_n = right_n if axis is None else over(right_n)
    less_n = jnp.where(mine_n, own_n - total_n, own_n).astype(odds_nv.dtype)
    errors_nv = odds_nv.at[rows_n, at_n].set(less_n, unique_indices=True)
    share_n = jnp.where(weight_n != 0, weight_n / total_n, 0)
    return (loss_n.sum(), right_n.sum()), errors_nv, share_n


def plain_odds(
    h_nD: Float[Array, "n D"], w_Dv: Float[Array, "D v"],
    b_v: Float[Array, "v"], label_n: Float[Array, "n"],
):
    """exp(h·w + b - label), its sums and its maxima: (n, v), (n,), (n,).

    All are float32, whatever the type of h: by the estimate of a TPU's
    compiler, a product that ends in bfloat16 takes longer.
    """
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    logits_nv = product("nD,Dv->nv", h_nD, w_Dv)
    odds_nv = jnp.exp(logits_nv + b_v - label_n[:, None])
    # all three come out of one operation, the product
    return jax.lax.optimization_barrier(
        (odds_nv, odds_nv.sum(-1), odds_nv.max(-1)))


def logits_at(h_nD: Float[Array, "n D"], w_Dv: Float[Array, "D v"], b_v: Float[Array, "v"],
              at_n: Int[Array, "n"]):
    """One logit of each token, in float32: (n,)."""
    w_nD = w_Dv.T[at_n].astype(jnp.float32)
    return (h_nD.astype(jnp.float32) * w_nD).sum(-1) + b_v[at_n]
