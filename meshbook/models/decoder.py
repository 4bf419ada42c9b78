"""A modern decoder: tokens (B, T) to logits (B, T, V), its layers stacked and scanned.

Norms come before attention and MLP (pre-norm), positions are rotary, keys and values are those of
heads, of groups of heads, or of a latent, and the embedding is also the head.

Sources: Zhang and Sennrich 2019 (RMSNorm); Shazeer 2020 (SwiGLU); Press and Wolf 2017 (one table
for embedding and head); JAXformer, whose sizes `jaxformer` has.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from meshbook.models.decoder_layers import DecoderLayer, RMSNorm
from meshbook.models.heads import angles, multiplied, uniform
from meshbook.models.kv_cache import positions_and_seen
from meshbook.models.layers import keys_for, parameter
from meshbook.models.row_attention import FOUND
from meshbook.models.text_models import MASKED, Hidden, Ids, TextSizes, look_up
from meshbook.parallel.sequence import split_tokens
from meshbook.parallel.zero import regathered
from meshbook.sharding import Sharding, axes_of, check_split

POLICIES = {  # what a layer keeps for the backward pass; the rest is computed again
    "all": jax.checkpoint_policies.nothing_saveable,
    "attention": jax.checkpoint_policies.save_only_these_names(FOUND),
    "products": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "none": jax.checkpoint_policies.everything_saveable,
}


@dataclass(frozen=True)
class DecoderConfig(TextSizes):
    """Sizes of a decoder.

    vocabulary: tokens that exist; tokens T: of the window; embed D, hidden F, heads H, layers L;
    groups G: of heads that share keys and values, 0 for as many as heads; latent R: numbers of a
    latent from which keys and values are made, 0 for none; rotary P: of the part of queries and
    keys that has positions beside a latent; period: of so many layers the last has no positions,
    1 for none without; gated: SwiGLU, else GELU; bias: whether products have biases and norms
    shifts; remat: what is kept of a layer for the backward pass, a key of POLICIES; by_row: whether
    attention takes one row after the other, so that scores of all are never there at once, and what
    it finds counts as a product.
    dropout: share of numbers dropped in training; dtype: of activations and products;
    param_dtype: of parameters. Raises ValueError where sizes do not fit.
    """

    vocabulary: int = 50_257
    tokens: int = 256
    embed: int = 256
    hidden: int = 512
    heads: int = 8
    layers: int = 4
    groups: int = 0
    latent: int = 0
    rotary: int = 0
    period: int = 1
    gated: bool = True
    bias: bool = False
    remat: str = "none"
    by_row: bool = False
    dropout: float = 0.0
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    def __post_init__(self):
        super().__post_init__()
        if self.period < 1:
            raise ValueError(f"period is a number from 1; found {self.period}")
        for name in ("groups", "latent", "rotary"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is a number from 0; found {getattr(self, name)}")
        if self.groups and self.heads % self.groups:
            raise ValueError(f"{self.heads} heads do not divide into {self.groups} groups")
        if self.latent and self.groups:
            raise ValueError(f"keys and values come from groups of heads or from a latent; found "
                             f"groups={self.groups} and latent={self.latent}")
        if self.rotary and not self.latent:
            raise ValueError(f"rotary={self.rotary} is for latent attention; found latent=0")
        if self.turned % 2:
            raise ValueError(f"rotary positions turn pairs of numbers; found {self.turned}")
        if self.remat not in POLICIES:
            raise ValueError(f"remat is one of {', '.join(POLICIES)}; found {self.remat!r}")
        if self.layers % self.period:
            raise ValueError(f"{self.layers} layers do not divide into periods of {self.period}")

    @property
    def keeps(self):
        """The policy of what a layer keeps for the backward pass."""
        policy = POLICIES[self.remat]
        if self.by_row and self.remat == "products":
            both = jax.checkpoint_policies.save_from_both_policies
            return both(policy, POLICIES["attention"])
        return policy

    @property
    def narrow(self):
        """The variance of what is added to the residual stream: its sum over 2 L terms is 1."""
        return 1 / (2 * self.layers)

    @property
    def turned(self):
        """How many numbers of a query and of a key are turned by its position."""
        return self.rotary if self.latent else self.head_size

    @classmethod
    def jaxformer(cls, **sizes: Any):
        """The sizes of JAXformer, without its experts: chapter 15 adds them."""
        return cls(**dict(vocabulary=100_277, tokens=1024, embed=768, hidden=3072, heads=12,
                          layers=48, latent=128, rotary=128, period=6, gated=False, bias=True,
                          dropout=0.2) | sizes)


def check_tokens(rules: Mapping):
    """ValueError where tokens are split over an axis that does not split heads and hidden units."""
    for letter in "HF":
        if missing := set(axes_of(rules["T"])) - set(axes_of(rules[letter])):
            raise ValueError(f"T is split over {', '.join(missing)}, and {letter} is not: products "
                             "of all tokens need heads H and hidden units F split over the same "
                             "axes, as in Sharding.sequence_parallel()")


class Decoder(nnx.Module):
    """A language model: tokens (B, T) to logits (B, T, V) of the next.

    V is the padded vocabulary; logits of tokens that do not exist are MASKED. With a key it is in
    training and drops numbers; without, in evaluation. segments (B, T): attention stays among
    tokens of one number; positions (B, T): default 0, 1, 2, ... Raises ValueError for rows longer
    than the window, and where the mesh cannot divide sizes as the sharding asks.

    Parameters of all layers are stacked along a first dimension L, and the layers are one loop.
    """

    def __init__(self, config: DecoderConfig, sharding: Sharding, *, rngs: nnx.Rngs):
        check_tokens(sharding.activations)
        sharding = sharding.also(L=None, G=sharding.activations["H"], N=None, R=None, P=None)
        count = config.layers // config.period
        single = lambda *what: parameter(*what, rngs, config, sharding)
        stacked = lambda letters, shape, f: single("L" + letters, (count, *shape), f)
        V, D = config.padded, config.embed
        self.token_VD = single("VD", (V, D), uniform(D))
        self.layers = nnx.List(DecoderLayer(config, sharding, stacked, i < config.period - 1
                                     or config.period == 1) for i in range(config.period))
        self.norm = RMSNorm(config, sharding, single)
        self.config, self.sharding = config, sharding

    @property
    def w_head_DV(self):
        """The head's weights: the embedding's, transposed."""
        return self.token_VD[...].T

    @property
    def b_head_V(self):
        """The head has no bias; zeros for losses that ask for one."""
        return jnp.zeros(self.config.padded, self.config.param_dtype,
                         out_sharding=self.sharding.parameter("V"))

    def hidden(self, tokens_BT: Ids, key: jax.Array | None = None, segments: Ids | None = None,
               positions: Ids | None = None):
        """What the head reads: (B, T) to (B, T, D)."""
        spec, T = self.sharding.activation, tokens_BT.shape[1]
        if T > self.config.tokens:
            raise ValueError(
                f"a row has {T} tokens; the window has room for {self.config.tokens}")
        check_split("BTD", (*tokens_BT.shape, self.config.embed), spec("BTD"))
        positions = jnp.arange(T)[None] if positions is None else jax.reshard(positions, spec("B"))
        sees_BTs = jnp.tril(jnp.ones((T, T), bool))[None]
        if segments is not None:
            segments = jax.reshard(segments, spec("B"))
            sees_BTs = sees_BTs & (segments[:, :, None] == segments[:, None])
        turned, L = self.angles(positions), self.config.layers
        keys = None if key is None else keys_for(key, L).reshape(-1, self.config.period)

        def rematerialised(layer, x_BTD, key):
            graph, state = nnx.split(layer)
            run = lambda state, x_BTD, key: nnx.merge(graph, state)(x_BTD, turned, sees_BTs, key)
            policy, again = self.config.keeps, self.sharding.regather
            if self.config.remat == "none" and not again:
                return run(state, x_BTD, key)
            if again is not None:
                rules = self.sharding.activations  # weights along B's axes, tokens along T's
                policy = regathered(policy, again, axes_of(rules["B"]) + axes_of(rules["T"]))
            return jax.checkpoint(run, policy=policy, prevent_cse=False)(state, x_BTD, key)

        def turn(x_BTD, layers, keys):
            for i, layer in enumerate(layers):
                x_BTD = rematerialised(layer, x_BTD, None if keys is None else keys[i])
            return x_BTD, None

        x_BTD, _ = self.each_period(turn, self.embed(tokens_BT), keys)
        return self.norm(x_BTD)

    def embed(self, tokens_BT: Ids):
        """Tokens as embeddings: (B, T) to (B, T, D)."""
        c = self.config
        with jax.named_scope("embed"):
            return look_up("VD", self.token_VD[...], tokens_BT, c.vocabulary, c.dtype,
                           self.sharding)

    def angles(self, positions_BT: Ids):
        """By which angles positions turn queries and keys, or None where they do not."""
        return angles(positions_BT, self.config.turned) if self.config.turned else None

    def each_period(self, turn: Callable, x_BTD: Hidden, *parts: Any):
        """Scan `turn(x, layers, *parts) -> (x, result)` over the periods: (x, stacked results)."""
        graph, stacked = nnx.split(self.layers)

        def body(x_BTD, slices):
            layers, *own = slices
            return turn(x_BTD, nnx.merge(graph, layers), *own)

        with jax.named_scope("layers"):
            return jax.lax.scan(body, x_BTD, (stacked, *parts))

    def empty_cache(self, rows: int):
        """The cache of a batch of texts before anything was read.

        For each layer of a period a tuple of arrays (L / period, B, W, ...): keys and values, or
        latents and the turned part.
        """
        count, spec = self.config.layers // self.config.period, self.sharding.activation
        zeros = lambda letters, shape: jnp.zeros(
            (count, rows, self.config.tokens, *shape), self.config.dtype,
            out_sharding=spec("LBT" + letters))
        return [layer.attention.cache(zeros) for layer in self.layers]

    def extend(self, tokens_BT: Ids, cache: list, column: int | Array, first_B: Int[Array, "B"]):
        """Hidden states of tokens that follow cached ones: ((B, T, D), new cache).

        The new tokens stand in `column` and those after it; a row's text begins in its first_B, and
        a token sees the columns from there to its own.
        """
        if axes := split_tokens(self.sharding.activation("BTD")):
            raise ValueError(f"tokens follow each other and cannot be split over {axes}: make this "
                             "model with Sharding.tensor_parallel(); its parameters lie alike")
        first_B = jax.reshard(first_B, self.sharding.activation("B"))
        positions_BT, sees_BTW = positions_and_seen(
            tokens_BT.shape[1], self.config.tokens, column, first_B)
        turned = self.angles(positions_BT)
        single = tokens_BT.shape[1] == 1  # for many queries keys and values are less work

        def put(old, new):
            new = jax.reshard(new, jax.typeof(old).sharding.spec)  # no longer `reduced`
            return jax.lax.dynamic_update_slice_in_dim(old, new, column, 1)

        def turn(x_BTD, layers, cache):
            written = []
            for layer, old in zip(layers, cache, strict=True):
                queries, new = layer.read(x_BTD, turned)
                written.append(jax.tree.map(put, old, new))
                y_BTD = layer.attention.look(queries, written[-1], sees_BTW, absorbed=single)
                x_BTD = layer.add(x_BTD, y_BTD)
            return x_BTD, written

        x_BTD, cache = self.each_period(turn, self.embed(tokens_BT), cache)
        return self.norm(x_BTD), cache

    def head(self, x_BTD: Hidden):
        """Logits (B, T, V) of what the layers made, MASKED for no token."""
        c, s = self.config, self.sharding
        ids_V = jax.reshard(jnp.arange(c.padded), s.activation("V"))
        logits_BTV = multiplied(s, "BTD,VD->BTV", x_BTD, self.token_VD)
        return jnp.where(ids_V < c.vocabulary, logits_BTV, MASKED)

    def __call__(self, tokens_BT: Ids, key: jax.Array | None = None,
                 segments: Ids | None = None, positions: Ids | None = None):
        x_BTD = self.hidden(tokens_BT, key, segments, positions)
        with jax.named_scope("head"):
            return self.head(x_BTD)
