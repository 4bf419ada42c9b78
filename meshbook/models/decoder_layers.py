"""One layer of the decoder: norms, attention and MLP, each added to the residual stream.

`make(letters, shape, initializer)` creates a parameter; the decoder gives one that stacks the
parameters of all layers.

Sources: Zhang and Sennrich 2019 (RMSNorm); Shazeer 2020 (SwiGLU).
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers as init
from jaxtyping import Array, Float, Int

from meshbook.models.decoder_dropout import dropped
from meshbook.models.expert_layers import Experts
from meshbook.models.heads import (
    Angles, GroupedQueryAttention, Hidden, LatentAttention, Sees, biases, multiplied, uniform
)
from meshbook.models.layers import keys_for
from meshbook.sharding import Sharding, beside


class RMSNorm(nnx.Module):
    """x divided by its root mean square over D, in float32, times a scale, plus a shift if any."""

    def __init__(self, config: Any, sharding: Sharding, make: Callable):
        self.scale_D = make("D", (config.embed,), init.ones)
        self.shift_D = biases(config, make)("D", (config.embed,))
        self.sharding = sharding

    def __call__(self, x_BTD: Float[Array, "... D"]):
        x = x_BTD.astype(jnp.float32)
        y = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)
        y = y * beside(self.sharding, "D", self.scale_D[...], y)
        if self.shift_D is not None:
            y = y + beside(self.sharding, "D", self.shift_D[...], y)
        return y.astype(x_BTD.dtype)


class FeedForward(nnx.Module):
    """D to F to D; between them GELU, or SwiGLU: silu of a gate, times the hidden units.

    hidden: F.
    """

    def __init__(self, config: Any, sharding: Sharding, make: Callable, hidden: int):
        D, F, S = config.embed, hidden, 2 if config.gated else 1
        self.w_in_DSF = make("DSF", (D, S, F), uniform(D))
        self.w_out_FD = make("FD", (F, D), uniform(F, config.narrow))
        bias = biases(config, make)
        self.b_in_SF, self.b_out_D = bias("SF", (S, F)), bias("D", (D,))
        self.sharding = sharding

    def __call__(self, x_BTD: Hidden):
        s = self.sharding
        h_BTSF = multiplied(s, "BTD,DSF->BTSF", x_BTD, self.w_in_DSF, self.b_in_SF)
        parts = [h_BTSF[:, :, part] for part in range(h_BTSF.shape[2])]
        h_BTF = jax.nn.gelu(*parts) if len(parts) == 1 else jax.nn.silu(parts[0]) * parts[1]
        return multiplied(s, "BTF,FD->BTD", h_BTF, self.w_out_FD, self.b_out_D)


class DecoderLayer(nnx.Module):
    """Attention, then MLP or experts, each of what was normalised, and added to what came in."""

    def __init__(self, config: Any, sharding: Sharding, make: Callable, has_positions: bool,
                 has_experts: bool = False):
        self.norm1, self.norm2 = (RMSNorm(config, sharding, make) for _ in range(2))
        if config.latent:
            rotary = config.rotary if has_positions else 0
            self.attention = LatentAttention(config, sharding, make, rotary)
        else:
            self.attention = GroupedQueryAttention(config, sharding, make)
        shared = config.experts.shared if has_experts else config.hidden
        self.mlp = FeedForward(config, sharding, make, shared) if shared else None
        self.experts = Experts(config, sharding, make) if has_experts else None
        self.rate, self.has_positions, self.sharding = config.dropout, has_positions, sharding

    def __call__(self, x_BTD: Hidden, angles_BTk: Angles, sees_BTs: Sees,
                 key: jax.Array | None = None):
        return self.with_loads(x_BTD, angles_BTk, sees_BTs, key)[0]

    def with_loads(self, x_BTD: Hidden, angles_BTk: Angles, sees_BTs: Sees,
                   key: jax.Array | None = None):
        """What the layer gives, and the Loads of its experts, if it has any."""
        with jax.named_scope("attention"):
            queries, kept = self.read(x_BTD, angles_BTk)
            y_BTD = self.attention.look(queries, kept, sees_BTs)
        return self.add_with_loads(x_BTD, y_BTD, key)

    def read(self, x_BTD: Hidden, angles_BTk: Angles):
        """Queries of x, and what is kept of it: see heads."""
        return self.attention.read(self.norm1(x_BTD), angles_BTk if self.has_positions else None)

    def cache(self, zeros: Callable):
        """What is kept of a text that was not read: the attention's part and the experts'."""
        return self.attention.cache(zeros), self.experts and self.experts.cache(zeros)

    def extend(self, x_BTD: Hidden, cache: tuple, put: Callable, column: int | jax.Array,
               first_B: Int[Array, "B"], angles_BTk: Angles, sees_BTW: Sees):
        """The layer of tokens that follow cached ones: ((B, T, D), the cache with theirs).

        put(old, new): what was kept with new in `column` and those after it; a row begins in its
        first_B. sees_BTW: which columns a token looks at.
        """
        kept, chosen = cache
        queries, new = self.read(x_BTD, angles_BTk)
        kept = jax.tree.map(put, kept, new)
        absorbed = x_BTD.shape[1] == 1  # for many queries keys and values are less work
        y_BTD = self.attention.look(queries, kept, sees_BTW, absorbed=absorbed)
        use = self.experts and partial(self.experts.extend, cached_BWA=chosen, put=put,
                                       column=column, first_B=first_B)
        x_BTD, chosen = self.add_with_loads(x_BTD, y_BTD, use=use)
        return x_BTD, (kept, chosen)

    def add_with_loads(self, x_BTD: Hidden, y_BTD: Hidden, key: jax.Array | None = None,
                       use: Callable | None = None):
        """What follows the attention: its sum with x, and the MLP's; and the Loads of experts.

        An MLP beside experts is an expert that all share. use: of the experts, in place of a pass
        over whole rows; it returns something in place of Loads.
        """
        first, second = keys_for(key, 2)
        drop, loads = partial(dropped, rate=self.rate, sharding=self.sharding), None
        x_BTD = x_BTD + drop(y_BTD, key=first)
        normed_BTD = self.norm2(x_BTD)
        with jax.named_scope("mlp"):
            y_BTD = None if self.mlp is None else self.mlp(normed_BTD)
        if self.experts is not None:
            with jax.named_scope("experts"):
                found_BTD, loads = (use or self.experts)(normed_BTD)
            y_BTD = found_BTD if y_BTD is None else found_BTD + y_BTD
        return x_BTD + drop(y_BTD, key=second), loads
