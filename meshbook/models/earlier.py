"""The ViT as this book first had it, parameter for parameter, and slower on a TPU.

Four changes came of the clock of its compiler (`meshbook.hlo.clock`); here each can be undone. With
dropout off, logits and gradients are those of the ViT; with it on, "mask" draws other numbers.
"""
from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from meshbook.models.fast import become
from meshbook.models.layers import MLP, Attention, Norm, keys_for
from meshbook.models.vit import ViT, ViTConfig
from meshbook.sharding import Sharding

CHANGES = "mask", "heads", "sums", "norm"


class EarlierMLP(MLP):
    """A random number of 32 bits for each hidden unit, drawn wherever the mask is used."""

    def __call__(self, x_BTD: Float[Array, "B T D"], key: jax.Array | None = None):
        first, second = keys_for(key, 2)
        h_BTF = earlier_dropout(jax.nn.gelu(self.widen(x_BTD)), self.rate, first)
        return earlier_dropout(self.narrow(h_BTF), self.rate, second)


def earlier_dropout(x: Float[Array, "..."], rate: int | float, key: jax.Array | None):
    """x with a share of its numbers 0 and the rest scaled up; no key: x."""
    if key is None or rate == 0:
        return x
    split = jax.typeof(x).sharding
    keep = jax.random.uniform(key, x.shape, out_sharding=split) >= rate
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)


class EarlierAttention(Attention):
    """Queries, keys and values by one product, (B, T, D) to (B, T, S, H, K), then cut apart."""

    def heads(self, x_BTD: Float[Array, "B T D"]):
        s, dtype = self.sharding, x_BTD.dtype
        w_DSHK = s.weight("DSHK", self.w_qkv_DSHK[...], dtype)
        qkv = jnp.einsum("BTD,DSHK->BTSHK", x_BTD, w_DSHK, out_sharding=s.activation("BTSHK"))
        qkv = qkv + s.gather("SHK", self.b_qkv_SHK[...], dtype)
        return qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]


class EarlierSharding(Sharding):
    """Each product sums the gradient of its weight over the devices itself."""

    weight = Sharding.gather


class EarlierNorm(Norm):
    """The variance from differences to the mean, for which x is read a second time."""

    def __call__(self, x_BTD: Float[Array, "... D"]):
        x = x_BTD.astype(jnp.float32)
        mean = x.mean(-1, keepdims=True)
        var = jnp.square(x - mean).mean(-1, keepdims=True)
        scale_D = self.sharding.gather("D", self.scale_D[...], x.dtype)
        bias_D = self.sharding.gather("D", self.bias_D[...], x.dtype)
        y = (x - mean) * jax.lax.rsqrt(var + 1e-6) * scale_D + bias_D
        return y.astype(x_BTD.dtype)


class EarlierViT(ViT):
    """The ViT without some of the four changes; undone: of CHANGES."""

    def __init__(self, config: ViTConfig, sharding: Sharding, *, rngs: nnx.Rngs,
                 undone: Sequence[str] = CHANGES):
        if unknown := set(undone) - set(CHANGES):
            raise ValueError(f"expected changes of {CHANGES}; found {sorted(unknown)}")
        if "sums" in undone:
            sharding = EarlierSharding(sharding.activations, sharding.parameters)
        super().__init__(config, sharding, rngs=rngs)
        for block in self.blocks:
            if "mask" in undone:
                become(block.mlp, EarlierMLP)
            if "heads" in undone:
                become(block.attention, EarlierAttention)
        for norm in [self.norm, *(each for block in self.blocks
                                  for each in (block.norm1, block.norm2))]:
            if "norm" in undone:
                become(norm, EarlierNorm)
