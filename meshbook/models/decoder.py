"""A modern decoder: tokens (B, T) to logits (B, T, V), its layers stacked and scanned.

Norms come before attention and MLP (pre-norm), positions are rotary, keys and values are those of
heads, of groups of heads, or of a latent, and the embedding is also the head.

Sources: Zhang and Sennrich 2019 (RMSNorm); Shazeer 2020 (SwiGLU); Press and Wolf 2017 (one table
for embedding and head); JAXformer, whose sizes `jaxformer` has.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from meshbook.models.context_attention import check_tokens, places_of
from meshbook.models.decoder_config import DecoderConfig
from meshbook.models.decoder_layers import DecoderLayer, RMSNorm
from meshbook.models.heads import Angles, Sees, angles, multiplied, uniform
from meshbook.models.kv_cache import positions_and_seen
from meshbook.models.layers import keys_for, parameter
from meshbook.models.text_models import MASKED, Hidden, Ids, look_up
from meshbook.parallel.sequence import split_tokens
from meshbook.parallel.zero import regathered
from meshbook.sharding import Sharding, axes_of, check_split


class Decoder(nnx.Module):
    """A language model: tokens (B, T) to logits (B, T, V) of the next.

    V is the padded vocabulary; logits of tokens that do not exist are MASKED. With a key it is in
    training and drops numbers; without, in evaluation. segments (B, T): attention stays among
    tokens of one number; positions (B, T): default 0, 1, 2, ... Raises ValueError for rows longer
    than the window, and where the mesh cannot divide sizes as the sharding asks.

    Parameters of all layers are stacked along a first dimension L, and the layers are one loop.
    """

    def __init__(self, config: DecoderConfig, sharding: Sharding, *, rngs: nnx.Rngs):
        check_tokens(config, sharding)
        sharding = sharding.also(L=sharding.parameters.get("L"), G=sharding.activations["H"],
                                 E=sharding.parameters.get("E"), N=None, R=None, P=None)
        count = config.layers // config.period
        single = lambda *what: parameter(*what, rngs, config, sharding)
        stacked = lambda letters, shape, f: single("L" + letters, (count, *shape), f)
        V, D = config.padded, config.embed
        self.token_VD = single("VD", (V, D), uniform(D))
        last = config.period - 1
        self.layers = nnx.List(
            DecoderLayer(config, sharding, stacked, i < last or not last,
                         config.experts is not None and i == last) for i in range(config.period))
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
        return self.hidden_and_loads(tokens_BT, key, segments, positions)[0]

    def hidden_and_loads(self, tokens_BT: Ids, key: jax.Array | None = None,
                         segments: Ids | None = None, positions: Ids | None = None):
        """The same, and the Loads of all layers that have experts, stacked, or None."""
        spec, T = self.sharding.activation, tokens_BT.shape[1]
        if T > self.config.tokens:
            raise ValueError(
                f"a row has {T} tokens; the window has room for {self.config.tokens}")
        check_split("BTD", (*tokens_BT.shape, self.config.embed), spec("BTD"))
        L, period, seen = self.config.layers, self.config.period, self.seen(T, segments, positions)
        keys = None if key is None else keys_for(key, L).reshape(-1, period)

        def turn(x_BTD, layers, keys):
            return self.through_with_loads(layers, x_BTD, keys, *seen)

        x_BTD, loads = self.each_period(turn, self.embed(tokens_BT), keys)
        return self.norm(x_BTD), loads

    def seen(self, T: int, segments: Ids | None, positions: Ids | None):
        """What layers know of T tokens besides their numbers: angles, and who sees whom."""
        rows, context = self.sharding.activation("B"), self.sharding.context
        positions = self.places(T)[None] if positions is None else jax.reshard(positions, rows)
        segments = None if segments is None else jax.reshard(segments, rows)
        if context is not None:  # a mask of all tokens would be T·T
            return self.angles(positions), segments
        sees_BTs = jnp.tril(jnp.ones((T, T), bool))[None]
        if segments is not None:
            sees_BTs = sees_BTs & (segments[:, :, None] == segments[:, None])
        return self.angles(positions), sees_BTs

    def places(self, T: int):
        """The places in a row, (T,), of tokens as they lie."""
        found = places_of(self.sharding, T)
        return jnp.arange(T) if found is None else found

    def through(self, layers: Any, x_BTD: Hidden, keys: Any, turned: Angles, sees_BTs: Sees):
        """The layers of one period: (B, T, D) to (B, T, D). What each keeps, its remat says."""
        return self.through_with_loads(layers, x_BTD, keys, turned, sees_BTs)[0]

    def through_with_loads(self, layers: Any, x_BTD: Hidden, keys: Any, turned: Angles,
                           sees_BTs: Sees):
        """The same, and the Loads of the last layer, which alone can have experts."""
        for i, layer in enumerate(layers):
            key = None if keys is None else keys[i]
            x_BTD, loads = self.rematerialised(layer, x_BTD, key, turned, sees_BTs)
        return x_BTD, loads

    def rematerialised(self, layer: DecoderLayer, x_BTD: Hidden, key: jax.Array | None,
                       turned: Angles, sees_BTs: Sees):
        """One layer, that keeps for the backward pass what the config and the rules say.

        XLA removes a loop of one turn, and would then keep what it finds computed twice.
        """
        graph, state = nnx.split(layer)
        run = lambda state, x_BTD, key: nnx.merge(graph, state).with_loads(
            x_BTD, turned, sees_BTs, key)
        policy, again = self.config.keeps, self.sharding.regather
        if self.config.remat == "none" and not again:
            return run(state, x_BTD, key)
        if again is not None:
            rules = self.sharding.activations  # weights along B's axes, tokens along T's
            policy = regathered(policy, again, axes_of(rules["B"]) + axes_of(rules["T"]))
        alone = self.config.layers == self.config.period
        return jax.checkpoint(run, policy=policy, prevent_cse=alone)(state, x_BTD, key)

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

        For each layer of a period two trees of arrays (L / period, B, W, ...): keys and values, or
        latents and the turned part; and, of experts with a capacity, what each token chose.
        """
        count, spec = self.config.layers // self.config.period, self.sharding.activation

        def zeros(letters, shape, dtype=self.config.dtype):
            shape = count, rows, self.config.tokens, *shape
            return jnp.zeros(shape, dtype, out_sharding=spec("LBT" + letters))

        return [layer.cache(zeros) for layer in self.layers]

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

        def put(old, new):
            new = jax.reshard(new, jax.typeof(old).sharding.spec)  # no longer `reduced`
            return jax.lax.dynamic_update_slice_in_dim(old, new, column, 1)

        def turn(x_BTD, layers, cache):
            written = []
            for layer, old in zip(layers, cache, strict=True):
                x_BTD, new = layer.extend(x_BTD, old, put, column, first_B, turned, sees_BTW)
                written.append(new)
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
