"""Attention over split tokens for models under the rules of an Explicit mesh.

`meshbook.parallel.context` says how the keys of other devices are reached. Here it is told where
arrays lie, and what is kept for the gradient.
"""
from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from meshbook.models.row_attention import FOUND
from meshbook.sharding import Sharding, axes_of, shard_map_over_the_rest


def attend_over_context(sharding: Sharding, q_BTHK: Float[Array, "B T H K"],
                        k_BTGK: Float[Array, "B T G K"], v_BTGV: Float[Array, "B T G V"],
                        segments_BT: Int[Array, "B T"] | None = None):
    """Causal attention (B, T, H, V) whose tokens the rules split as `sharding.context` says.

    H is a multiple of G. segments: documents of tokens, in the order in which tokens lie. Not for
    second derivatives.
    """
    spec = sharding.activation
    where = (spec("BTHK"), spec("BTGK"), spec("BTGK"), spec("B")), sharding.context
    return _over_context(where, q_BTHK, k_BTGK, v_BTGV, segments_BT)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _over_context(where, *arrays):
    return _forward(where, *arrays)[0]


def _forward(where, q_BTHK, k_BTGK, v_BTGV, segments_BT):
    specs, context = where
    run = shard_map_over_the_rest(context.forward, specs, (specs[0], kept_specs(where)))
    y_BTHV, (*kept, found, log_sum) = run(q_BTHK, k_BTGK, v_BTGV, segments_BT)
    y_BTHV, log_sum = (checkpoint_name(x, FOUND) for x in (y_BTHV, log_sum))
    found = checkpoint_name(found, FOUND) if context.exchanges else y_BTHV
    return y_BTHV, ((*kept, found, log_sum), segments_BT)


def _backward(where, kept, dy_BTHV):
    (q, k, v, rows), context = where
    run = shard_map_over_the_rest(context.backward, (kept_specs(where), rows, q), (q, k, v))
    return *run(*kept, dy_BTHV), None


_over_context.defvjp(_forward, _backward)


def kept_specs(where: tuple):
    """Where what is kept for the gradient lies: queries, keys, values, what was found, its sums."""
    (q, k, v, _), context = where
    q, k, v, sums = map(context.kept_spec, (q, k, v, q))
    return q, k, v, q, jax.P(*sums[:3])


def places_of(sharding: Sharding, T: int):
    """The places in a row of its T tokens as they lie, (T,), or None where they lie in order."""
    context = sharding.context
    if context is None or not context.zigzagged:
        return None
    return context.places(T, jax.sharding.get_abstract_mesh().shape[context.axis])


def check_tokens(config: Any, sharding: Sharding):
    """ValueError where tokens are split over an axis that does not split heads and hidden units.

    With a context they may be split everywhere; its attention is that of heads, not of latents.
    """
    rules, context = sharding.activations, sharding.context
    if context is not None and config.latent:
        raise ValueError(f"attention over the axis {context.axis!r} is for keys and values of "
                         f"heads; found latent={config.latent}")
    whole = set() if context is None else {context.axis}
    for letter in "HF":
        if missing := set(axes_of(rules["T"])) - set(axes_of(rules[letter])) - whole:
            raise ValueError(f"T is split over {', '.join(missing)}, and {letter} is not: products "
                             "of all tokens need heads H and hidden units F split over the same "
                             "axes, as in Sharding.sequence_parallel()")
