"""The ViT of blocks whose activations are made twice: for less memory, 4/3 of the work.

Activations wait from the forward to the backward pass. A checkpoint keeps only what came into a
block and computes the rest again.

Source: Chen et al. 2016, "Training deep nets with sublinear memory cost".
"""
from __future__ import annotations

import jax
from jaxtyping import Array, Float

from meshbook.models.vit import Block, ViT


class CheckpointedBlock(Block):
    """A block that keeps only its input, (B, T, D), for the backward pass."""

    def __call__(
        self, x_BTD: Float[Array, "B T D"], key: jax.Array | None = None
    ):
        return jax.checkpoint(super().__call__)(x_BTD, key)


class CheckpointedViT(ViT):
    """The same ViT, parameter for parameter, of blocks that keep only their input."""

    block = CheckpointedBlock
