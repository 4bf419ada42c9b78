"""Experts in the place of a layer's MLP: their sizes, their parameters, and how they are used.

A router is a classifier of tokens: its letter C is a class, and the class of number e is expert e.
Experts themselves have the letter E, which the rules may split over a mesh axis.

Sources: Shazeer et al. 2017 (experts); Dai et al. 2024, "DeepSeekMoE" (an expert for all tokens).
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers as init
from jaxtyping import Array, Int

from meshbook.models.context_attention import places_of
from meshbook.models.heads import biases, multiplied, uniform
from meshbook.models.text_models import Hidden
from meshbook.parallel import routing
from meshbook.parallel.experts import BLOCK, dropless, expert_parallel
from meshbook.sharding import Sharding, axes_of


@dataclass(frozen=True)
class ExpertSizes:
    """The experts of a layer, and how tokens choose among them.

    count E: experts, each as wide as an MLP; active A: of them that a token goes to; shared: hidden
    units of one that has all tokens, 0 for none; capacity: slots of an expert for a window, as a
    share of an even load, 0 for as many as tokens need (dropless), then in blocks of `block`;
    router: how scores are made, a key of routing.SCORES; auxiliary: weight of the loss that
    balances loads; biased: whether there is a bias for that, which only chooses.
    Raises ValueError where sizes do not fit.
    """

    count: int = 8
    active: int = 2
    shared: int = 0
    capacity: float = 0.0
    block: int = BLOCK
    router: str = "softmax"
    auxiliary: float = 0.0
    biased: bool = False

    def __post_init__(self):
        if not 1 <= self.active <= self.count:
            raise ValueError(f"a token goes to 1 to {self.count} of {self.count} experts; found "
                             f"active={self.active}")
        for name in ("shared", "capacity", "auxiliary"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is a number from 0; found {getattr(self, name)}")
        if self.router not in routing.SCORES:
            raise ValueError(f"router is one of {', '.join(routing.SCORES)}; found {self.router!r}")


# JAXformer's two shared experts, a matrix of D by D each, are here one after the other: an MLP
JAXFORMER = ExpertSizes(16, 2, shared=768, capacity=1.5, router="sigmoid", auxiliary=1e-4)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Loads:
    """How the experts of a layer are used by a batch, of all devices together.

    before_E, after_E: how many choices each expert got, before and after dropping, (E,) or (L, E);
    balance: see routing.balance_loss, 1 where all are used evenly.
    """

    before_E: Any
    after_E: Any
    balance: Any


class Experts(nnx.Module):
    """A router and E MLPs, of which each token goes to a few: (B, T, D) to ((B, T, D), Loads)."""

    def __init__(self, config: Any, sharding: Sharding, make: Callable):
        D, F, E, S = config.embed, config.hidden, config.experts.count, 2 if config.gated else 1
        self.w_router_DC = make("DC", (D, E), uniform(D))
        self.w_in_EDSF = make("EDSF", (E, D, S, F), uniform(D))
        self.w_out_EFD = make("EFD", (E, F, D), uniform(F, config.narrow))
        bias = biases(config, make)
        self.b_router_C = bias("C", (E,))
        self.b_in_ESF, self.b_out_ED = bias("ESF", (E, S, F)), bias("ED", (E, D))
        self.b_choice_C = make("C", (E,), init.zeros) if config.experts.biased else None
        self.sizes, self.window, self.sharding = config.experts, config.tokens, sharding

    def __call__(self, x_BTD: Hidden):
        sizes, found = self.sizes, self.route(x_BTD)
        chosen = kept = found.experts_BTA
        if C := self.capacity:
            slots_BTA = routing.slots_of(chosen, sizes.count, C,
                                          places_of(self.sharding, x_BTD.shape[1]))
            y_BTD = expert_parallel(
                self.sharding, x_BTD, slots_BTA, found.gates_BTA, self.weights, C)
            kept = slots_BTA // C
        else:
            y_BTD = dropless(
                self.sharding, x_BTD, chosen, found.gates_BTA, self.weights, sizes.block)
        axes = self.manual_axes
        before_E, after_E = (routing.loads(each, sizes.count, axes) for each in (chosen, kept))
        return y_BTD, Loads(before_E, after_E, routing.balance_loss(found, axes))

    def extend(self, x_BTD: Hidden, cached_BWA: Int[Array, "B W A"] | None,
               put: Callable, column: int | jax.Array, first_B: Int[Array, "B"]):
        """The same of tokens that follow cached ones: ((B, T, D), the cache with theirs).

        cached_BWA: the experts that the token in each column of the window chose; put, column and
        first_B: as of `DecoderLayer.extend`. Slots are counted over a row's columns from first_B
        on, as in one pass over the whole text. What stands before them is padding, which chooses no
        expert and takes no slot.
        """
        E, T, found = self.sizes.count, x_BTD.shape[1], self.route(x_BTD)
        is_text_BT = column + jnp.arange(T) >= first_B[:, None]
        chosen_BTA = jnp.where(is_text_BT[..., None], found.experts_BTA, E)
        if cached_BWA is None:
            return dropless(self.sharding, x_BTD, chosen_BTA, found.gates_BTA, self.weights,
                            self.sizes.block), None
        cached_BWA = put(cached_BWA, chosen_BTA)
        slots_BWA = routing.slots_of(cached_BWA, E, self.capacity)
        slots_BTA = jax.lax.dynamic_slice_in_dim(slots_BWA, column, T, 1)
        kept_BTA = jnp.where(slots_BTA < E * self.capacity, chosen_BTA, E)
        C = min(self.capacity, T)  # no expert has more of T tokens
        slots_BTA = routing.slots_of(kept_BTA, E, C)
        y_BTD = expert_parallel(
            self.sharding, x_BTD, slots_BTA, found.gates_BTA, self.weights, C)
        return y_BTD, cached_BWA

    def cache(self, zeros: Callable):
        """The choices of a text that was not read, by zeros(letters, shape, dtype): (B, W, A).

        None without a capacity: then a token's result depends on no other token's choice.
        """
        return zeros("", (self.sizes.active,), jnp.int32) if self.capacity else None

    @property
    def capacity(self):
        """C, the slots of an expert for a window; 0 if there is no limit."""
        sizes = self.sizes
        return sizes.capacity and routing.capacity(
            sizes.capacity, self.window, sizes.active, sizes.count)

    @property
    def weights(self):
        """The experts' parameters by their letters, as `expert_parallel` has them."""
        weights = {"EDSF": self.w_in_EDSF, "EFD": self.w_out_EFD,
                   "ESF": self.b_in_ESF, "ED": self.b_out_ED}
        return {letters: w[...] for letters, w in weights.items() if w is not None}

    @property
    def manual_axes(self):
        """The axes that split tokens, of those that are manual in an enclosing shard_map."""
        rules, mesh = self.sharding.activations, jax.sharding.get_abstract_mesh()
        axes = dict.fromkeys(axes_of(rules["B"]) + axes_of(rules["T"]))
        return tuple(axis for axis in axes if axis in mesh.manual_axes)

    def route(self, x_BTD: Hidden):
        """Where tokens go, by scores in float32: a routing.Routing."""
        logits_BTC = multiplied(self.sharding, "BTD,DC->BTC", x_BTD.astype(jnp.float32),
                                self.w_router_DC, self.b_router_C)
        bias = self.b_choice_C
        bias_C = None if bias is None else self.sharding.gather("C", bias[...], jnp.float32)
        return routing.route(logits_BTC, self.sizes.active, self.sizes.router, bias_C)
