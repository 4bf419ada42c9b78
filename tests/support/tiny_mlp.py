"""A two-layer network without a framework, trained by SGD on one device and split on (4, 2)."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from meshbook.proofs import Run

B, D, F = 16, 32, 64
SPECS = {"w_in": P(None, "model"), "w_out": P("model")}


@functools.cache
def mesh_of(shape=(4, 2)):
    return jax.make_mesh(shape, ("batch", "model"), axis_types=(AxisType.Auto,) * 2)


def weights():
    draw = np.random.default_rng(0).normal
    return {"w_in": draw(size=(D, F)).astype(np.float32) / 6,
            "w_out": draw(size=(F, D)).astype(np.float32) / 8}


def put(tree, mesh, specs):
    return jax.device_put(tree, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))


def loss(params, x):
    return jnp.mean((jax.nn.relu(x @ params["w_in"]) @ params["w_out"] - jnp.sin(x)) ** 2)


def step(params, x):
    value, gradients = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), {"loss": value}


STEP = jax.jit(step, donate_argnums=0)
GRADIENTS = jax.jit(jax.grad(loss))
BATCHES = [np.random.default_rng(n).normal(size=(B, D)).astype(np.float32) for n in range(20)]


def plain(**changes):
    one = dict(step=STEP, state=jax.tree.map(jnp.asarray, weights()), gradients=GRADIENTS,
               params=lambda state: state)
    return Run(**(one | changes))


def split(mesh, **changes):
    rows = lambda x: jax.device_put(x, NamedSharding(mesh, P("batch")))
    run = dict(step=lambda state, x: STEP(state, rows(x)), state=put(weights(), mesh, SPECS),
               gradients=lambda state, x: GRADIENTS(state, rows(x)), params=lambda state: state)
    return Run(**(run | changes))
