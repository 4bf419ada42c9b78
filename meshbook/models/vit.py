"""The vision transformer: images (B, 32, 32, 3) to logits (B, C).

Source: Dosovitskiy et al. 2021, "An image is worth 16x16 words". One class,
whatever the layout: the `Sharding` that it is given says where tensors live.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.nn import initializers as init
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Num

from meshbook.models.layers import (
    MLP, Attention, Norm, Sizes, keys_for, parameter
)
from meshbook.sharding import Sharding


@dataclass(frozen=True)
class ViTConfig(Sizes):
    """Sizes of a ViT; the defaults are those of the source's notebook.

    image, patch: pixels along one side; embed D, hidden F, heads H, layers L;
    dropout: share of hidden units dropped in training; dtype: of activations
    and products; param_dtype: of parameters. Raises ValueError where sizes do
    not fit.
    """

    image: int = 32
    patch: int = 4
    classes: int = 10
    embed: int = 384
    hidden: int = 1536
    heads: int = 8
    layers: int = 6
    dropout: float = 0.1
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    def __post_init__(self):
        if self.image % self.patch:
            raise ValueError(
                f"an image of {self.image} pixels is not cut evenly by "
                f"patches of {self.patch}"
            )
        super().__post_init__()

    @property
    def tokens(self):
        """T: one token a patch, and the class token."""
        return (self.image // self.patch) ** 2 + 1


def position_init(
    key: jax.Array, shape: Sequence[int], dtype: DTypeLike,
    out_sharding: P | None = None,
):
    """Uniform from -1 to 1: large enough to be noticed beside the patches.

    Uniform numbers are bit-equal on every mesh; normal ones are not.
    """
    where = {"out_sharding": out_sharding}
    return jax.random.uniform(key, shape, dtype, -1, 1, **where)


def patches(
    images_BHWC: Num[Array | np.ndarray, "B H W C"], config: ViTConfig,
    sharding: Sharding,
):
    """Images cut into patches, a row of numbers each: (B, T-1, X).

    Raises ValueError for images of another shape than config says.
    """
    side, shape = config.image, images_BHWC.shape
    if shape[1:] != (side, side, 3):
        raise ValueError(
            f"expected images (B, {side}, {side}, 3), found {shape}"
        )
    B, n, p = shape[0], side // config.patch, config.patch
    rows = sharding.activation("BTX")
    x = jax.reshard(images_BHWC, rows)
    x = jax.lax.reshape(x, (B, n, p, n, p, 3), out_sharding=rows)
    x = x.transpose(0, 1, 3, 2, 4, 5)
    return jax.lax.reshape(x, (B, n * n, p * p * 3), out_sharding=rows)


def whitening(patches_BTX: Float[Array | np.ndarray, "B T X"], most: int):
    """Weights (X, C) that whiten such patches: C is X, or `most` if that is less.

    They are the patches' C largest principal components, each divided by its
    standard deviation, so that the results are uncorrelated, of variance 1.
    patches_BTX: those of a few thousand images. Source: Coates, Ng and Lee 2011.
    """
    x_NX = np.reshape(patches_BTX, (-1, patches_BTX.shape[-1]))
    variances_X, axes_XX = np.linalg.eigh(np.cov(x_NX, rowvar=False))
    scaled_XX = axes_XX / np.sqrt(variances_X + 0.01)  # noise stays small
    return scaled_XX[:, ::-1][:, :most].astype(np.float32)


class Block(nnx.Module):
    """One encoder block: attention, then MLP, each added to what came in."""

    def __init__(
        self, config: ViTConfig, sharding: Sharding, *, rngs: nnx.Rngs
    ):
        self.norm1 = Norm(config, sharding, rngs=rngs)
        self.attention = Attention(config, sharding, rngs=rngs)
        self.norm2 = Norm(config, sharding, rngs=rngs)
        self.mlp = MLP(config, sharding, rngs=rngs)

    def __call__(
        self, x_BTD: Float[Array, "B T D"], key: jax.Array | None = None
    ):
        with jax.named_scope("attention"):
            x_BTD = x_BTD + self.attention(self.norm1(x_BTD))
        with jax.named_scope("mlp"):
            return x_BTD + self.mlp(self.norm2(x_BTD), key)


class PatchEmbedding(nnx.Module):
    """Images as tokens: patches, a class token before them, positions added."""

    def __init__(
        self, config: ViTConfig, sharding: Sharding, *, rngs: nnx.Rngs
    ):
        X, T, D = config.patch**2 * 3, config.tokens, config.embed
        make = lambda *what: parameter(*what, rngs, config, sharding)
        self.w_patch_XD = make("XD", (X, D), init.xavier_uniform())
        self.b_patch_D = make("D", (D,), init.zeros)
        self.class_D = make("D", (D,), init.zeros)
        self.position_TD = make("TD", (T, D), position_init)
        self.config, self.sharding = config, sharding

    def embed(self, images_BHWC: Num[Array | np.ndarray, "B H W C"]):
        """The tokens of each image: (B, T, D)."""
        c, s = self.config, self.sharding
        split_BTD = s.activation("BTD")
        x_BTX = patches(images_BHWC.astype(c.dtype), c, s)
        w_XD = s.weight("XD", self.w_patch_XD[...], c.dtype)
        x_BTD = jnp.einsum("BTX,XD->BTD", x_BTX, w_XD, out_sharding=split_BTD)
        x_BTD = x_BTD + s.gather("D", self.b_patch_D[...], c.dtype)
        class_D = s.gather("D", self.class_D[...], c.dtype)
        position_TD = s.gather("TD", self.position_TD[...], c.dtype)
        first_D = class_D + position_TD[0]  # the same for every image
        first_B1D = jnp.broadcast_to(
            first_D, (len(x_BTD), 1, c.embed), out_sharding=split_BTD)
        return jnp.concatenate([first_B1D, x_BTD + position_TD[1:]], axis=1)


class ViT(PatchEmbedding):
    """A vision transformer: images (B, 32, 32, 3) to logits (B, C).

    With a key it is in training and drops hidden units; without, in evaluation.
    Raises ValueError where the current mesh cannot divide heads, hidden or
    embed sizes as the sharding asks, and for images of another shape.
    """

    block = Block

    def __init__(
        self, config: ViTConfig, sharding: Sharding, *, rngs: nnx.Rngs
    ):
        super().__init__(config, sharding, rngs=rngs)
        D, C = config.embed, config.classes
        make = lambda *what: parameter(*what, rngs, config, sharding)
        self.blocks = nnx.List(
            self.block(config, sharding, rngs=rngs)
            for _ in range(config.layers)
        )
        self.norm = Norm(config, sharding, rngs=rngs)
        self.w_head_DC = make("DC", (D, C), init.xavier_uniform())
        self.b_head_C = make("C", (C,), init.zeros)

    def read(self, x_BTD: Float[Array, "B T D"]):
        """What the head reads of the tokens, the class token: (B, D)."""
        return x_BTD[:, 0]

    def __call__(
        self, images_BHWC: Num[Array | np.ndarray, "B H W C"],
        key: jax.Array | None = None,
    ):
        c, s = self.config, self.sharding
        with jax.named_scope("embed"):
            x_BTD = self.embed(images_BHWC)
        keys = keys_for(key, len(self.blocks))
        for i, block in enumerate(self.blocks):
            with jax.named_scope(f"block_{i}"):
                x_BTD = block(x_BTD, keys[i])
        with jax.named_scope("head"):
            x_BD = self.norm(self.read(x_BTD))
            w_DC = s.weight("DC", self.w_head_DC[...], c.dtype)
            logits_BC = jnp.einsum("BD,DC->BC", x_BD, w_DC,
                                   out_sharding=s.activation("BC"))
            return logits_BC + s.gather("C", self.b_head_C[...], c.dtype)


class MeanViT(ViT):
    """A ViT without a class token: its head reads the mean of the patches.

    The class token's parameters are there but unused, so that a state fits
    both models. Source: Beyer, Zhai and Kolesnikov 2022, "Better plain ViT
    baselines".
    """

    def embed(self, images_BHWC: Num[Array | np.ndarray, "B H W C"]):
        return super().embed(images_BHWC)[:, 1:]

    def read(self, x_BTD: Float[Array, "B T D"]):
        return x_BTD.mean(1)
