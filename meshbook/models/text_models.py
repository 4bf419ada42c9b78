"""What language models share: a vocabulary that is padded, and the look-up of embeddings."""
from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from meshbook.models.layers import Sizes
from meshbook.parallel.sequence import split_tokens
from meshbook.sharding import Sharding, axes_of, shard_map_over_the_rest, summed

MASKED = -1e30  # swallows what is added to it; its exp is 0, and never NaN
LANES = 128  # the vocabulary is padded to a multiple of a TPU's width
Ids, Hidden = Int[Array | np.ndarray, "B T"], Float[Array, "B T D"]


class TextSizes(Sizes):
    """What the configs of language models check, and what follows from their sizes.

    vocabulary: tokens that exist; tokens T: of the window.
    """

    def __post_init__(self):
        for name in ("vocabulary", "tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is a number from 1; found {getattr(self, name)}")
        super().__post_init__()

    @property
    def padded(self):
        """V: the vocabulary, filled up to a multiple of 128."""
        return -(-self.vocabulary // LANES) * LANES


def look_up(letters: str, table: Float[Array, "N D"], ids_BT: Ids, count: int,
            dtype: jax.typing.DTypeLike, sharding: Sharding):
    """Rows of a parameter table, such as VD, by number: (B, T) to (B, T, D).

    Where the table's rows are split over a mesh axis, each device looks up
    what it has, and a sum of B·T·D numbers puts them together, scattered where
    the rules split the tokens; the table does not move. Numbers outside
    [0, count) give NaN, so that a loss shows them at once.
    """
    ids_BT = jax.reshard(ids_BT, beside_table(sharding, letters))
    w_VD = sharding.used(letters, table, dtype)
    waits = tuple(jax.typeof(w_VD).sharding.spec.reduced)
    x_BTD = rows_of((sharding, letters, len(table), waits), w_VD, ids_BT)
    known_BT = jax.reshard((ids_BT >= 0) & (ids_BT < count), sharding.activation("BT"))
    return jnp.where(known_BT[..., None], x_BTD, jnp.nan)


def beside_table(sharding: Sharding, letters: str):
    """Where numbers (B, T) lie: an axis that splits the table leaves their tokens whole."""
    return jax.P(*sharding.activation("BT" + letters[0])[:2])


def scattered(sharding: Sharding, table: jax.P):
    """Whether the rules split the tokens of (B, T, D) over the axis that splits the table."""
    return bool(table) and table[0] in split_tokens(sharding.activation("BTD"))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def rows_of(where: tuple, w_VD: Float[Array, "V D"], ids_BT: Ids):
    """Rows of a table by number.

    where: (sharding, letters and length of the table, axes over which its gradient waits).

    Its gradient is written out, because JAX cannot differentiate a shard_map inside
    another one, where pipelines have it.
    """
    sharding, letters, *_ = where
    table = sharding.activation(letters)
    scatters = scattered(sharding, table)

    def local(w_vD, ids_bT):
        at, mine = places(table, len(w_vD), ids_bT)
        x_bTD = w_vD.at[at].get(mode="clip", wrap_negative_indices=False)
        if not table:
            return x_bTD
        x_bTD = jnp.where(mine[..., None], x_bTD, 0)
        if scatters:
            return jax.lax.psum_scatter(x_bTD, table[0], scatter_dimension=1, tiled=True)
        return jax.lax.psum(x_bTD, table[0])

    specs = table, beside_table(sharding, letters)
    return shard_map_over_the_rest(local, specs, sharding.activation("BTD"))(
        jax.reshard(w_VD, table), ids_BT
    )


def places(table: jax.P, length: int, ids_bT: Int[Array, "b T"]):
    """Where in this device's part of a table a number is, and whether it is there."""
    first = jax.lax.axis_index(table[0]) * length if table else 0
    at = ids_bT - first
    return at, (at >= 0) & (at < length)


def rows_forward(where: tuple, w_VD: Float[Array, "V D"], ids_BT: Ids):
    return rows_of(where, w_VD, ids_BT), ids_BT


def rows_backward(where: tuple, ids_BT: Ids, dx_BTD: Hidden):
    """Each row's gradient: the sum over all places that looked it up."""
    sharding, letters, length, waits = where
    table, BT = sharding.activation(letters), beside_table(sharding, letters)
    split = tuple(jax.tree.leaves((tuple(table), tuple(BT))))
    scatters = scattered(sharding, table)

    def local(ids_bT, dx_bTD):
        zero_vD = jnp.zeros((length // parts, dx_bTD.shape[-1]))  # bfloat16 sums would stall
        zero_vD = jax.lax.pcast(zero_vD, split, to="varying")
        at, mine = places(table, len(zero_vD), ids_bT)
        if scatters:
            dx_bTD = jax.lax.all_gather(dx_bTD, table[0], axis=1, tiled=True)
        dx_bTD = jnp.where(mine[..., None], dx_bTD, 0)
        dw_vD = zero_vD.at[at].add(dx_bTD.astype(jnp.float32), mode="drop").astype(dx_bTD.dtype)
        return summed(dw_vD, tuple(jax.tree.leaves(tuple(BT))), waits)

    mesh = jax.sharding.get_abstract_mesh()
    parts = math.prod(mesh.shape[axis] for axis in axes_of(table[0] if table else None))
    specs = BT, sharding.activation("BTD")
    found = P(*table, unreduced=set(waits))
    return shard_map_over_the_rest(local, specs, found)(ids_BT, dx_BTD), None


rows_of.defvjp(rows_forward, rows_backward)
