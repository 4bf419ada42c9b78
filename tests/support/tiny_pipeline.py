"""A stack of MLPs as stages of a pipeline, with a scale before the first stage that may be trained.

`program_of` compiles any schedule for it and checks loss and gradients against one device.
"""
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from meshbook.parallel.pipeline import Pipeline, circular
from meshbook.sharding import make_mesh


def mlp(w, x_BD):
    return x_BD + jax.nn.gelu(x_BD @ w["in"]) @ w["out"]


@dataclass(frozen=True)
class Stack(Pipeline):
    """Layers of `each`; the loss is half the sum of squares."""

    x_mBD: jax.Array
    scale: jax.Array
    each: object
    embedded: bool  # whether the scale is trained

    def layer(self, w, x_BD, each, shared):
        return self.each(w, x_BD)

    def own(self, i):
        return None, ()

    def enter(self, i):
        return self.scale * self.x_mBD[i]

    def entered(self, dx_BD, i):
        s, _ = self.place
        return jnp.where(s == 0, (dx_BD * self.x_mBD[i]).sum(), 0) if self.embedded else ()

    def leave(self, y_BD, i):
        s, p = self.place
        half = jnp.where(s == p - 1, jnp.square(y_BD).sum() / 2, 0)
        return half, y_BD, 0 * y_BD.sum() if self.embedded else ()


@cache
def drawn(m, b, d, f, layers):
    """(weights, microbatches)."""
    draw = np.random.default_rng(0).normal
    shapes = (layers, d, f), (layers, f, d), (m, b, d)
    w_in, w_out, x_mBD = (draw(size=s).astype(np.float32) for s in shapes)
    return {"in": w_in / d, "out": w_out / f}, x_mBD


def program_of(schedule, p, m, b, d, f, layers, chunks=1, each=mlp, embedded=True):
    """The compiled step of a schedule on p stages, or of `circular`, right as it is checked."""
    weights, x_mBD = drawn(m, b, d, f, layers)
    around = schedule is circular
    pick = lambda w: w[:, 0] if around else w[0, 0]
    put = lambda w: w[:, None] if around else w[None, None]

    def local(w, scale, x_mBD):
        scale = jax.lax.pcast(scale, ("stage",), to="varying")
        stack = Stack("stage", (), x_mBD, scale, each, embedded)
        half, dw, dscale = schedule(stack, stack.own_part(jax.tree.map(pick, w)), m)
        sums = [jax.lax.psum(x, "stage") for x in jax.tree.leaves((half, dscale))]
        return sums, jax.tree.map(put, dw)

    mesh, split = make_mesh((p,), ("stage",)), P(None, "stage")
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        cut = jax.tree.map(lambda w: w.reshape(chunks, p, -1, *w.shape[1:]), weights)
        given = jax.device_put((cut, np.float32(0.7), x_mBD), (
            {"in": split, "out": split}, P(), P()))
        program = jax.jit(jax.shard_map(local, in_specs=(split, P(), P()), out_specs=(P(), split)),
                          ).lower(*given).compile()
        (half, *dscale), grads = jax.device_get(program(*given))
        expected, (dw, dx) = jax.value_and_grad(of_one_device, (0, 1))(
            weights, np.float32(0.7), x_mBD, each)
    np.testing.assert_allclose(half, expected, rtol=1e-5)
    for found, right in zip((*jax.tree.leaves(grads), *dscale), (*jax.tree.leaves(dw), dx)):
        right = np.asarray(right)
        assert np.linalg.norm(found.ravel() - right.ravel()) < 1e-5 * np.linalg.norm(right)
    return program


def of_one_device(weights, scale, x_mBD, each):
    """The loss of all microbatches at once, layer after layer."""
    x = scale * x_mBD
    for at in range(len(weights["in"])):
        x = jax.vmap(lambda x: each(jax.tree.map(lambda w: w[at], weights), x))(x)
    return jnp.square(x).sum() / 2
