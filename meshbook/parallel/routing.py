"""Which experts a token goes to, how much each of them counts, and how evenly they are used.

A router gives every token a score for each of E experts. The token goes to the A experts with the
highest scores, its active ones. With a capacity each expert has C slots for each row, and they are
filled in the order of the row's tokens: whether a token has a slot depends on what the tokens
before it in its own row chose, those of documents before its own included, and on nothing else. So
no later token and no other row takes a slot. Two programs, of two meshes or batch sizes, round
their numbers differently; where that makes another expert the better one by a hair, a token goes
there. A choice that is no expert, as padding has, takes no slot.

Sources: Shazeer et al. 2017 (top-k gates); Lepikhin et al. 2021, "GShard" (capacity); Fedus et al.
2022, "Switch transformers" (the loss of balance); Wang et al. 2024, "Auxiliary-loss-free load
balancing" (a bias that only selects).
"""
from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Num

from meshbook.sharding import shard_map_over_the_rest, summed

SCORES = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}
NEARLY_ZERO = 1e-20  # beside a sum of scores that are all 0 in float32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routing:
    """Where each token goes.

    experts_BTA: the numbers of its active experts, the best one first; gates_BTA: how much what
    each of them makes counts, float32; shares_BTE: its scores as shares of their sum.
    """

    experts_BTA: Int[Array, "B T A"]
    gates_BTA: Float[Array, "B T A"]
    shares_BTE: Float[Array, "B T E"]


def route(logits_BTE: Float[Array | np.ndarray, "B T E"], active: int, kind: str = "softmax",
          bias_E: Float[Array | np.ndarray, "E"] | None = None):
    """A Routing of each token to the `active` experts with the highest scores; of ties, the first.

    kind: how a score is made from a logit, "softmax" over experts or "sigmoid" of each alone.
    bias_E: added to the scores for the choice only; gates do not see it, and it has no gradient.
    Gates are scores, divided by their sum over the active experts; with one active expert, where
    that would be 1 and the router would not learn, the score itself.
    Raises ValueError for an `active` that is not in 1 to E, and for an unknown kind.
    """
    E = logits_BTE.shape[-1]
    if not 1 <= active <= E:
        raise ValueError(f"a token goes to 1 to {E} of {E} experts; found active={active}")
    if kind not in SCORES:
        raise ValueError(f"kind is one of {', '.join(SCORES)}; found {kind!r}")
    scores_BTE = SCORES[kind](logits_BTE.astype(jnp.float32))
    ranked_BTE = scores_BTE if bias_E is None else scores_BTE + bias_E
    experts_BTA = best(jax.lax.stop_gradient(ranked_BTE), active)
    chosen_BTAE = experts_BTA[..., None] == jnp.arange(E)
    gates_BTA = jnp.where(chosen_BTAE, scores_BTE[:, :, None], 0).sum(-1)
    if active > 1:
        gates_BTA = gates_BTA / (gates_BTA.sum(-1, keepdims=True) + NEARLY_ZERO)
    shares_BTE = scores_BTE / (scores_BTE.sum(-1, keepdims=True) + NEARLY_ZERO)
    return Routing(experts_BTA, gates_BTA, shares_BTE)


def best(scores_BTE: Float[Array, "B T E"], active: int):
    """The numbers of the highest scores, each device for its own tokens; XLA would gather all."""
    spec = jax.typeof(scores_BTE).sharding.spec
    return shard_map_over_the_rest(lambda x: jax.lax.top_k(x, active)[1], spec, spec)(scores_BTE)


def capacity(factor: int | float, tokens: int, active: int, experts: int):
    """How many slots C each of E experts has for a row: ceil(factor · A · T / E), at most T.

    factor: 1 for room for all of a row's choices, if they are spread evenly.
    Raises ValueError where that is no slot.
    """
    slots = math.ceil(round(factor * active * tokens / experts, 9))
    if slots < 1:
        raise ValueError(f"expected a capacity of 1 or more slots; found {slots}, a factor of "
                         f"{factor} for {active} choices of {tokens} tokens and {experts} experts")
    return min(slots, tokens)


def slots_of(experts_BTA: Int[Array | np.ndarray, "B T A"], experts: int, capacity: int,
             places_T: Int[Array | np.ndarray, "T"] | None = None):
    """The slot of each choice, (B, T, A): e·C + place in expert e's slots for this row, or E·C.

    experts: E; capacity: C. Choices of a row take places in the order of its tokens; a choice of E
    is none, and takes no place. E·C, which no slot has, is for a choice that is dropped, because
    the C places were taken by earlier tokens. Slots over C are experts, as `loads` counts them.
    places_T: where in a row its tokens stand, if not as they lie, as in the order of `zigzag`.
    Raises ValueError for a capacity below 1.
    """
    if capacity < 1:
        raise ValueError(f"expected a capacity of 1 or more slots; found {capacity}")
    B, T, A = experts_BTA.shape
    rows = P(*jax.typeof(experts_BTA).sharding.spec[:1])
    whole_BTA = jax.reshard(experts_BTA, rows)  # a row's tokens are counted together
    if places_T is not None:
        whole_BTA = whole_BTA[:, jnp.argsort(places_T)]
    chosen_BN = jax.lax.reshape(whole_BTA, (B, T * A), out_sharding=rows)
    is_BNE = chosen_BN[..., None] == jnp.arange(experts)
    earlier_BNE = jnp.cumsum(is_BNE, 1) - is_BNE
    place_BN = jnp.where(is_BNE, earlier_BNE, 0).sum(-1)
    slot_BN = jnp.where(place_BN < capacity, chosen_BN * capacity + place_BN, experts * capacity)
    slot_BTA = jax.lax.reshape(slot_BN, (B, T, A), out_sharding=rows)
    return slot_BTA if places_T is None else slot_BTA[:, places_T]


def loads(experts_BTA: Int[Array | np.ndarray, "B T A"], experts: int,
          axes: tuple[str, ...] = ()):
    """How many choices of the whole batch each expert has: (E,), float32.

    A number from E on, as of a choice that was dropped, is not counted. axes: inside a shard_map,
    those that split tokens.
    """
    is_BTAE = experts_BTA[..., None] == jnp.arange(experts)
    return summed(is_BTAE.sum((0, 1, 2), dtype=jnp.float32), axes)


def balance_loss(routing: Routing, axes: tuple[str, ...] = ()):
    """E · sum over experts of f · p, each over the whole batch: 1 where experts are used evenly.

    f: the share of all choices that an expert has, before any is dropped; p: its mean share of the
    scores, through which the gradient goes. f and p are of all devices' tokens: a sum or a mean of
    what devices find by themselves is another number. axes: as of `loads`.
    """
    E, ways = routing.shares_BTE.shape[-1], jax.lax.axis_size(axes)
    f_E = loads(routing.experts_BTA, E, axes) / (routing.experts_BTA.size * ways)
    p_E = summed(routing.shares_BTE.mean((0, 1)), axes) / ways
    return E * (f_E * p_E).sum()


def update_bias(bias_E: Float[Array | np.ndarray, "E"], loads_E: Num[Array | np.ndarray, "E"],
                rate: float):
    """The bias of `route` after a step: up by rate for experts with too few choices, down for more.

    loads_E: choices of each expert in the step, of the whole batch and before dropping.
    """
    return bias_E + rate * jnp.sign(loads_E.mean() - loads_E)
