"""Products of arrays whose tokens are split over a mesh axis: what is gathered, what is scattered.

Between the matmuls of a layer each device has a part of the tokens (sequence parallelism). A
column-parallel product needs all of them, and a row-parallel one leaves sums of which each device
keeps its own tokens. Both are written by hand in a `shard_map`: a reshard would never become a
reduce-scatter on a CPU.

Source: Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models".
"""
from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from meshbook.parallel.overlap import TOKENS, all_gather_matmul, matmul_reduce_scatter
from meshbook.sharding import axes_of, shard_map_over_the_rest

Tokens = Float[Array, "B T ..."]


def products(x: Tokens, weights: list, outs: list, overlapped: bool = False,
             dtype: DTypeLike | None = None):
    """x times each weight, laid out as `outs` say: [(B, T, ...), ...].

    x (B, T, ...); weights (..., ...): their first dimensions are the last ones of x; outs: a
    PartitionSpec for each. Where x has its tokens split over an axis and a result has not, tokens
    are gathered, once for all weights; where a result has them split and x has not, they are
    scattered after the sum; else nothing is done about them. overlapped: piece by piece, in a ring.
    dtype: of results and of devices' parts of them; default that of x.
    Raises ValueError where results differ in how their tokens are split, and for a dtype where
    tokens are gathered or scattered.
    """
    found = {split_tokens(out) for out in outs}
    if len(found) != 1:
        raise ValueError(f"expected results whose tokens are split alike; found {outs}")
    here, there = split_tokens(jax.typeof(x).sharding.spec), found.pop()
    if here == there:
        return [jnp.tensordot(x, w, x.ndim - 2, out_sharding=out, preferred_element_type=dtype)
                for w, out in zip(weights, outs, strict=True)]
    if dtype is not None:
        raise ValueError("tokens are gathered or scattered in the type of the products: expected "
                         f"tensor parallelism for sums in {jnp.dtype(dtype)}")
    if here and there or len(here + there) > 1:
        raise ValueError(f"tokens split over {here} cannot become split over {there}: expected one "
                         "axis on one side")
    specs = [jax.typeof(w).sharding.spec for w in weights]
    if here:
        run = partial(all_gather_matmul, axis=here[0], ring=overlapped)
    else:
        each = partial(matmul_reduce_scatter, axis=there[0], ring=overlapped)
        run = lambda x, weights: [each(x, w) for w in weights]
    x_spec = jax.typeof(x).sharding.spec
    return shard_map_over_the_rest(run, (x_spec, specs), outs)(x, weights)


def split_tokens(spec: P):
    """The mesh axes over which the tokens of an array with this spec are split."""
    return axes_of((*spec.partitions, None, None)[TOKENS])


def gathered_tokens(x: Any):
    """x (B, T, ...), its tokens gathered from the devices that have parts of them.

    Each device then has a part of the gradient, which is summed and scattered here.
    """
    spec = jax.typeof(x).sharding.spec
    axes = split_tokens(spec)
    if not axes:
        return x
    whole = [None if at == TOKENS else rule for at, rule in enumerate(spec.partitions)]
    if jax.sharding.get_abstract_mesh().size == 1:
        return jax.reshard(x, P(*whole))
    gather = partial(jax.lax.all_gather, axis_name=axes, axis=TOKENS, tiled=True, to="reduced")
    out = P(*whole, reduced={*axes, *spec.reduced})
    return shard_map_over_the_rest(gather, (spec,), out)(x)
