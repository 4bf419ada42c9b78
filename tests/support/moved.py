"""Parameters moved a little, so that biases, norms and every other leaf count."""
import jax
import numpy as np


def moved(params, size):
    """The parameters plus seeded noise of this size, each where it lies; none is 0 or 1."""
    random = np.random.default_rng(1)
    return jax.tree.map(lambda x: jax.device_put(
        np.asarray(x) + size * random.normal(size=x.shape).astype(np.float32), x.sharding), params)
