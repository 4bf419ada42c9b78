"""The same step from less memory: activations made twice, or a batch in parts.

Activations wait from the forward to the backward pass. A checkpoint keeps only what came into a
block and computes the rest again (4/3 of the work); microbatches let the rows through in parts,
so that those of one part wait at a time (the same work).

Source: Chen et al. 2016, "Training deep nets with sublinear memory cost".
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Shaped

from meshbook.models.vit import Block, ViT


class CheckpointedBlock(Block):
    """A block that keeps only its input, (B, T, D), for the backward pass."""

    def __call__(
        self, x_BTD: Float[Array, "B T D"], key: jax.Array | None = None
    ):
        return jax.checkpoint(super().__call__)(x_BTD, key)


class CheckpointedViT(ViT):
    """The same ViT, parameter for parameter, of blocks that keep only their input."""

    block = CheckpointedBlock


def in_microbatches(loss: Callable, parts: int):
    """The same mean loss, found in `parts` equal parts of the rows, one after the other.

    loss(params, program, batch, key=None) -> (loss, metrics): see meshbook.training. The
    gradients of a part are made with its loss and added up. On a mesh each device cuts
    its own rows, but gradients are summed along "batch" in every part. Each part draws a
    dropout of its own. Raises ValueError for less than one part, where rows do not divide, and
    for weights, with which parts would not count alike.
    """
    if parts < 1:
        raise ValueError(f"expected 1 or more parts; found {parts}")

    def mean_loss(params, program, batch, key=None):
        cut = {name: in_parts(name, x, parts) for name, x in batch.items()}
        keys = None if key is None else jax.random.split(key, parts)

        # the gradient of a scan would keep what the forward pass of every part leaves behind
        @jax.custom_vjp
        def mean(params):
            one = lambda part: loss(params, program, *part)
            return mean_over(one, parts, (cut, keys))

        def forward(params):
            both = jax.value_and_grad(loss, has_aux=True)
            one = lambda part: both(params, program, *part)
            return mean_over(one, parts, (cut, keys))

        def backward(grads, cotangents):
            return (jax.tree.map(lambda grad: cotangents[0] * grad, grads),)

        mean.defvjp(forward, backward)
        return mean(params)

    return mean_loss


def in_parts(name: str, x: Shaped[Array | np.ndarray, "B ..."], parts: int):
    """Rows (B, ...) as (parts, B / parts, ...), so that no row changes its device."""
    if name == "weight":
        raise ValueError("microbatches need labels that all count; found a batch with weights")
    if x.shape[0] % parts:
        raise ValueError(f"{name}: a batch of {x.shape[0]} rows does not divide into {parts} parts")
    rows = P(*jax.typeof(x).sharding.spec[:1])
    x = jax.lax.reshape(x, (x.shape[0] // parts, parts, *x.shape[1:]), out_sharding=rows)
    return jnp.swapaxes(x, 0, 1)


def mean_over(one: Callable, count: int, parts: Any):
    """The mean of one(part) over the leading axis of every leaf of parts."""
    def add(total, part):
        return jax.tree.map(jnp.add, total, one(part)), None

    first = jax.eval_shape(one, jax.eval_shape(lambda: jax.tree.map(lambda x: x[0], parts)))
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, out_sharding=x.sharding), first)
    total, _ = jax.lax.scan(add, zero, parts)
    return jax.tree.map(lambda x: x / count, total)
