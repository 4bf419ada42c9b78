"""The loss of a decoder with experts, and an optimizer that balances its experts by their biases.

Both keep experts evenly loaded, in two ways. An auxiliary loss pulls the router's scores. A bias of
each expert shifts the choice alone: no loss has a gradient with respect to it, so in its place in
the tree of gradients the experts' loads travel to the optimizer, which moves it.

Sources: Fedus et al. 2022 (the auxiliary loss); Wang et al. 2024 (the bias).
"""
from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from meshbook.models.losses import loss_of, model_and_inputs
from meshbook.parallel.routing import update_bias
from meshbook.sharding import varies, varying
from meshbook.training.state import Program, TrainState

BIAS = "b_choice_C"  # the name of the biases that balance


def balanced_loss(params: Any, program: Program, batch: Mapping[str, Array | np.ndarray],
                  key: jax.Array | None = None):
    """Mean cross-entropy (nats) plus the auxiliary loss of every layer, and a batch's metrics.

    A `loss` for meshbook.training like language_loss, for decoders with experts. Metrics: loss, the
    cross-entropy alone; accuracy; balance, the mean over layers of routing.balance_loss; dropped,
    the share of choices without a slot. Raises ValueError where a bias would be trained by an
    optimizer that is not `balanced`.
    """
    model, given = model_and_inputs(params, program, batch, key)
    if key is not None:
        check_balanced(model, program)
    hidden_BTD, loads = model.hidden_and_loads(*given)
    loss, metrics = loss_of(hidden_BTD, model, program, batch)
    added = model.config.experts.auxiliary * loads.balance.sum()
    if model.config.experts.biased:
        biases_LC = model.sharding.gather("LC", biases_of(model), jnp.float32)
        added = added + without_value(biases_LC, loads.before_E)
    metrics |= {"balance": loads.balance.mean(),
                "dropped": 1 - loads.after_E.sum() / loads.before_E.sum()}
    waits = jax.typeof(loss).sharding.spec.unreduced
    shared = jax.tree.map(lambda x: partial_of(x, waits), (added, metrics))
    return loss + shared[0], shared[1]


def partial_of(x: Float[Array, ""], axes: frozenset):
    """A number that all devices have, as a partial sum over these axes; a partial sum as it is."""
    if not axes or jax.typeof(x).sharding.spec.unreduced:
        return x
    return jax.reshard(x, P(unreduced=axes))


def without_value(x: Float[Array, "..."], gradient: Float[Array, "..."]):
    """0, whose gradient with respect to x is this one."""
    total = (x * jax.lax.stop_gradient(gradient)).sum()
    return total - jax.lax.stop_gradient(total)


@jax.custom_vjp
def charged(x: Float[Array, "..."], costs: Any, share: Float[Array, ""]):
    """x, with whose gradient comes that of this share of all costs, which nothing else knows.

    For what a layer adds to the loss where its result alone goes on. costs: a tree of numbers.
    """
    return x


def charged_backward(kept: tuple, dx: Float[Array, "..."]):
    """dx, and the share as the gradient of every cost."""
    costs, share = kept
    return dx, jax.tree.map(lambda cost: varying(share, varies(cost)), costs), jnp.zeros_like(share)


charged.defvjp(lambda x, costs, share: (x, (costs, share)), charged_backward)


def costs_of(layer: Any, loads: Any):
    """What a layer of experts adds to the loss inside a shard_map: numbers, for `charged`."""
    experts, costs = layer.experts, {}
    if experts.sizes.auxiliary:
        costs["balance"] = experts.sizes.auxiliary * loads.balance
    if experts.sizes.biased:  # the loads, once
        first = jax.lax.axis_index(experts.manual_axes) == 0
        bias_E = experts.b_choice_C[...]
        costs["bias"] = without_value(bias_E, jnp.where(first, loads.before_E, 0))
    return costs


def biases_of(model: Any):
    """The biases of all layers with experts, (L, E)."""
    return model.layers[-1].experts.b_choice_C[...]


class Balanced(optax.GradientTransformation):
    """An optimizer that knows that a bias's gradient is loads: see `balanced`."""


def check_balanced(model: Any, program: Program):
    """ValueError for a model with biases whose loads some optimizer would take for gradients.

    They are hundreds: they would be most of the global norm, so that clipping leaves nothing of
    the gradients, and moments of Adam would move all biases alike.
    """
    sizes = getattr(model.config, "experts", None)
    if sizes and sizes.biased and not isinstance(program.optimizer, Balanced):
        raise ValueError("the experts' biases are moved by their loads, not by gradients: expected "
                         "an optimizer of meshbook.models.balanced_loss.balanced(optimizer), "
                         "around everything else; found another")


def balanced(optimizer: optax.GradientTransformation, rate: float = 1e-3):
    """An optimizer that leaves the experts' biases to routing.update_bias, at this rate.

    What it is given as their gradient are loads (L, E); the optimizer itself sees zeros there, and
    so does everything in it: a clipping's norm, Adam's moments. It goes around all of a chain.
    """
    def moved(path, update, loads_LE):
        if not is_bias(path):
            return update
        return jax.vmap(partial(update_bias, rate=rate))(jnp.zeros_like(update), loads_LE)

    def update(gradients, state, params=None):
        rest = jax.tree_util.tree_map_with_path(
            lambda path, g: jnp.zeros_like(g) if is_bias(path) else g, gradients)
        updates, state = optimizer.update(rest, state, params)
        return jax.tree_util.tree_map_with_path(moved, updates, gradients), state

    return Balanced(optimizer.init, update)


def is_bias(path: tuple):
    """Whether a leaf with this path is the biases that balance."""
    return path[-1].key == BIAS


@jax.jit
def loads_of(state: TrainState, batch: Mapping[str, Array | np.ndarray]):
    """How a batch uses the experts of every layer: Loads (L, E), without dropout."""
    model, given = model_and_inputs(state.params, state.program, batch, None)
    return model.hidden_and_loads(*given)[1]
