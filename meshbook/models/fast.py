"""The same models and the same step, faster: parameter for parameter those of the book.

Attention by a kernel that keeps its scores in the processor (cuDNN on NVIDIA GPUs); of the ViT's
last block only the class token, which is all that the head reads; several steps in one call. A
state of the book's own models fits these, and gives the same logits and gradients with dropout off;
with it on, the last block draws other numbers.

Source: Dao et al. 2022, "FlashAttention".
"""
from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from meshbook.models.layers import Attention
from meshbook.models.minigpt import CausalAttention, MiniGPT, MiniGPTConfig
from meshbook.models.vit import Block, ViT, ViTConfig
from meshbook.sharding import Sharding
from meshbook.training import TrainState, train_step


def attend(kernel: str | None, q_BTHK: Float[Array, "B T H K"], k_BTHK: Float[Array, "B T H K"],
           v_BTHK: Float[Array, "B T H K"], is_causal: bool = False):
    """Attention (B, T, H, K) by this kernel; an odd T goes in as the even one above it.

    JAX gives cuDNN's gradient even lengths only; the row more is masked, and taken off again.
    """
    (B, T), more = q_BTHK.shape[:2], q_BTHK.shape[1] % 2 if kernel else 0
    even = lambda x: jnp.pad(x, [(0, 0), (0, more), (0, 0), (0, 0)])
    length = {"query_seq_lengths": jnp.full(B, T), "key_value_seq_lengths": jnp.full(B, T)}
    y_BTHK = jax.nn.dot_product_attention(
        *map(even, (q_BTHK, k_BTHK, v_BTHK)), is_causal=is_causal, implementation=kernel,
        **(length if more else {}))
    return y_BTHK[:, :T]


class KernelAttention(Attention):
    """Attention by the kernel of this name, as jax.nn.dot_product_attention knows it."""

    def __call__(self, x_BTD: Float[Array, "B T D"]):
        return self.join(attend(self.kernel, *self.heads(x_BTD)))


class ClassAttention(Attention):
    """The first token looks at all others: (B, T, D) to (B, 1, D)."""

    def __call__(self, x_BTD: Float[Array, "B T D"]):
        q_B1HK = self.some(x_BTD[:, :1], slice(0, 1))[:, :, 0]
        kv_BTSHK = self.some(x_BTD, slice(1, 3))
        return self.join(jax.nn.dot_product_attention(
            q_B1HK, kv_BTSHK[:, :, 0], kv_BTSHK[:, :, 1]))

    def some(self, x_BTD: Float[Array, "B T D"], part: slice):
        """Some of the three of query, key and value: (B, T, S, H, K)."""
        w_DSHK, b_SHK = self.w_qkv_DSHK[...][:, part], self.b_qkv_SHK[...][part]
        s, dtype = self.sharding, x_BTD.dtype
        y_BTSHK = jnp.einsum("BTD,DSHK->BTSHK", x_BTD, s.weight("DSHK", w_DSHK, dtype),
                             out_sharding=s.activation("BTSHK"))
        return y_BTSHK + s.gather("SHK", b_SHK, dtype)


class LastBlock(Block):
    """An encoder block from which only the class token comes out: (B, T, D) to (B, 1, D)."""

    def __call__(self, x_BTD: Float[Array, "B T D"], key: jax.Array | None = None):
        with jax.named_scope("attention"):
            x_B1D = x_BTD[:, :1] + self.attention(self.norm1(x_BTD))
        with jax.named_scope("mlp"):
            return x_B1D + self.mlp(self.norm2(x_B1D), key)


class KernelCausalAttention(CausalAttention):
    """Causal attention by a kernel; rows of several documents go the plain way."""

    def __call__(self, x_BTD: Float[Array, "B T D"],
                 segments_BT: Int[Array | np.ndarray, "B T"] | None = None):
        if segments_BT is not None:
            return super().__call__(x_BTD, segments_BT)
        return self.join(attend(self.kernel, *self.heads(x_BTD), is_causal=True))


class FastViT(ViT):
    """The same ViT, parameter for parameter. kernel: "cudnn" or "xla"; None is JAX's choice.

    cuDNN takes bfloat16 and float16, on NVIDIA GPUs, heads of a multiple of 8 numbers.
    """

    def __init__(self, config: ViTConfig, sharding: Sharding, *, rngs: nnx.Rngs,
                 kernel: str | None = None):
        super().__init__(config, sharding, rngs=rngs)
        for block in self.blocks:
            become(block.attention, KernelAttention, kernel=kernel)
        last = self.blocks[-1]
        become(last, LastBlock)
        become(last.attention, ClassAttention)


class FastMiniGPT(MiniGPT):
    """The same MiniGPT, parameter for parameter. kernel: as for FastViT."""

    def __init__(self, config: MiniGPTConfig, sharding: Sharding, *, rngs: nnx.Rngs,
                 kernel: str | None = None):
        super().__init__(config, sharding, rngs=rngs)
        for block in self.blocks:
            become(block.attention, KernelCausalAttention, kernel=kernel)


def become(module: nnx.Module, kind: type[nnx.Module], **settings: Any):
    """Let a module compute as this subclass does, which has the same parameters."""
    object.__setattr__(module, "__class__", kind)
    for name, value in settings.items():
        setattr(module, name, value)


def class_token_saving(config: ViTConfig, images: int) -> int:
    """FLOPs of a training step that LastBlock leaves out: all but the keys and values of T - 1.

    Queries and sums of the other tokens, 4·D², their scores, 4·T·D, and their MLP, 4·D·F.
    """
    T, D, F = config.tokens, config.embed, config.hidden
    return 3 * images * (T - 1) * (4 * D * D + 4 * T * D + 4 * D * F)


@partial(jax.jit, donate_argnums=0)
def train_steps(state: TrainState, batches: Mapping[str, Array | np.ndarray], key: jax.Array):
    """Several steps in one call: (state, metrics of each). batches: stacked, (steps, B, ...).

    The host sends off one program instead of many; the steps are those of train_step.
    """
    return jax.lax.scan(lambda state, batch: train_step(state, batch, key), state, batches)
