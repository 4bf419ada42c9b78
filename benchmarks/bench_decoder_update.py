"""optax.adamw's update of the decoder's parameters against others that give the same numbers.

One device, gradients at hand, parameters and moments donated, in turns in one process. An update
reads parameters, gradients and two moments and writes all but the gradients: 7 numbers a parameter.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.decoder_runs import (
    BETAS, DECAY, RATE, adamw, begin, fresh_state, in_turns, middle, rows_of
)
from meshbook.training import decayed

ROUNDS, LAYERS, EPSILON = 15, 12, 1e-8
OPTAX, APART = "optax.adamw, layers stacked", "optax.adamw, a leaf for each layer"
LEAF, VECTOR = "fused, layers stacked", "fused, in one vector"


def in_one_expression(step, decays, p, g, m, v):
    """AdamW of one array: (parameters, first and second moments)."""
    one, two = BETAS
    m, v = one * m + (1 - one) * g, two * v + (1 - two) * g * g
    change = m / (1 - one**step) / (jnp.sqrt(v / (1 - two**step)) + EPSILON)
    return p - RATE * (change + DECAY * decays * p), m, v


def fused(params, grads, state):
    """One step of all leaves, each in one expression."""
    step, m, v = state
    decays = decayed(params)
    both = jax.tree.map(partial(in_one_expression, step + 1), decays, params, grads, m, v)
    three = jax.tree.structure((0, 0, 0))
    params, m, v = jax.tree.transpose(jax.tree.structure(decays), three, both)
    return params, (step + 1, m, v)


def zeros(params):
    """The state with which `fused` begins."""
    return jnp.zeros((), jnp.int32), *(jax.tree.map(jnp.zeros_like, params) for _ in range(2))


def by_optax(params, grads, state):
    """One step as the book does it."""
    updates, state = adamw().update(grads, state, params)
    return optax.apply_updates(params, updates), state


def by_layer(params):
    """The same parameters with a leaf for each layer."""
    (stacked,) = params["layers"].values()
    count = len(jax.tree.leaves(stacked)[0])
    return params | {"layers": {str(n): jax.tree.map(lambda x: x[n], stacked)
                                for n in range(count)}}


def joined(params):
    """Two vectors, of what decays and of what does not, by names that say so."""
    leaves = list(zip(jax.tree.leaves(params), jax.tree.leaves(decayed(params)), strict=True))
    vector = lambda wanted: jnp.concatenate([x.ravel() for x, pulled in leaves if pulled == wanted])
    return {"w_decaying": vector(True)[None], "b_others": vector(False)}


def ways(params, grads):
    """{name: (function of (parameters, gradients, state), its arguments)}; all donate but grads."""
    apart, vector = by_layer(params), joined(params)
    return {
        OPTAX: (by_optax, params, grads, adamw().init(params)),
        APART: (by_optax, apart, by_layer(grads), adamw().init(apart)),
        LEAF: (fused, params, grads, zeros(params)),
        VECTOR: (lambda p, g, s: fused(p, joined(g), s), vector, grads, zeros(vector))}


class Updates:
    """Updates by the same gradients, one after the other: updates(count)."""

    def __init__(self, function, params, grads, state):
        self.params, self.state = jax.tree.map(jnp.copy, (params, state))
        self.grads = grads
        self.program = jax.jit(function, donate_argnums=(0, 2)).lower(
            self.params, grads, self.state).compile()

    def __call__(self, count):
        for _ in range(count):
            self.params, self.state = self.program(self.params, self.grads, self.state)
        jax.block_until_ready(self.params)


def contestants(config):
    """{name: Updates}; three of each gave the same parameters."""
    params = fresh_state(config).params
    random = np.random.default_rng(0)
    grads = jax.tree.map(
        lambda x: jnp.asarray(random.normal(size=x.shape), x.dtype), params)
    found = {name: Updates(*way) for name, way in ways(params, grads).items()}
    for updates in found.values():
        updates(3)
    same = {OPTAX: lambda params: params, APART: by_layer, LEAF: lambda params: params,
            VECTOR: joined}
    for name, updates in found.items():
        expected = same[name](found[OPTAX].params)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7),
                     updates.params, expected)
    return found


def measured(config, rounds=ROUNDS):
    """Rows: each way, its share of optax's time, and the bytes a second that this is."""
    found = contestants(config)
    count = sum(leaf.size for leaf in jax.tree.leaves(found[OPTAX].params))
    times = in_turns(found, rounds, count=4)
    notes = {name: [f"{len(jax.tree.leaves(updates.params))} leaves, {28 * count / 1e6:.0f} MB, "
                    f"{28 * count / min(times[name]) / 1e9:.1f} GB/s at best"]
             for name, updates in found.items()}
    return [row | {"unit": "ms an update"} for row in rows_of(times, OPTAX, notes=notes)]


def run():
    """One size, of more layers."""
    begin(1)
    config, _ = middle()
    return measured(replace(config, layers=LAYERS))


if __name__ == "__main__":
    for row in run():
        print(row)
