"""Which tokens of a row each device has, in what order, and which blocks of them meet.

With causal attention the tokens at the end of a row look at all others, and those at the beginning
at few. Where a row is cut into n pieces, the last device has nearly twice the mean's work. Zigzag
cuts it into 2n chunks and gives device i chunks i and 2n - 1 - i: all have the same.

Sources: Brandon et al. 2023, "Striped Attention" (the imbalance); Zhu 2024, ring-flash-attention,
and Llama Team 2024 (two chunks for each device).
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

PADDING = {"weight": 0, "segments": -1}  # what filling is; elsewhere it is 0


def zigzag_order(tokens: int, ways: int):
    """The places (T,) from which a row's tokens are taken, so that each of n devices has a part.

    Raises ValueError where tokens are not divisible by 2·ways.
    """
    if ways < 1 or tokens % (2 * ways):
        raise ValueError(f"zigzag cuts a row into two chunks for each of {ways} devices: expected "
                         f"a multiple of {2 * ways} tokens, found {tokens}")
    chunks = np.arange(tokens).reshape(2 * ways, -1)
    both = [(at, 2 * ways - 1 - at) for at in range(ways)]
    return chunks[np.array(both).ravel()].ravel()


def zigzag(batch: Mapping[str, Array | np.ndarray], ways: int):
    """A batch of arrays (B, T) in zigzag order, labels, segments and weight like inputs.

    It has positions, those that the tokens had. Raises ValueError where T is not divisible by
    2·ways.
    """
    B, T = batch["inputs"].shape
    order, numbers = zigzag_order(T, ways), np.arange(T, dtype=np.int32)
    batch = {"positions": np.broadcast_to(numbers, (B, T))} | dict(batch)
    return {name: x[:, order] for name, x in batch.items()}


def filled_up(batch: Mapping[str, np.ndarray], multiple: int):
    """A batch of NumPy arrays (B, T), filled up with tokens that do not count.

    T becomes a multiple of this number, and filling has weight 0.
    """
    B, T = batch["inputs"].shape
    more = -T % multiple
    batch = {"weight": np.ones((B, T), np.float32)} | dict(batch)
    return {name: np.pad(x, [(0, 0), (0, more)], constant_values=PADDING.get(name, 0))
            for name, x in batch.items()}


@dataclass(frozen=True)
class Tokens:
    """The tokens of each of n devices, and how they are cut into blocks.

    ways: n; each: tokens t of a device; zigzagged: whether they are two chunks of a row, or one
    piece; block: tokens of a block, at most. A chunk is cut into equal blocks, the last one filled
    up. Raises ValueError for a block of less than 1, and for an odd number of zigzagged tokens.
    """

    ways: int
    each: int
    zigzagged: bool
    block: int

    def __post_init__(self):
        if self.block < 1:
            raise ValueError(f"a block has at least one token; found block={self.block}")
        if self.each % self.chunks:
            raise ValueError("zigzag gives each device two chunks of a row: expected an even "
                             f"number of tokens on each device, found {self.each}")

    @property
    def chunks(self):
        """How many chunks of a row a device has."""
        return 2 if self.zigzagged else 1

    @property
    def chunk(self):
        """Tokens of a chunk."""
        return self.each // self.chunks

    @property
    def in_chunk(self):
        """Blocks of a chunk."""
        return -(-self.chunk // self.block)

    @property
    def size(self):
        """Tokens of a block."""
        return -(-self.chunk // self.in_chunk)

    def cut(self, x: Shaped[Array, "B t ..."]):
        """Tokens of a device, or of several, as blocks: (m, B, b, ...)."""
        x = x.reshape(len(x), -1, self.chunk, *x.shape[2:])
        more = self.in_chunk * self.size - self.chunk
        x = jnp.pad(x, [(0, 0), (0, 0), (0, more)] + [(0, 0)] * (x.ndim - 3))
        return jnp.moveaxis(x.reshape(len(x), -1, self.size, *x.shape[3:]), 1, 0)

    def joined(self, x: Shaped[Array, "m B b ..."]):
        """Blocks of a device, or of several, as tokens: (B, t, ...)."""
        x = jnp.moveaxis(x, 0, 1)
        x = x.reshape(len(x), -1, self.in_chunk * self.size, *x.shape[3:])[:, :, :self.chunk]
        return x.reshape(len(x), -1, *x.shape[3:])

    def places(self, whose: Any):
        """Where in a row the tokens of device `whose` stand, in blocks: (m, b).

        Filling stands behind all others.
        """
        first = [whose, 2 * self.ways - 1 - whose][:self.chunks]
        at = jnp.arange(self.in_chunk * self.size)
        at = [jnp.where(at < self.chunk, chunk * self.chunk + at, self.ways * self.each)
              for chunk in first]
        return jnp.concatenate(at).reshape(-1, self.size)

    def documents(self, segments_BT: Int[Array, "B T"] | None, whose: Any):
        """The documents of device `whose`, of those of all tokens, in blocks: (m, B, b)."""
        if segments_BT is None:
            return None
        return self.cut(jax.lax.dynamic_slice_in_dim(segments_BT, whose * self.each, self.each, 1))

    def own_pairs(self):
        """The pairs of a device's own blocks that meet: their order is that of the row."""
        m = self.chunks * self.in_chunk
        return jnp.array([(i, j) for i in range(m) for j in range(i + 1)])

    def pairs(self, me: Any, whose: Any):
        """The pairs of this device's blocks of queries and another's blocks of keys.

        As many on all devices. In one piece each meets all. Of two zigzagged chunks the second one
        sees the other device's first; besides, either both firsts meet, or both seconds.
        """
        r = self.in_chunk
        square = jnp.array([(i, j) for i in range(r) for j in range(r)])
        if not self.zigzagged:
            return square
        both = jnp.where(whose < me, 0, r)
        return jnp.concatenate([square + jnp.array([r, 0]), square + both])
