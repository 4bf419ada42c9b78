"""The layers that both models are made of: parameters, norm, attention, MLP, dropout.

A layer is given a config with its sizes (embed, hidden, heads, head_size, dropout,
param_dtype) and a `Sharding`, which says where its tensors live.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers as init
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from meshbook.sharding import Sharding, check_split, reduced


class Sizes:
    """What the configs of both models check, and what follows from their sizes."""

    def __post_init__(self):
        for name in ("embed", "hidden", "heads", "layers"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} is a number from 1; found {getattr(self, name)}"
                )
        if self.embed % self.heads:
            raise ValueError(
                f"embed D={self.embed} does not divide into {self.heads} heads"
            )
        if self.dropout and not 0 < round(256 * self.dropout) < 256:
            raise ValueError(
                "dropout is a share in [0, 1), rounded to a 256th, and not to "
                f"0; found {self.dropout}"
            )

    @property
    def head_size(self):
        """K, so that H·K = D."""
        return self.embed // self.heads


def parameter(
    letters: str, shape: Sequence[int], initializer: Callable, rngs: nnx.Rngs,
    config: Any, sharding: Sharding,
):
    """One parameter, created where the rules say that it lives."""
    spec = sharding.parameter(letters)
    check_split(letters, shape, spec)
    value = initializer(
        rngs.params(), shape, config.param_dtype, out_sharding=spec
    )
    return nnx.Param(value, out_sharding=spec, **sharding.lives(letters))


def dropout(
    x: Float[Array, "... T D"], rate: int | float, key: jax.Array | None
):
    """x with a share of its numbers 0 and the rest scaled up; no key: x.

    The share is the rate rounded to a 256th: 26/256, not 0.1.
    """
    if key is None or rate == 0:
        return x
    least = round(256 * rate)
    keep = kept(key, x, least)
    return jnp.where(keep, x * (256 / (256 - least)), 0).astype(x.dtype)


def kept(key: jax.Array, x: Float[Array, "... T D"], least: int):
    """Where a random byte is `least` or more: bool, laid out as x, equal on every mesh.

    Four rows share a random word: the first quarter of the T rows has its
    lowest byte, the last its highest. Where a mesh splits the tokens, every device along that axis
    draws those of all; `meshbook.models.decoder_dropout` does not.
    """
    *rows, T, D = x.shape
    split = jax.typeof(x).sharding
    *first, tokens, last = split.spec.partitions
    whole = split.update(spec=P(*first, None, last))
    words = jax.random.bits(
        key, (*rows, -(-T // 4), D), jnp.uint32, out_sharding=whole
    )
    words = jax.lax.optimization_barrier(words)  # or each byte draws them again
    keep = [(words >> shift) % 256 >= least for shift in (0, 8, 16, 24)]
    keep = jnp.concatenate(keep, -2)
    keep = jax.lax.optimization_barrier(keep)[..., :T, :]  # or drawn twice
    return keep if tokens is None else jax.reshard(keep, split)


def keys_for(key: jax.Array | None, places: int):
    """A key for each of so many places; of no key none. All are made at once: on a TPU
    each key that is made alone takes a hundred scalar operations, one after the other.
    """
    if key is None:
        return [None] * places
    fold_in = jax.vmap(jax.random.fold_in, (None, 0))
    return fold_in(key, jnp.arange(places))


class Norm(nnx.Module):
    """Layer normalisation over D, computed in float32."""

    def __init__(self, config: Sizes, sharding: Sharding, *, rngs: nnx.Rngs):
        shape = (config.embed,)
        make = lambda f: parameter("D", shape, f, rngs, config, sharding)
        self.scale_D, self.bias_D = make(init.ones), make(init.zeros)
        self.sharding = sharding

    def __call__(self, x_BTD: Float[Array, "... D"]):
        x = x_BTD.astype(jnp.float32)
        mean = x.mean(-1, keepdims=True)
        square = jnp.square(x).mean(-1, keepdims=True)
        var = jnp.maximum(square - jnp.square(mean), 0)  # x is read once
        scale_D = self.sharding.gather("D", self.scale_D[...], x.dtype)
        bias_D = self.sharding.gather("D", self.bias_D[...], x.dtype)
        y = (x - mean) * jax.lax.rsqrt(var + 1e-6) * scale_D + bias_D
        return y.astype(x_BTD.dtype)


class Attention(nnx.Module):
    """Every token looks at every other, in H heads: (B, T, D) to (B, T, D)."""

    def __init__(self, config: Sizes, sharding: Sharding, *, rngs: nnx.Rngs):
        D, H, K = config.embed, config.heads, config.head_size
        fan = dict(scale=1.0, mode="fan_avg", distribution="uniform")
        qkv = init.variance_scaling(
            **fan, in_axis=0, out_axis=(2, 3), batch_axis=1
        )
        out = init.variance_scaling(**fan, in_axis=(0, 1), out_axis=2)
        make = lambda *what: parameter(*what, rngs, config, sharding)
        self.w_qkv_DSHK = make("DSHK", (D, 3, H, K), qkv)
        self.b_qkv_SHK = make("SHK", (3, H, K), init.zeros)
        self.w_out_HKD = make("HKD", (H, K, D), out)
        self.b_out_D = make("D", (D,), init.zeros)
        self.sharding = sharding

    def heads(self, x_BTD: Float[Array, "B T D"]):
        """Queries, keys and values of every token: (B, T, H, K) each."""
        s, dtype = self.sharding, x_BTD.dtype
        w_DSHK = s.weight("DSHK", self.w_qkv_DSHK[...], dtype)
        b_SHK = s.gather("SHK", self.b_qkv_SHK[...], dtype)
        x_BTD = reduced(x_BTD, s.activations["H"])  # one gradient of three
        times = partial(jnp.einsum, "BTD,DHK->BTHK", x_BTD,
                        out_sharding=s.activation("BTHK"))
        return [times(w_DSHK[:, part]) + b_SHK[part] for part in range(3)]

    def join(self, y_BTHK: Float[Array, "B T H K"]):
        """What the heads found, brought together: (B, T, H, K) to (B, T, D)."""
        s, dtype = self.sharding, y_BTHK.dtype
        w_HKD = s.weight("HKD", self.w_out_HKD[...], dtype)
        y_BTHK = jax.reshard(y_BTHK, s.activation("BTHK"))  # of one row JAX forgets it
        y_BTD = jnp.einsum("BTHK,HKD->BTD", y_BTHK, w_HKD,
                           out_sharding=s.activation("BTD"))
        return y_BTD + s.gather("D", self.b_out_D[...], dtype)

    def __call__(self, x_BTD: Float[Array, "B T D"]):
        q_BTHK, k_BTHK, v_BTHK = self.heads(x_BTD)
        y_BTHK = jax.nn.dot_product_attention(q_BTHK, k_BTHK, v_BTHK)
        return self.join(y_BTHK)


class MLP(nnx.Module):
    """Two products with a gelu between: (B, T, D) to (B, T, F) to (B, T, D)."""

    def __init__(self, config: Sizes, sharding: Sharding, *, rngs: nnx.Rngs):
        D, F, xavier = config.embed, config.hidden, init.xavier_uniform()
        make = lambda *what: parameter(*what, rngs, config, sharding)
        self.w_in_DF = make("DF", (D, F), xavier)
        self.b_in_F = make("F", (F,), init.zeros)
        self.w_out_FD = make("FD", (F, D), xavier)
        self.b_out_D = make("D", (D,), init.zeros)
        self.sharding, self.rate = sharding, config.dropout

    def widen(self, x_BTD: Float[Array, "B T D"]):
        """The hidden units before their activation function: (B, T, F)."""
        s, dtype = self.sharding, x_BTD.dtype
        w_DF = s.weight("DF", self.w_in_DF[...], dtype)
        h_BTF = jnp.einsum("BTD,DF->BTF", x_BTD, w_DF,
                           out_sharding=s.activation("BTF"))
        return h_BTF + s.gather("F", self.b_in_F[...], dtype)

    def narrow(self, h_BTF: Float[Array, "B T F"]):
        """What hidden units add up to: (B, T, D)."""
        s, dtype = self.sharding, h_BTF.dtype
        w_FD = s.weight("FD", self.w_out_FD[...], dtype)
        y_BTD = jnp.einsum("BTF,FD->BTD", h_BTF, w_FD,
                           out_sharding=s.activation("BTD"))
        return y_BTD + s.gather("D", self.b_out_D[...], dtype)

    def __call__(
        self, x_BTD: Float[Array, "B T D"], key: jax.Array | None = None
    ):
        first, second = keys_for(key, 2)
        h_BTF = dropout(jax.nn.gelu(self.widen(x_BTD)), self.rate, first)
        return dropout(self.narrow(h_BTF), self.rate, second)
