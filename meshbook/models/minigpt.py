"""MiniGPT: tokens (B, T) to logits (B, T, V), each position blind to what follows it.

The architecture is that of the JAX AI stack's miniGPT tutorial: positions are learned, a
norm stands behind each sum (post-norm, Vaswani et al. 2017), the MLP has a ReLU, dropout
follows the attention and the MLP. Its weights fit here and give the same logits.
"""
from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers as init
from jaxtyping import Array, Int

from meshbook.models.kv_cache import attend, positions_and_seen
from meshbook.models.layers import MLP, Attention, Norm, dropout, keys_for, parameter
from meshbook.models.text_models import MASKED, Hidden, Ids, TextSizes, look_up
from meshbook.sharding import Sharding


@dataclass(frozen=True)
class MiniGPTConfig(TextSizes):
    """Sizes of a MiniGPT; the defaults are what the source's code builds.

    vocabulary: tokens that exist; tokens T: of the window, the most that the
    model sees at once; embed D, hidden F, heads H, layers L; dropout: share of
    numbers dropped in training; dtype: of activations and products;
    param_dtype: of parameters. Raises ValueError where sizes do not fit.
    """

    vocabulary: int = 50_257
    tokens: int = 256
    embed: int = 256
    hidden: int = 256
    heads: int = 8
    layers: int = 4
    dropout: float = 0.1
    dtype: jax.typing.DTypeLike = jnp.float32
    param_dtype: jax.typing.DTypeLike = jnp.float32


class CausalAttention(Attention):
    """Every token looks at itself and those before it: (B, T, D) to (B, T, D).

    segments_BT: numbers; a token then looks only at tokens with its own number.
    """

    def __call__(self, x_BTD: Hidden, segments_BT: Ids | None = None):
        q_BTHK, k_BTHK, v_BTHK = self.heads(x_BTD)
        mask = None
        if segments_BT is not None:
            mask = segments_BT[:, None, :, None] == segments_BT[:, None, None]
        return self.join(jax.nn.dot_product_attention(
            q_BTHK, k_BTHK, v_BTHK, mask=mask, is_causal=True
        ))


class ReluMLP(MLP):
    """Two products with a ReLU between: (B, T, D) to (B, T, F) to (B, T, D)."""

    def __call__(self, x_BTD: Hidden):
        return self.narrow(jax.nn.relu(self.widen(x_BTD)))


class DecoderBlock(nnx.Module):
    """Attention, then MLP, each added to what came in and then normalised."""

    def __init__(self, config: MiniGPTConfig, sharding: Sharding, *, rngs: nnx.Rngs):
        self.attention = CausalAttention(config, sharding, rngs=rngs)
        self.norm1 = Norm(config, sharding, rngs=rngs)
        self.mlp = ReluMLP(config, sharding, rngs=rngs)
        self.norm2 = Norm(config, sharding, rngs=rngs)
        self.rate = config.dropout

    def __call__(self, x_BTD: Hidden, key: jax.Array | None = None, segments_BT: Ids | None = None):
        with jax.named_scope("attention"):
            y_BTD = self.attention(x_BTD, segments_BT)
        return self.add(x_BTD, y_BTD, key)

    def add(self, x_BTD: Hidden, y_BTD: Hidden, key: jax.Array | None = None):
        """What follows the attention: sum and norm, MLP, sum and norm."""
        first, second = keys_for(key, 2)
        x_BTD = self.norm1(x_BTD + dropout(y_BTD, self.rate, first))
        with jax.named_scope("mlp"):
            y_BTD = self.mlp(x_BTD)
        return self.norm2(x_BTD + dropout(y_BTD, self.rate, second))


