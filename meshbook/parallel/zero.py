"""ZeRO: parameters, gradients and moments that each device holds a part of, by the rules.

A device updates the part of the parameters whose moments it holds. So its gradient need only be
summed there, a reduce-scatter, and where parameters are used whole, they are gathered: after the
update (stages 1 and 2) or in the layers that use them (stage 3). `Sharding.zero1`, `zero2` and
`fully_sharded` say what lives where; here a training step does it.

Source: Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter
models".
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from meshbook.sharding import Lives, WithOwn, axes_of, extra_axes, opened

GATHERS = {"all_gather", "all_gather_reduced", "ppermute"}  # the last: piece by piece
LAID_OUT = {  # what may stand between a gather and a product: kept, it would be the weight's copy
    "broadcast_in_dim", "convert_element_type", "reshape", "reshard", "slice", "squeeze",
    "transpose"}


def value_and_grad(loss: Callable):
    """Like jax.value_and_grad of loss(params, program, batch, key) -> (loss, metrics).

    The gradients of a program whose rules reduce-scatter them are those of a device's own part, and
    lie where its moments do.
    """
    def both(params: Any, program: Any, batch: Mapping, key: jax.Array | None = None):
        lives, grad = program.lives, jax.value_and_grad(loss, has_aux=True)
        if lives is None:
            return grad(params, program, batch, key)

        def of_own(own):
            return loss(jax.tree.map(as_given, lives, own, params), program, batch, key)

        return jax.value_and_grad(of_own, has_aux=True)(own_part(params, lives))

    return both


def own_part(params: Any, lives: Any):
    """Of each parameter the part that this device updates: it has it already, nothing moves."""
    return jax.tree.map(lambda each, w: jax.reshard(w, each.moments), lives, params)


def as_given(lives: Lives, own: Any, whole: Any):
    """A parameter as the loss is given it, from a device's own part and what it stores."""
    stored = jax.typeof(whole).sharding.spec
    if stored == jax.typeof(own).sharding.spec:  # stage 3: gathered where it is used
        return own if extra_axes(stored, lives.used) else opened(own, lives.used)
    both = WithOwn(whole, own)
    return both if lives.gradient == lives.moments else opened(both, lives.used)


def gathered_once(params: Any, lives: Any):
    """Parameters that stand outside of a loop of layers whole, gathered once for all their uses."""
    return jax.tree.map(
        lambda each, w: w if each.looped else opened(w, each.used), lives, params)


def regathered(policy: Callable, again: bool, rows: tuple[str, ...]):
    """A checkpoint's policy that also says of what was gathered whether it is gathered again.

    rows: the mesh axes along which weights, or tokens, are gathered. It goes by primitive: a policy
    by name would name what came out of a gather, and keep what went into it, or came after it,
    unnamed.
    """
    def keep(primitive: Any, *args: Any, **params: Any):
        if primitive.name in GATHERS and {*rows} & {*axes_of(params["axis_name"])}:
            return not again
        if again and primitive.name in LAID_OUT:
            return False
        return policy(primitive, *args, **params)

    return keep
