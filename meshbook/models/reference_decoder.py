"""The decoder once more, for one device, as plainly as can be: nothing of `models.decoder` is here.

Layers are unrolled, positions are turned with complex numbers, keys and values are made for every
head, and every expert computes every token. Sizes are those of the parameters, nested dicts with
the names that the model gives them.

Sources: as in `meshbook.models.heads`, `meshbook.models.decoder` and `meshbook.parallel.routing`.
"""
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Float, Int

from meshbook.models.reference import folded

LATENT = "w_latent_DSR"


def decoder(
    params: Mapping, tokens_BT: Int[Array | np.ndarray, "B T"], rate: int | float = 0.0,
    key: jax.Array | None = None, segments: Int[Array | np.ndarray, "B T"] | None = None,
    positions: Int[Array | np.ndarray, "B T"] | None = None,
):
    """The language model's logits (B, T, V), V padded; with a key, dropout at this rate."""
    return decoder_with_experts(params, tokens_BT, None, rate, key, segments, positions)[0]


def decoder_with_experts(
    params: Mapping, tokens_BT: Int[Array | np.ndarray, "B T"], sizes: Any,
    rate: int | float = 0.0, key: jax.Array | None = None,
    segments: Int[Array | np.ndarray, "B T"] | None = None,
    positions: Int[Array | np.ndarray, "B T"] | None = None,
):
    """The same, and (balance, chosen_BTE, kept_BTE) of each layer that has experts.

    sizes: of the experts, an ExpertSizes with a capacity, or None; chosen, kept: which experts a
    token goes to, and which of them have room for it.
    """
    params, (B, T) = jax.tree.map(jnp.asarray, params), tokens_BT.shape
    at_BT = jnp.broadcast_to(jnp.arange(T), (B, T)) if positions is None else positions
    sees = jnp.tril(jnp.ones((T, T), bool))
    if segments is not None:
        sees = sees & (segments[:, :, None] == segments[:, None, :])
    x_BTD = params["token_VD"][tokens_BT]
    period = len(params["layers"])
    count, of_experts = len(params["layers"]["0"]["norm1"]["scale_D"]), []
    for number, key in enumerate(folded(key, count * period)):
        stacked = params["layers"][str(number % period)]
        p, keys = jax.tree.map(lambda x: x[number // period], stacked), folded(key, 2)
        has_positions = period == 1 or number % period < period - 1
        look = latent if LATENT in p["attention"] else grouped
        y_BTD = look(p["attention"], normalised(p["norm1"], x_BTD),
                     at_BT if has_positions else None, sees)
        x_BTD = x_BTD + dropped(y_BTD, rate, keys[0])
        normed_BTD = normalised(p["norm2"], x_BTD)
        y_BTD = feed_forward(p["mlp"], normed_BTD) if "mlp" in p else 0
        if "experts" in p:
            more_BTD, *found = experts(p["experts"], normed_BTD, sizes)
            y_BTD = y_BTD + more_BTD
            of_experts.append(found)
        x_BTD = x_BTD + dropped(y_BTD, rate, keys[1])
    return normalised(params["norm"], x_BTD) @ params["token_VD"].T, of_experts


def dropped(x_BTD: Float[Array, "B T D"], rate: int | float, key: jax.Array | None):
    """x with a share of its elements 0 and the rest scaled up; without a key, x.

    A token draws words of 32 bits by its number in the batch, and each has four numbers from 0 to
    255, from its lowest on, for four elements that lie a quarter of the vector apart.
    """
    if key is None or rate == 0:
        return x_BTD
    some, (B, T, D) = round(rate * 256), x_BTD.shape
    pair_N2 = jnp.stack(jnp.divmod(jnp.arange(B * T * ((D + 3) // 4)), (D + 3) // 4), -1)
    hashed_N2 = jax.vmap(threefry_2x32, (None, 0))(
        tuple(jax.random.key_data(key)), pair_N2.astype(jnp.uint32))
    words_BTW = (hashed_N2[:, 0] ^ hashed_N2[:, 1]).reshape(B, T, -1)
    drawn_BTD = jnp.concatenate([words_BTW // 256**n % 256 for n in range(4)], -1)[..., :D]
    return jnp.where(drawn_BTD < some, 0, x_BTD / (1 - some / 256))


def normalised(p: Mapping, x_BTD: Float[Array, "... D"]):
    """RMSNorm, with a shift where there is one."""
    x_BTD = x_BTD / jnp.sqrt((x_BTD ** 2).mean(-1, keepdims=True) + 1e-6)
    return x_BTD * p["scale_D"] + p.get("shift_D", 0)


def turned(x: Float[Array, "B T ... K"], at_BT: Int[Array | np.ndarray, "B T"] | None):
    """x with its pairs as complex numbers, times e^(i · position · rate)."""
    if at_BT is None:
        return x
    half = x.shape[-1] // 2
    rates = 10_000.0 ** (-jnp.arange(half) / half)
    angle = at_BT.reshape(at_BT.shape + (1,) * (x.ndim - 2)) * rates
    z = (x[..., :half] + 1j * x[..., half:]) * jnp.exp(1j * angle)
    return jnp.concatenate([z.real, z.imag], -1)


def grouped(p: Mapping, x_BTD: Float[Array, "B T D"], at_BT: Int[Array | np.ndarray, "B T"] | None,
            sees: Array):
    """Attention of heads in groups: head h uses the keys and values of group h // (H / G)."""
    q = turned(jnp.einsum("btd,dhk->bthk", x_BTD, p["w_query_DHK"]) + p.get("b_query_HK", 0), at_BT)
    kv = jnp.einsum("btd,dsgk->sbtgk", x_BTD, p["w_kept_DSGK"])
    k, v = (each + bias for each, bias in zip(kv, p.get("b_kept_SGK", (0, 0))))
    each = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, each, axis=2) for x in (turned(k, at_BT), v))
    return brought_together(p, jnp.einsum("bthk,bshk->bhts", q, k) / q.shape[-1] ** 0.5, sees, v)


def latent(p: Mapping, x_BTD: Float[Array, "B T D"], at_BT: Int[Array | np.ndarray, "B T"] | None,
           sees: Array):
    """Attention whose keys and values are made from a latent of each token."""
    c = jnp.einsum("btd,dsr->btsr", x_BTD, p[LATENT]) + p.get("b_latent_SR", 0)
    q = jnp.einsum("btr,rhk->bthk", c[:, :, 1], p["w_query_RHK"]) + p.get("b_query_HK", 0)
    kv = jnp.einsum("btr,rshk->sbthk", c[:, :, 0], p["w_kept_RSHK"])
    k, v = (each + bias for each, bias in zip(kv, p.get("b_kept_SHK", (0, 0))))
    if "w_turned_SRP" in p:
        k_BTP = jnp.einsum("btsr,srp->btp", c, p["w_turned_SRP"]) + p.get("b_turned_P", 0)
        q_BTHP = (jnp.einsum("btsr,srhp->bthp", c, p["w_turned_query_SRHP"])
                  + p.get("b_turned_query_HP", 0))
        shared = jnp.repeat(turned(k_BTP, at_BT)[:, :, None], q.shape[2], axis=2)
        q, k = (jnp.concatenate(pair, -1) for pair in ((q, turned(q_BTHP, at_BT)), (k, shared)))
    return brought_together(p, jnp.einsum("bthk,bshk->bhts", q, k) / q.shape[-1] ** 0.5, sees, v)


def brought_together(p: Mapping, scores: Float[Array, "B H T s"], sees: Array,
                     v: Float[Array, "B s H K"]):
    """What the heads find, brought together: (B, T, D)."""
    sees = sees[None, None] if sees.ndim == 2 else sees[:, None]
    weights = jax.nn.softmax(jnp.where(sees, scores, -jnp.inf), -1)
    y = jnp.einsum("bhts,bshk->bthk", weights, v)
    return jnp.einsum("bthk,hkd->btd", y, p["w_out_HKD"]) + p.get("b_out_D", 0)


def experts(p: Mapping, x_BTD: Float[Array, "B T D"], sizes: Any):
    """What all experts make of all tokens, by gates that are 0 for what was not chosen or dropped.

    Returns (y_BTD, balance, chosen_BTE, kept_BTE). An expert is chosen if less than A are better,
    and has room for a token if less than C tokens of its row before it chose it, too.
    """
    score_BTE = x_BTD @ p["w_router_DC"] + p.get("b_router_C", 0)
    score_BTE = (jax.nn.sigmoid if sizes.router == "sigmoid" else jax.nn.softmax)(score_BTE)
    rated_BTE, (T, E) = score_BTE + p.get("b_choice_C", 0), score_BTE.shape[1:]
    one, other = rated_BTE[..., :, None], rated_BTE[..., None, :]
    earlier_EE = jnp.tri(E, k=-1, dtype=bool)  # of equals, the first
    chosen_BTE = ((other > one) | (other == one) & earlier_EE).sum(-1) < sizes.active
    C = min(math.ceil(round(sizes.capacity * sizes.active * T / E, 9)), T)
    kept_BTE = chosen_BTE & (jnp.tri(T, k=-1) @ chosen_BTE < C)
    gate_BTE = score_BTE / (score_BTE * chosen_BTE).sum(-1, keepdims=True)
    gate_BTE = score_BTE if sizes.active == 1 else gate_BTE
    h = jnp.einsum("btd,edsf->sbtef", x_BTD, p["w_in_EDSF"])
    if "b_in_ESF" in p:
        h = h + p["b_in_ESF"].swapaxes(0, 1)[:, None, None]
    h = jax.nn.gelu(h[0]) if len(h) == 1 else h[0] * jax.nn.sigmoid(h[0]) * h[1]
    y_BTED = jnp.einsum("btef,efd->bted", h, p["w_out_EFD"]) + p.get("b_out_ED", 0)
    share_BTE = score_BTE / score_BTE.sum(-1, keepdims=True)
    f_E, p_E = chosen_BTE.mean((0, 1)) / sizes.active, share_BTE.mean((0, 1))
    return ((kept_BTE * gate_BTE)[..., None] * y_BTED).sum(2), E * f_E @ p_E, chosen_BTE, kept_BTE


def feed_forward(p: Mapping, x_BTD: Float[Array, "B T D"]):
    """GELU, or SwiGLU where there are two matrices in front."""
    h = jnp.einsum("btd,dsf->sbtf", x_BTD, p["w_in_DSF"])
    h = [each + bias for each, bias in zip(h, p.get("b_in_SF", (0, 0)))]
    h_BTF = jax.nn.gelu(h[0]) if len(h) == 1 else h[0] * jax.nn.sigmoid(h[0]) * h[1]
    return h_BTF @ p["w_out_FD"] + p.get("b_out_D", 0)