class MiniGPT(nnx.Module):
    """A small language model: tokens (B, T) to logits (B, T, V) of the next.

    V is the padded vocabulary; logits of tokens that do not exist are MASKED.
    With a key it is in training and drops numbers; without, in evaluation.
    segments (B, T): attention stays among tokens of one number; positions (B,
    T): default 0, 1, 2, ... A token or position out of range gives NaN. Raises
    ValueError for rows longer than the window, and where the mesh cannot
    divide sizes as the sharding asks.
    """

    def __init__(self, config: MiniGPTConfig, sharding: Sharding, *,
                 rngs: nnx.Rngs):
        T, D, V = config.tokens, config.embed, config.padded
        fan_out = init.variance_scaling(
            1.0, "fan_out", "uniform", in_axis=0, out_axis=1
        )
        make = lambda *what: parameter(*what, rngs, config, sharding)
        self.token_VD = make("VD", (V, D), fan_out)
        self.position_TD = make("TD", (T, D), fan_out)
        self.blocks = nnx.List(
            DecoderBlock(config, sharding, rngs=rngs)
            for _ in range(config.layers)
        )
        self.w_head_DV = make("DV", (D, V), init.xavier_uniform())
        self.b_head_V = make("V", (V,), init.zeros)
        self.config, self.sharding = config, sharding

    def embed(self, tokens_BT: Ids, positions_BT: Ids | None = None):
        """Tokens and their positions as embeddings: (B, T) to (B, T, D)."""
        c, s, T = self.config, self.sharding, tokens_BT.shape[1]
        if T > c.tokens:
            raise ValueError(
                f"a row has {T} tokens; the window has room for {c.tokens}"
            )
        found = lambda letters, table, ids, count: look_up(
            letters, table[...], ids, count, c.dtype, s
        )
        x_BTD = found("VD", self.token_VD, tokens_BT, c.vocabulary)
        if positions_BT is None:
            return x_BTD + s.gather("TD", self.position_TD[...], c.dtype)[:T]
        return x_BTD + found("TD", self.position_TD, positions_BT, c.tokens)

    def hidden(self, tokens_BT: Ids, key: jax.Array | None = None,
               segments: Ids | None = None, positions: Ids | None = None):
        """What the head reads: (B, T) to (B, T, D)."""
        with jax.named_scope("embed"):
            x_BTD = self.embed(tokens_BT, positions)
        if segments is not None:
            rows = self.sharding.activation("BT")
            segments = jax.reshard(segments, rows)
        keys = keys_for(key, len(self.blocks))
        for i, block in enumerate(self.blocks):
            with jax.named_scope(f"block_{i}"):
                x_BTD = block(x_BTD, keys[i], segments)
        return x_BTD

    def empty_cache(self, rows: int):
        """The cache of a batch of texts before anything was read.

        For each block a pair, keys and values (B, H, W, K): W columns, as many as the window.
        """
        c, spec = self.config, self.sharding.activation("BTHK")
        empty_BWHK = jnp.zeros((rows, c.tokens, c.heads, c.head_size), c.dtype)
        empty_BHWK = jax.reshard(empty_BWHK, spec).swapaxes(1, 2)
        return [(empty_BHWK, empty_BHWK)] * c.layers

    def extend(self, tokens_BT: Ids, cache: list | tuple, column: int | Array,
               first_B: Int[Array, "B"]):
        """Hidden states of tokens that follow cached ones: ((B, T, D), new cache).

        The new tokens stand in `column` and those after it; a row's text begins in its first_B,
        and a token sees the columns from there to its own.
        """
        positions_BT, seen_BTW = positions_and_seen(
            tokens_BT.shape[1], self.config.tokens, column, first_B
        )
        x_BTD, new = self.embed(tokens_BT, positions_BT), []
        for block, pair in zip(self.blocks, cache):
            y_BTD, pair = attend(
                block.attention, x_BTD, pair, column, seen_BTW[:, None]
            )
            x_BTD = block.add(x_BTD, y_BTD)
            new.append(pair)
        return x_BTD, new

    def head(self, x_BTD: Hidden):
        """Logits (B, T, V) of what the blocks made, MASKED for no token."""
        c, s = self.config, self.sharding
        b_V = s.gather("V", self.b_head_V[...], c.dtype)
        ids_V = jax.reshard(jnp.arange(c.padded), s.activation("V"))
        b_V = jnp.where(ids_V < c.vocabulary, b_V, MASKED)
        w_DV = s.weight("DV", self.w_head_DV[...], c.dtype)
        return b_V + jnp.einsum("BTD,DV->BTV", x_BTD, w_DV,
                                out_sharding=s.activation("BTV"))

    def __call__(self, tokens_BT: Ids, key: jax.Array | None = None,
                 segments: Ids | None = None, positions: Ids | None = None):
        x_BTD = self.hidden(tokens_BT, key, segments, positions)
        with jax.named_scope("head"):
            return self.head(x_BTD)
