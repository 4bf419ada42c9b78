"""Attention whose scores are those of one row at a time, made again for the gradient.

The scores of a batch are its largest arrays, B·H·T·T numbers of float32, and a step spends more
time on moving them than on its products. Those of one row fit into the memory beside a TPU's core.
The rows of a device are taken one after the other, and the backward pass makes the scores again, so
no array ever has those of all rows.

Sources: Rabe and Staats 2021, "Self-attention does not need O(n^2) memory"; Dao et al. 2022,
"FlashAttention" (what is kept in fast memory).
"""
from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from meshbook.models.text_models import MASKED
from meshbook.sharding import Sharding, shard_map_over_the_rest


def attend_by_rows(sharding: Sharding, q_BTHK: Float[Array, "B T H K"],
                   k_BsGK: Float[Array, "B s G K"], v_BsGV: Float[Array, "B s G V"],
                   sees_BTs: Bool[Array, "#B T s"]):
    """What queries find in keys and values of their groups: (B, T, H, V), softmax in float32.

    H is a multiple of G; sees_BTs: which tokens s a token looks at. Not for second derivatives.
    """
    q, k = sharding.activation("BTHK"), sharding.activation("BTGK")
    rows = sharding.activation("B") if len(sees_BTs) > 1 else P()
    return _by_rows((q, k, k, rows), q_BTHK, k_BsGK, v_BsGV, jax.reshard(sees_BTs, rows))


def one_row(sees_Ts: Bool[Array, "T s"], q_THK: Float[Array, "T H K"],
            k_sGK: Float[Array, "s G K"], v_sGV: Float[Array, "s G V"]):
    """The same of one row: (T, H, V)."""
    (T, H, K), G = q_THK.shape, k_sGK.shape[1]
    N = H // G  # heads of a group stand one below the other, as if they were more tokens
    q_tGK = q_THK.reshape(T, G, N, K).transpose(2, 0, 1, 3).reshape(N * T, G, K)
    scores = jnp.einsum("tGK,sGK->Gts", q_tGK, k_sGK, preferred_element_type=jnp.float32)
    seen = jnp.where(jnp.tile(sees_Ts, (N, 1)), scores * K ** -0.5, MASKED)
    y_tGV = jnp.einsum("Gts,sGV->tGV", jax.nn.softmax(seen).astype(v_sGV.dtype), v_sGV)
    return y_tGV.reshape(N, T, G, -1).transpose(1, 2, 0, 3).reshape(T, H, -1)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_rows(specs: tuple, *arrays: Any):
    return shard_map_over_the_rest(each_row, specs, specs[0])(*arrays)


def _forward(specs, *arrays):
    return _by_rows(specs, *arrays), arrays


def _backward(specs, arrays, dy):
    def local(*arrays):
        *operands, sees, dy = arrays
        return jax.vjp(lambda *operands: each_row(*operands, sees), *operands)[1](dy)

    own = (*specs, specs[0])
    return *shard_map_over_the_rest(local, own, specs[:3])(*arrays, dy), None


_by_rows.defvjp(_forward, _backward)


def each_row(q_BTHK: Any, k_BsGK: Any, v_BsGV: Any, sees_BTs: Any):
    """`one_row` of each row that a device has, one after the other; its scores are not kept."""
    row = jax.checkpoint(one_row)
    if len(sees_BTs) == 1:
        return jax.lax.map(lambda each: row(sees_BTs[0], *each), (q_BTHK, k_BsGK, v_BsGV))
    return jax.lax.map(lambda each: row(*each), (sees_BTs, q_BTHK, k_BsGK, v_BsGV))
