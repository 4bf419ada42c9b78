"""Matmuls in a ring of any number of devices: values, gradients of any cotangent, bytes sent."""
import math

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from properties import examples

from meshbook import proofs
from meshbook.parallel.overlap import all_gather_matmul, matmul_reduce_scatter
from meshbook.sharding import make_mesh

WAYS = {"plain": {"ring": False}, "ring": {}, "both": {"bidirectional": True}}
TOKENS, SUMMED, COLUMNS = P(None, "ring"), P(None, None, "ring"), P("ring")


@st.composite
def products(draw):
    """(devices, way, type, tokens, dimensions summed over, dimensions of each weight's results).

    The first of the dimensions that are split is of one device.
    """
    few = st.sampled_from([2, 3, 1])
    several = st.lists(few, min_size=1, max_size=2)
    return (draw(st.sampled_from([3, 5, 2, 8, 7, 6, 4, 1])), draw(st.sampled_from(sorted(WAYS))),
            draw(st.sampled_from(["float32", "bfloat16"])), draw(st.tuples(few, few)),
            draw(several), draw(st.lists(several, min_size=1, max_size=3)), draw(several))


def split(sizes, n):
    return sizes[0] * n, *sizes[1:]


def transposed(x, w, dy):
    """The gradients of x (B, T, ...) and w of their product, by that of the product."""
    last = tuple(range(x.ndim - 2, w.ndim))
    of_x = np.tensordot(dy, w, (tuple(range(2, dy.ndim)), last))
    return of_x, np.tensordot(x, dy, ((0, 1), (0, 1)))


def close(found, expected, dtype):
    """Whether all is of this type, and as near as its sums of a few terms are."""
    assert found.dtype == dtype
    rounding = 2e-6 if dtype == "float32" else 2e-2
    assert np.linalg.norm(np.float64(found) - expected) <= rounding * np.linalg.norm(expected)


@examples(6)
@given(products(), st.integers(0, 2 ** 32 - 1))
def test_products_gradients_and_bytes_are_those_of_one_device(drawn, seed):
    n, way, dtype, (B, t), inner, outers, result = drawn
    random = np.random.default_rng(seed)
    normal = lambda *shape: np.asarray(jnp.asarray(random.normal(size=shape), dtype))
    T, how = n * t, WAYS[way]
    x, weights = normal(B, T, *inner), [normal(*inner, *split(outer, n)) for outer in outers]
    dys = [normal(B, T, *split(outer, n)) for outer in outers]
    h, v = normal(B, T, *split(inner, n)), normal(*split(inner, n), *result)
    dz = normal(B, T, *result)

    def local(x, weights, dys, h, v, dz):
        ys, back = jax.vjp(lambda *given: all_gather_matmul(*given, "ring", **how), x, weights)
        z, back_too = jax.vjp(lambda *given: matmul_reduce_scatter(*given, "ring", **how), h, v)
        return ys, *back(dys), z, *back_too(dz)

    columns = P(*[None] * len(inner), "ring")
    specs = TOKENS, columns, SUMMED, SUMMED, COLUMNS, TOKENS
    mesh = make_mesh((n,), ("ring",))
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        put = lambda x, spec: jax.device_put(x, jax.tree.map(lambda _: spec, x))
        arguments = [put(x, spec) for x, spec in zip(
            (x, weights, dys, h, v, dz), specs, strict=True)]
        out = SUMMED, TOKENS, columns, TOKENS, SUMMED, COLUMNS
        program = jax.jit(jax.shard_map(local, in_specs=specs, out_specs=out)).lower(
            *arguments).compile()
        ys, dx, dweights, z, dh, dv = jax.device_get(program(*arguments))

    x, weights, dys, h, v, dz = jax.tree.map(np.float64, (x, weights, dys, h, v, dz))
    expected = [transposed(x, w, dy) for w, dy in zip(weights, dys, strict=True)]
    for y, dw, w, (_, of_w) in zip(ys, dweights, weights, expected, strict=True):
        close(y, np.tensordot(x, w, len(inner)), dtype)
        close(dw, of_w, dtype)
    close(dx, sum(of_x for of_x, _ in expected), dtype)
    close(z, np.tensordot(h, v, len(inner)), dtype)
    for found, right in zip((dh, dv), transposed(h, v, dz), strict=True):
        close(found, right, dtype)

    if dtype == "float32":  # a CPU's compiler sends bfloat16 as float32
        there_and_back = 2 * (math.prod(inner) + math.prod(result))
        sent = (n - 1) * B * t * there_and_back * 4
        assert math.isclose(proofs.collectives(program, mesh).wire("ring"), sent, abs_tol=1e-6)
