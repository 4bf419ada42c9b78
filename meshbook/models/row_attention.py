"""Attention whose scores are those of one row at a time, made again for the gradient.

The scores of a batch are its largest arrays, B·H·T·T numbers of float32, and a step spends more
time on moving them than on its products. Those of one row fit into the memory beside a TPU's core.
The rows of a device are taken one after the other, and no array ever has the scores of all rows.

Sources: Rabe and Staats 2021, "Self-attention does not need O(n^2) memory"; Dao et al. 2022,
"FlashAttention" (what is kept in fast memory, and the gradient).
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from meshbook.models.text_models import MASKED
from meshbook.sharding import Sharding, shard_map_over_the_rest, summed

FOUND = "found"  # the name of what heads found, for policies of rematerialisation
scores_of = partial(jnp.einsum, preferred_element_type=jnp.float32)


def attend_by_rows(sharding: Sharding, queries: tuple, keys: tuple, v_BsGV: Float[Array, "B s G V"],
                   sees_BTs: Bool[Array, "#B T s"]):
    """What queries find in keys and values of their groups: (B, T, H, V), softmax in float32.

    queries, keys: (B, T, H, K) and (B, s, G, K), each with None or a part that is turned beside it,
    (B, T, H, P) and (B, s, P), whose keys all heads share. H is a multiple of G. sees_BTs: which
    tokens s a token looks at, each at least one. Not for second derivatives.
    """
    spec = sharding.activation
    rows = spec("B") if len(sees_BTs) > 1 else P()
    specs = (spec("BTHK"),) * 2, (spec("BTGK"), spec("B")), spec("BTGK"), rows
    waits = frozenset() if keys[1] is None else jax.typeof(keys[1]).sharding.spec.reduced
    return _by_rows((specs, waits), queries, keys, v_BsGV, jax.reshard(sees_BTs, rows))


def side_by_side(queries: tuple, keys: tuple):
    """Of one row queries, scaled, and keys with their turned parts: (t, G, J) and (s, G, J).

    J is K, or K + P. Heads of a group stand one below the other, as if they were t = N * T tokens.
    """
    (q_THK, q_THP), (k_sGK, k_sP) = queries, keys
    if q_THP is not None:
        k_sGP = jnp.broadcast_to(k_sP[:, None], (*k_sGK.shape[:2], k_sP.shape[1]))
        q_THK, k_sGK = (jnp.concatenate(parts, -1) for parts in ((q_THK, q_THP), (k_sGK, k_sGP)))
    scaled = (q_THK.astype(jnp.float32) * q_THK.shape[-1] ** -0.5).astype(q_THK.dtype)
    return below(scaled, k_sGK.shape[1]), k_sGK


def below(x_THK: Float[Array, "T H K"], groups: int):
    """(N * T, G, K): heads of a group one below the other."""
    T, H, K = x_THK.shape
    return x_THK.reshape(T, groups, H // groups, K).transpose(2, 0, 1, 3).reshape(-1, groups, K)


def weights(q_tGJ: Float[Array, "t G J"], k_sGJ: Float[Array, "s G J"],
            sees_Ts: Bool[Array, "T s"]):
    """The softmax of one row's scores, (G, t, s), in float32."""
    scores = scores_of("tGJ,sGJ->Gts", q_tGJ, k_sGJ)
    sees_ts = jnp.tile(sees_Ts, (len(q_tGJ) // len(sees_Ts), 1))
    return jax.nn.softmax(jnp.where(sees_ts, scores, MASKED))


def find(queries: tuple, keys: tuple, v_sGV: Float[Array, "s G V"], sees_Ts: Bool[Array, "T s"]):
    """What one row finds: (T, H, V)."""
    (T, H, _), G = queries[0].shape, v_sGV.shape[1]
    w_Gts = weights(*side_by_side(queries, keys), sees_Ts).astype(v_sGV.dtype)
    y_NTGV = jnp.einsum("Gts,sGV->tGV", w_Gts, v_sGV).reshape(H // G, T, G, -1)
    return y_NTGV.transpose(1, 2, 0, 3).reshape(T, H, -1)


def gradient(queries: tuple, keys: tuple, v_sGV: Float[Array, "s G V"], sees_Ts: Bool[Array, "T s"],
             y_THV: Float[Array, "T H V"], dy_THV: Float[Array, "T H V"]):
    """The gradients of queries, keys and values of one row, from that of what `find` found.

    Of the softmax's gradient what all weights of a query share is a sum over what was found, not
    over tokens: the scores' number of multiplications is saved, and they are not read once more.
    """
    (q_tGJ, k_sGJ), apart = jax.vjp(side_by_side, queries, keys)
    w_Gts, dtype, G = weights(q_tGJ, k_sGJ, sees_Ts), v_sGV.dtype, v_sGV.shape[1]
    y_tGV, dy_tGV = below(y_THV, G), below(dy_THV, G)
    shared_tG = (dy_tGV.astype(jnp.float32) * y_tGV).sum(-1)
    dv_sGV = jnp.einsum("Gts,tGV->sGV", w_Gts.astype(dtype), dy_tGV)
    dw_Gts = scores_of("tGV,sGV->Gts", dy_tGV, v_sGV)
    ds_Gts = (w_Gts * (dw_Gts - shared_tG.T[..., None])).astype(dtype)
    dq_tGJ = jnp.einsum("Gts,sGJ->tGJ", ds_Gts, k_sGJ)
    dk_sGJ = jnp.einsum("Gts,tGJ->sGJ", ds_Gts, q_tGJ)
    return *apart((dq_tGJ, dk_sGJ)), dv_sGV


def each_row(one: Callable, sees_BTs: Bool[Array, "#B T s"], *arrays: Any):
    """one(queries, keys, values, sees, *others) of each row that a device has, one by one."""
    if len(sees_BTs) == 1:
        return jax.lax.map(lambda row: one(*row[:3], sees_BTs[0], *row[3:]), arrays)
    return jax.lax.map(lambda row: one(*row[1:4], row[0], *row[4:]), (sees_BTs, *arrays))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_rows(layout, *arrays):
    return _forward(layout, *arrays)[0]


def _forward(layout, queries, keys, v_BsGV, sees_BTs):
    (q, k, v, rows), waits = layout

    def local(queries, keys, v_BsGV, sees_BTs):
        return each_row(find, sees_BTs, queries, of_each_head(keys, waits), v_BsGV)

    shared = None if keys[1] is None else jax.reshard(keys[1], k[1])
    y_BTHV = shard_map_over_the_rest(local, (q, k, v, rows), q[0])(
        queries, (keys[0], shared), v_BsGV, sees_BTs)
    y_BTHV = checkpoint_name(y_BTHV, FOUND)
    return y_BTHV, (queries, (keys[0], shared), v_BsGV, sees_BTs, y_BTHV)


def _backward(layout, kept, dy_BTHV):
    (q, k, v, rows), waits = layout

    def local(queries, keys, v_BsGV, sees_BTs, y_BTHV, dy_BTHV):
        dq, (dk, turned), dv = each_row(
            gradient, sees_BTs, queries, of_each_head(keys, waits), v_BsGV, y_BTHV, dy_BTHV)
        return dq, (dk, None if turned is None else summed(turned, (), waits)), dv

    sums = q, (k[0], P(*k[1].partitions, unreduced=waits)), v
    own = q, k, v, rows, q[0], q[0]
    return *shard_map_over_the_rest(local, own, sums)(*kept, dy_BTHV), None


_by_rows.defvjp(_forward, _backward)


def of_each_head(keys: tuple, waits: frozenset):
    """Keys whose turned part varies over the axes that split the heads, as its gradient does."""
    k_BsGK, k_BsP = keys
    return k_BsGK, jax.lax.pcast(k_BsP, tuple(waits), to="varying") if waits else k_BsP
