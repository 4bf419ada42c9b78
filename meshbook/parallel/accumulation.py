"""The same step from less memory: a batch that goes through the model in parts.

Activations wait from the forward to the backward pass. Microbatches let the rows through in parts,
so that those of one part wait at a time: the same work, in less memory. Each device adds up the
gradients of its own rows of all parts, and after the last part they are summed over the devices.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Shaped

from meshbook.sharding import axes_of, of_parts, own_parts, with_parts


def in_microbatches(loss: Callable, parts: int):
    """The same mean loss, found in `parts` equal parts of the rows, one after the other.

    loss(params, program, batch, key=None) -> (loss, metrics): see meshbook.training. On a mesh each
    device cuts its own rows. What the rows' axes split of the parameters is gathered once, before
    the first part, and their gradients are summed over these axes once, after the last, if the
    model leaves them partial sums, as the decoder does (see sharding.reduced and beside); gradients
    of what it sums at once are summed in every part. Experts that are split over an axis of rows
    stay split. Each part draws a dropout of its own, and what a loss finds of a whole batch, such
    as how evenly experts are used, it finds of each part. Raises ValueError for less than one part,
    where rows do not divide, and for weights, with which parts would not count alike.
    """
    if parts < 1:
        raise ValueError(f"expected 1 or more parts; found {parts}")

    def mean_loss(params, program, batch, key=None):
        cut = {name: in_parts(name, x, parts) for name, x in batch.items()}
        keys = None if key is None else jax.random.split(key, parts)

        # the gradient of a scan would keep what the forward pass of every part leaves behind
        def mean(params):
            one = lambda part: loss(params, program, *part)
            return shared(sum_over(one, (cut, keys)), parts)

        def forward(params):
            rows, own = split_rows(program), own_parts(params)
            rules = getattr(program.model(params), "sharding", None)
            whole = own if program.lives else jax.tree.map_with_path(
                lambda path, w: whole_in(w, rows, used_split(path, rules)), own)

            def of_part(whole, part):
                given = with_parts(params, whole)
                return loss(given, replace(program, waits=True), *part)

            both = jax.value_and_grad(of_part, has_aux=True)
            found, grads = sum_over(lambda part: both(whole, part), (cut, keys))
            found = jax.tree.map(lambda x: jax.reshard(x, P()), found)
            grads = jax.tree.map(lambda grad, w: jax.reshard(grad, of_gradient(w)), grads, own)
            found, grads = shared((found, grads), parts)
            return found, of_parts(params, grads)

        return with_made_gradients(mean, forward, params)

    return mean_loss


def with_made_gradients(mean: Callable, forward: Callable, params: Any):
    """mean(params), a loss and metrics, whose gradients forward(params) finds together with them.

    forward(params) -> (what mean returns, gradients of the loss).
    """
    def backward(grads, cotangents):
        return (jax.tree.map(lambda grad: scaled(grad, cotangents[0]), grads),)

    mean = jax.custom_vjp(mean)
    mean.defvjp(forward, backward)
    return mean(params)


def scaled(grad: Float[Array, "..."], factor: Float[Array, ""]):
    """A gradient, also a partial sum, times a number."""
    waits = jax.typeof(grad).sharding.spec.unreduced
    return grad * (jax.reshard(factor, P(reduced=waits)) if waits else factor)


def split_rows(program: Any):
    """The mesh axes that split rows here: not those of one device, nor those of a shard_map."""
    mesh = jax.sharding.get_abstract_mesh()
    return {axis for axis in axes_of(program.rows)
            if mesh.shape[axis] > 1 and axis not in mesh.manual_axes}


def of_gradient(w: Float[Array, "..."]):
    """The sharding of a parameter's gradient: a partial sum where the parameter is `reduced`."""
    spec = jax.typeof(w).sharding.spec
    return P(*spec.partitions, unreduced=spec.reduced)


def used_split(path: tuple, rules: Any):
    """The mesh axes that split a parameter while the model uses it, as those of experts do.

    By the letters at the end of its name; none where the model has no rules (None).
    """
    letters = jax.tree_util.keystr(path[-1:], simple=True).rpartition("_")[2]
    return {axis for letter in letters for axis in axes_of(rules.activations.get(letter))
            } if rules else set()


def whole_in(w: Float[Array, "..."], rows: set[str], stays: set[str]):
    """A parameter as all parts use it: whole along the axes of rows, where its gradient waits.

    stays: axes that split it in use; devices along these have gradients of their own.
    """
    spec = jax.typeof(w).sharding.spec
    gone = rows - stays
    kept = [tuple(axis for axis in axes_of(rule) if axis not in gone) for rule in spec.partitions]
    waits = rows - {axis for axes in kept for axis in axes}
    return jax.reshard(w, P(*(axes or None for axes in kept), reduced=waits | spec.reduced))


def in_parts(name: str, x: Shaped[Array | np.ndarray, "B ..."], parts: int):
    """Rows (B, ...) as (parts, B / parts, ...), so that no row changes its device."""
    if name == "weight":
        raise ValueError("microbatches need labels that all count; found a batch with weights")
    if x.shape[0] % parts:
        raise ValueError(f"{name}: a batch of {x.shape[0]} rows does not divide into {parts} parts")
    rows = P(*jax.typeof(x).sharding.spec[:1])
    mesh = jax.sharding.get_abstract_mesh()
    ways = math.prod(mesh.shape[axis] for rule in rows for axis in axes_of(rule))
    if x.shape[0] // parts % ways:
        raise ValueError(f"{name}: {x.shape[0] // parts} rows, one of {parts} parts of a batch, do "
                         f"not divide over {ways} devices")
    x = jax.lax.reshape(x, (x.shape[0] // parts, parts, *x.shape[1:]), out_sharding=rows)
    return jnp.swapaxes(x, 0, 1)


def sum_over(one: Callable, parts: Any):
    """The sum of one(part) over the leading axis of every leaf of parts, of one's types."""
    def add(total, part):
        return jax.tree.map(jnp.add, total, one(part)), None

    first = jax.eval_shape(one, jax.eval_shape(lambda: jax.tree.map(lambda x: x[0], parts)))
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, out_sharding=x.sharding), first)
    total, _ = jax.lax.scan(add, zero, parts)
    return total


def shared(total: Any, count: int):
    """A sum of `count` parts as their mean."""
    return jax.tree.map(lambda x: scaled(x, jnp.float32(1 / count)), total)
