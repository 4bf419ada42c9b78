"""Attention of a modern decoder: rotary positions, heads in groups, keys and values from a latent.

Each has three steps: `read` makes queries, and what a cache keeps of each token; `look` lets the
queries look at what was kept. Letters besides those of `meshbook.sharding`: G groups of heads that
share keys and values, N heads of a group, R numbers of a latent, P numbers of a rotary part, s a
token that is looked at.

Sources: Su et al. 2021, "RoFormer" (rotary positions); Ainslie et al. 2023, "GQA" (groups);
DeepSeek-AI 2024, "DeepSeek-V2" (latent attention).
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.nn import initializers as init
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from meshbook.models.context_attention import attend_over_context
from meshbook.models.row_attention import FOUND, attend_by_rows, scores_of
from meshbook.models.text_models import MASKED
from meshbook.parallel.sequence import gathered_tokens, products
from meshbook.sharding import Sharding, axes_of, beside, summed_once

Hidden = Float[Array, "B T D"]
Angles = Float[Array, "#B T k"] | None
# which tokens s a token looks at, or, where a context splits tokens, what document it is in
Sees = Bool[Array, "#B T s"] | Int[Array, "B T"] | None
BASE = 10_000.0  # the slowest pair turns by one radian in about as many tokens


def angles(positions_BT: Int[Array | np.ndarray, "B T"], size: int):
    """Angles (B, T, size / 2) by which pairs of numbers are turned, in float32."""
    rates = BASE ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)
    return positions_BT[..., None].astype(jnp.float32) * rates


def rotate(x: Float[Array, "B T ... K"], angles_BTk: Angles):
    """x with numbers i and i + K/2 turned as a pair, computed in float32, of x's type.

    The product of two vectors that were turned depends only on how far apart they stand. Without
    angles x is returned as it is.
    """
    if angles_BTk is None:
        return x
    one, two = jnp.split(x.astype(jnp.float32), 2, -1)
    cos, sin = jnp.cos(angles_BTk), jnp.sin(angles_BTk)
    if x.ndim == 4:
        cos, sin = cos[:, :, None], sin[:, :, None]
    turned = jnp.concatenate([one * cos - two * sin, two * cos + one * sin], -1)
    return turned.astype(x.dtype)


def uniform(fan_in: int, scale: float = 1.0):
    """An initializer: uniform numbers of variance scale / fan_in, bit-equal on every mesh."""
    return partial(uniform_within, (3 * scale / fan_in) ** 0.5)


def uniform_within(most: float, key: jax.Array, shape: tuple, dtype: DTypeLike,
                   out_sharding: Any = None):
    """Uniform numbers from -most to most, of this shape and type."""
    return jax.random.uniform(key, shape, dtype, -most, most, out_sharding=out_sharding)


def biases(config: Any, make: Callable):
    """What makes a bias of these letters and this shape, or None where the config has none."""
    return lambda letters, shape: make(letters, shape, init.zeros) if config.bias else None


def weights_of(scores: Float[Array, "..."], sees: Bool[Array, "..."], dtype: DTypeLike):
    """The softmax of scores over what is seen, in float32, and then of this type."""
    return jax.nn.softmax(jnp.where(sees, scores, MASKED)).astype(dtype)


def multiplied(sharding: Sharding, equation: str, x: Float[Array, "..."], w: nnx.Param,
               b: nnx.Param | None = None):
    """einsum of x and a parameter, in x's type, plus its bias: laid out as the result's letters."""
    return multiplied_by_each(sharding, x, (equation, w, b))[0]


def multiplied_by_each(sharding: Sharding, x: Float[Array, "..."], *each: tuple):
    """A list of what `multiplied` makes of x and each (equation, w, b).

    If the rules split the tokens of x and not those of the results, x is gathered, once; if they
    split the tokens of a result alone, its sum is scattered.
    """
    weights, outs = [], []
    for equation, w, _ in each:
        inputs, letters, out = equation.replace("->", ",").split(",")
        w = sharding.weight(letters, w[...], x.dtype)
        order = [letters.index(letter) for letter in inputs[2:] + out[2:]]  # after B and T
        weights.append(w if order == sorted(order) else w.transpose(order))
        outs.append(sharding.activation(out))
    wide = jnp.float32 if sharding.float32_sums else None  # also of sums that are not split
    found = products(x, weights, outs, sharding.overlapped, wide)
    found = [by_hand(sharding, equation, y).astype(x.dtype)
             for y, (equation, *_) in zip(found, each, strict=True)]
    return [y if b is None else y + beside(sharding, equation.partition("->")[2][2:], b[...], y)
            for y, (equation, _, b) in zip(found, each, strict=True)]


def by_hand(sharding: Sharding, equation: str, y: Float[Array, "..."]):
    """A product, added up over the manual axes that split what it sums over.

    Inside a shard_map a device has a part of H or F, and makes one term of such a sum.
    """
    inputs, out = equation.split(",")[0], equation.partition("->")[2]
    axes = {axis for letter in {*inputs} - {*out} for axis in axes_of(sharding.activations[letter])}
    axes &= {*jax.sharding.get_abstract_mesh().manual_axes}
    return jax.lax.psum(y, tuple(axes)) if axes else y


class GroupedQueryAttention(nnx.Module):
    """Heads that share keys and values in groups, with rotary positions: (B, T, D) to (B, T, D).

    As many groups as heads is plain attention. Of each token 2·G·K numbers are kept.
    """

    def __init__(self, config: Any, sharding: Sharding, make: Callable):
        D, H, K, G = config.embed, config.heads, config.head_size, config.groups or config.heads
        self.w_query_DHK = make("DHK", (D, H, K), uniform(D))
        self.w_kept_DSGK = make("DSGK", (D, 2, G, K), uniform(D))
        self.w_out_HKD = make("HKD", (H, K, D), uniform(D, config.narrow))
        bias = biases(config, make)
        self.b_query_HK = bias("HK", (H, K))
        self.b_kept_SGK = bias("SGK", (2, G, K))
        self.b_out_D = bias("D", (D,))
        self.sizes, self.sharding, self.by_row = (G, K), sharding, config.by_row

    def cache(self, zeros: Callable):
        """What is kept of a text that was not read: keys and values, by zeros(letters, shape)."""
        return (zeros("GK", self.sizes),) * 2

    def read(self, x_BTD: Hidden, angles_BTk: Angles):
        """Queries (B, T, H, K), and what is kept: keys and values (B, T, G, K)."""
        s = self.sharding
        x_BTD = summed_once(x_BTD, s.activations["H"], s.activations["G"])  # one gradient of both
        q_BTHK, kv_BTSGK = multiplied_by_each(
            s, x_BTD, ("BTD,DHK->BTHK", self.w_query_DHK, self.b_query_HK),
            ("BTD,DSGK->BTSGK", self.w_kept_DSGK, self.b_kept_SGK))
        k_BTGK, v_BTGK = kv_BTSGK[:, :, 0], kv_BTSGK[:, :, 1]
        return rotate(q_BTHK, angles_BTk), (rotate(k_BTGK, angles_BTk), v_BTGK)

    def look(self, q_BTHK: Float[Array, "B T H K"], kept: tuple, sees_BTs: Sees,
             absorbed: bool = False):
        """What the queries find in keys and values (B, s, G, K): (B, T, D).

        absorbed: for a LatentAttention in the same place; here it changes nothing.
        """
        s, (k_BsGK, v_BsGK), (B, T, H, K) = self.sharding, kept, q_BTHK.shape
        if s.context is not None:
            y_BTHK = attend_over_context(s, q_BTHK, k_BsGK, v_BsGK, sees_BTs)
        elif self.by_row:
            y_BTHK = attend_by_rows(s, (q_BTHK, None), (k_BsGK, None), v_BsGK, sees_BTs)
        else:
            G = k_BsGK.shape[2]
            shape = B, T, G, H // G, K
            q_BTGNK = jax.lax.reshape(q_BTHK, shape, out_sharding=s.activation("BTGNK"))
            scores = scores_of("BTGNK,BsGK->BGNTs", q_BTGNK, k_BsGK) * K ** -0.5
            p_BGNTs = weights_of(scores, sees_BTs[:, None, None], v_BsGK.dtype)
            y_BTGNK = jnp.einsum("BGNTs,BsGK->BTGNK", p_BGNTs, v_BsGK)
            y_BTHK = jax.lax.reshape(y_BTGNK, (B, T, H, K), out_sharding=s.activation("BTHK"))
            y_BTHK = checkpoint_name(y_BTHK, FOUND)
        return multiplied(s, "BTHK,HKD->BTD", y_BTHK, self.w_out_HKD, self.b_out_D)


class LatentAttention(nnx.Module):
    """Keys and values made from a latent of R numbers: (B, T, D) to (B, T, D).

    Positions are in a part of their own, of P numbers, whose keys all heads share; without angles
    there is none. Of each token R + P numbers are kept, or R.
    """

    def __init__(self, config: Any, sharding: Sharding, make: Callable, rotary: int):
        D, H, K, R, P = config.embed, config.heads, config.head_size, config.latent, rotary
        self.w_latent_DSR = make("DSR", (D, 2, R), uniform(D))  # of keys and values; of queries
        self.w_query_RHK = make("RHK", (R, H, K), uniform(R))
        self.w_kept_RSHK = make("RSHK", (R, 2, H, K), uniform(R))
        self.w_out_HKD = make("HKD", (H, K, D), uniform(D, config.narrow))
        bias, if_turned = biases(config, make), lambda f, *what: f(*what) if P else None
        self.b_latent_SR = bias("SR", (2, R))
        self.b_query_HK = bias("HK", (H, K))
        self.b_kept_SHK = bias("SHK", (2, H, K))
        self.b_out_D = bias("D", (D,))
        self.w_turned_SRP = if_turned(make, "SRP", (2, R, P), uniform(2 * R))
        self.b_turned_P = if_turned(bias, "P", (P,))
        self.w_turned_query_SRHP = if_turned(make, "SRHP", (2, R, H, P), uniform(2 * R))
        self.b_turned_query_HP = if_turned(bias, "HP", (H, P))
        self.sizes, self.sharding, self.by_row = (R, P), sharding, config.by_row

    def cache(self, zeros: Callable):
        """What is kept of a text that was not read: latents and turned keys, if there are any."""
        R, P = self.sizes
        return zeros("R", (R,)), zeros("P", (P,)) if P else None

    def read(self, x_BTD: Hidden, angles_BTk: Angles):
        """Queries, (B, T, H, K) and turned (B, T, H, P), and what is kept: (B, T, R), (B, T, P)."""
        s = self.sharding
        own_BTSR = multiplied(s, "BTD,DSR->BTSR", x_BTD, self.w_latent_DSR, self.b_latent_SR)
        whole_BTSR = gathered_tokens(own_BTSR)  # 2·R numbers of a token, not D
        c_BTSR = summed_once(whole_BTSR, s.activations["H"])  # over heads, its gradient
        q_BTHK = multiplied(s, "BTR,RHK->BTHK", c_BTSR[:, :, 1], self.w_query_RHK, self.b_query_HK)
        if self.w_turned_SRP is None:
            return (q_BTHK, None), (c_BTSR[:, :, 0], None)
        k_BTP = multiplied(s, "BTSR,SRP->BTP", own_BTSR, self.w_turned_SRP, self.b_turned_P)
        q_BTHP = multiplied(s, "BTSR,SRHP->BTHP", c_BTSR, self.w_turned_query_SRHP,
                         self.b_turned_query_HP)
        return ((q_BTHK, rotate(q_BTHP, angles_BTk)),
                (c_BTSR[:, :, 0], gathered_tokens(rotate(k_BTP, angles_BTk))))

    def look(self, queries: tuple, kept: tuple, sees_BTs: Sees, absorbed: bool = False):
        """What the queries find in what was kept: (B, T, D).

        absorbed: keys and values are not made; the queries are taken to the latent, and what was
        found there to the heads. It is the same sum in another order, of less work where few
        queries look at many tokens.
        """
        s, c_BsR = self.sharding, kept[0]
        w_RSHK = s.weight("RSHK", self.w_kept_RSHK[...], c_BsR.dtype)
        by_row = self.by_row and not absorbed
        find = self.in_rows if by_row else partial(self.in_heads, absorbed=absorbed)
        y_BTHK = find(queries, kept, w_RSHK, sees_BTs)
        if self.b_kept_SHK is not None:  # the weights of a query sum to 1
            y_BTHK = y_BTHK + beside(s, "HK", self.b_kept_SHK[...][1], y_BTHK)
        if not by_row:
            y_BTHK = checkpoint_name(y_BTHK, FOUND)
        return multiplied(s, "BTHK,HKD->BTD", y_BTHK, self.w_out_HKD, self.b_out_D)

    def in_heads(self, queries: tuple, kept: tuple, w_RSHK: Array, sees_BTs: Sees, absorbed: bool):
        """What the heads find, all scores at once: (B, T, H, K), without the values' bias."""
        s, (q_BTHK, q_BTHP), (c_BsR, k_BsP) = self.sharding, queries, kept
        w_key_RHK, w_value_RHK = w_RSHK[:, 0], w_RSHK[:, 1]
        out = {"out_sharding": s.activation("BTHK")}
        size = q_BTHK.shape[-1]
        if absorbed:  # a key's bias adds as much to all scores of a query, and changes nothing
            q_BTHR = jnp.einsum("BTHK,RHK->BTHR", q_BTHK, w_key_RHK, **out)
            scores = scores_of("BTHR,BsR->BHTs", q_BTHR, c_BsR)
        else:
            k_BsHK = self.keys(c_BsR, w_key_RHK)
            scores = scores_of("BTHK,BsHK->BHTs", q_BTHK, k_BsHK)
        if q_BTHP is not None:
            scores += scores_of("BTHP,BsP->BHTs", q_BTHP, summed_once(k_BsP, s.activations["H"]))
            size += q_BTHP.shape[-1]
        p_BHTs = weights_of(scores * size ** -0.5, sees_BTs[:, None], c_BsR.dtype)
        if absorbed:
            found_BTHR = jnp.einsum("BHTs,BsR->BTHR", p_BHTs, c_BsR, **out)
            return jnp.einsum("BTHR,RHK->BTHK", found_BTHR, w_value_RHK, **out)
        v_BsHK = jnp.einsum("BsR,RHK->BsHK", c_BsR, w_value_RHK, **out)
        return jnp.einsum("BHTs,BsHK->BTHK", p_BHTs, v_BsHK)

    def keys(self, c_BsR: Float[Array, "B s R"], w_key_RHK: Float[Array, "R H K"]):
        """The heads' keys, without the turned part: (B, s, H, K)."""
        k_BsHK = jnp.einsum("BsR,RHK->BsHK", c_BsR, w_key_RHK,
                            out_sharding=self.sharding.activation("BTHK"))
        if self.b_kept_SHK is None:
            return k_BsHK
        return k_BsHK + beside(self.sharding, "HK", self.b_kept_SHK[...][0], k_BsHK)

    def in_rows(self, queries: tuple, kept: tuple, w_RSHK: Array, sees_BTs: Sees):
        """The same, one row of the batch after the other."""
        s, (c_BsR, k_BsP) = self.sharding, kept
        v_BsHK = jnp.einsum("BsR,RHK->BsHK", c_BsR, w_RSHK[:, 1],
                            out_sharding=s.activation("BTHK"))
        if k_BsP is not None:
            k_BsP = summed_once(k_BsP, s.activations["H"])  # its gradient is summed over heads once
        keys = self.keys(c_BsR, w_RSHK[:, 0]), k_BsP
        return attend_by_rows(s, queries, keys, v_BsHK, sees_BTs)
