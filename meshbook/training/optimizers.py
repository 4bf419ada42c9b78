"""The optimizers of both models, and what can be found in an optimizer's state."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.serialization import to_state_dict
from jaxtyping import Array


def decayed(params: Any):
    """Which parameters weight decay pulls towards 0: matrices, not norms and biases.

    A bias of the attention has several dimensions, and so has what layers stack: names decide too.
    """
    def is_matrix(path, x):
        kind = path[-1].key.partition("_")[0]
        return x.ndim > 1 and kind not in ("b", "scale", "shift")

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def recipe(steps: int, peak: int | float = 4e-3):
    """The book's optimizer: AdamW, whose learning rate warms up and falls again.

    steps: how many there will be; the rate rises to peak during the first tenth
    and then follows half a cosine down to 0. Norms and biases do not decay.
    Sources: Loshchilov and Hutter 2019 (AdamW) and 2017 (the cosine).
    """
    rate = optax.warmup_cosine_decay_schedule(0, peak, steps // 10, steps)
    return optax.adamw(rate, b2=0.99, weight_decay=0.05, mask=decayed)


def clipped(most: int | float):
    """Gradients whose global norm is above `most`, scaled down to it.

    As optax.clip_by_global_norm does, but the norm before stays in the state, as
    `gradient_norm`: to ask for it a second time would be a second all-reduce.
    """
    def update(gradients, state, params=None):
        norm = optax.tree.norm(gradients)
        share = jnp.minimum(1, most / norm)  # a norm of 0 makes it 1
        gradients = jax.tree.map(lambda g: g * share.astype(g.dtype), gradients)
        return gradients, {"gradient_norm": norm}

    return optax.GradientTransformation(
        lambda params: {"gradient_norm": jnp.zeros(())}, update
    )


def language_recipe(
    steps: int, peak: int | float = 2e-3, most: int | float = 1.0
):
    """The same for a language model: gradients of a norm above `most` are cut to it.

    The norm before the cut stays in the optimizer's state: `gradient_norm`.
    """
    return optax.chain(clipped(most), recipe(steps, peak))


def found_in(opt_state: Mapping, name: str):
    """What stands under this name anywhere in an optimizer's state, or None."""
    for key, value in opt_state.items():
        found = value if key == name else None
        if found is None and isinstance(value, dict):
            found = found_in(value, name)
        if found is not None:
            return found


def weights_of_moments(optimizer: optax.GradientTransformation, name: str):
    """(decay, share) of first moments: a step makes decay·m + share·gradient of m.

    name: "mu" (Adam), whose share is what the decay leaves, or "trace" (momentum),
    which takes all of the gradient. The decay is found by two steps on a gradient of 1;
    the share is not, or an optimizer that scales gradients would hide it.
    """
    params = gradient = {"w_DF": jnp.ones((1, 1))}
    state, moments = optimizer.init(params), []
    for _ in range(2):
        state = optimizer.update(gradient, state, params)[1]
        found = found_in(to_state_dict(state), name)
        moments.append(found["w_DF"].item())
    decay = moments[1] / moments[0] - 1
    return decay, 1 - decay if name == "mu" else 1.0


@jax.jit
def last_gradients(
    before: Any, after: Any, decay: float | Array, share: float | Array
):
    """(gradients, their global norm) of a step between whose moments these are."""
    gradients = jax.tree.map(lambda m, n: (n - decay * m) / share, before, after)
    return gradients, optax.tree.norm(gradients)
