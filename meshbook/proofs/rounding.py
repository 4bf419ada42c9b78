"""How much of a run's numbers is rounding: what changes when its inputs are nudged by one rounding.

Devices add up in another order, so that two right programs differ by their rounding. How much that
is depends on the program: the gradient of a leaf that is truly zero is nothing else. So it is
measured: every weight is changed by the last digit of its type, up or down at random, and what
then comes out is compared with what came out before.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshbook.proofs.shards import wide
from meshbook.proofs.verdicts import named_leaves

NUDGES = 3
FACTOR = 10  # sums in another order were up to twice as far off as such nudges move them


def copied(tree: Any):
    """The same tree in memory of its own, so that a step that donates it takes only the copy."""
    copy = lambda x: jax.device_put(x, x.sharding, may_alias=False)  # compiles nothing
    return jax.tree.map(lambda leaf: copy(leaf) if isinstance(leaf, jax.Array) else leaf, tree)


def nudged(tree: Any, seed: int, step: float = 0.0):
    """A copy with every floating-point array changed by one rounding, up or down at random.

    step: by how much of each number, where that is more than a rounding of the array's own type.
    Shardings stay; zeros, whole numbers and keys do, too.
    """
    draw = np.random.default_rng(seed)

    def changed(leaf):
        if not isinstance(leaf, jax.Array) or not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return leaf
        size = max(float(jnp.finfo(leaf.dtype).eps), step)
        whole = wide(leaf) * (1 + size * draw.choice([-1, 1], leaf.shape))
        return jax.device_put(whole.astype(leaf.dtype), leaf.sharding)

    return jax.tree.map(changed, copied(tree))


def rounding_of(found: Callable, state: Any, base: Mapping[str, np.ndarray], step: float = 0.0):
    """Measure how far each leaf of what a function makes of a state moves with nudged states.

    found(state) -> a pytree of arrays; it may donate its state. base: its leaves for the state as
    it is, on the host by name. step: as of `nudged`.
    Returns {name of a leaf: the norm of its largest difference}.
    """
    moved = dict.fromkeys(base, 0.0)
    for seed in range(NUDGES):
        other = {name: wide(leaf) for name, leaf in named_leaves(
            found(nudged(state, seed, step))).items()}
        for name in moved:
            moved[name] = max(moved[name], float(np.linalg.norm(other[name] - base[name])))
    return moved
