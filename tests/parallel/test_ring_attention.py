"""The ring's memory and its numerics: what it keeps, bfloat16, scores of any size."""
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention import Ring, apart, drawn, expected

from meshbook.parallel import blockwise
from meshbook.parallel.context import ring_attention
from meshbook.parallel.overlap import sent

t, B, H, K = 32, 2, 8, 8
u = 4 * B * t * H * K


def obvious_ring(q, k, v, segments=None):
    """The ring without a gradient by hand: right, and it keeps all devices' keys."""
    n, me = jax.lax.axis_size("context"), jax.lax.axis_index("context")
    top = jnp.full_like(q[..., 0], blockwise.LOWEST)
    total, found, at = jnp.zeros_like(top), jnp.zeros_like(q), jnp.arange(q.shape[1])
    for step in range(n):
        sees = me * len(at) + at[:, None] >= (me - step) % n * len(at) + at
        scores = jnp.einsum("bthk,bshk->bhts", q, k) / q.shape[-1] ** 0.5
        scores = jnp.where(sees, scores, blockwise.LOWEST)
        highest = jnp.maximum(top, scores.max(-1).swapaxes(1, 2))
        weights = jnp.where(sees, jnp.exp(scores - highest.swapaxes(1, 2)[..., None]), 0)
        scale = jnp.exp(top - highest)
        found = found * scale[..., None] + jnp.einsum("bhts,bshk->bthk", weights, v)
        total, top = total * scale + weights.sum(-1).swapaxes(1, 2), highest
        if step < n - 1:
            k, v = sent(k, "context", 1), sent(v, "context", 1)
    return found / total[..., None]


def temporaries(method, ways, **how):
    """Bytes of a device's temporaries in units of u, with t tokens on each device."""
    program = Ring(method, ways, drawn(t * ways, K=K)[0], **how).program
    return program.memory_analysis().temp_size_in_bytes / u


@pytest.mark.parametrize("zigzagged", [False, True])
def test_temporaries_do_not_grow_with_devices(zigzagged):
    few, many = (temporaries(ring_attention, ways, zigzagged=zigzagged, block=8)
                 for ways in (4, 8))
    assert many < 1.02 * few


def test_without_a_gradient_by_hand_they_do():
    arrays, _ = drawn(4 * t, K=K)
    assert apart(Ring(obvious_ring, 4, arrays).found(), expected(arrays, None)) < 1e-6
    assert temporaries(obvious_ring, 8) > 1.7 * temporaries(obvious_ring, 4)


def rounded(arrays):
    """float32 arrays of numbers that bfloat16 has."""
    return [np.asarray(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32)) for x in arrays]


@pytest.fixture(scope="module")
def half():
    """(a ring of bfloat16, what one device finds in float32 for the same numbers)."""
    arrays = rounded(drawn(8 * t, K=K)[0])
    ring = Ring(ring_attention, 8, [x.astype(jnp.bfloat16) for x in arrays], zigzagged=True,
                block=4)
    return ring, expected(arrays, None)


def test_bfloat16_is_rounded_at_the_end_and_not_in_every_block(half):
    """64 blocks: a sum that were rounded after each would be many times as far off."""
    ring, right = half
    found = ring.found()
    assert {x.dtype for x in found} == {jnp.dtype(jnp.bfloat16)}
    assert apart(found, right) < 4e-3  # 2^-8, half a unit in the last place


def test_keys_travel_in_bfloat16_and_sums_of_gradients_in_float32(half):
    """As JAX hands it to the compiler: a CPU's makes float32 of all of them."""
    text = half[0].lowered.as_text()
    sends = re.findall(r"collective_permute.*tensor<[\dx]+x(\w+)>$", text, re.M)
    # both passes begin and have a loop; the backward pass has a turn of its own before its loop,
    # and sums travel in that loop, in the last turn and home
    assert (sends.count("bf16"), sends.count("f32")) == (2 * (2 + 3), 2 * 3)


@pytest.mark.parametrize("shift", [0.0, 1e4, -1e4])
def test_scores_of_any_size_give_finite_numbers(shift):
    """Every score moved by as much: weights stay what they are, and no exponential overflows."""
    arrays, segments = drawn(4 * 8, documents=True)
    q, k, *rest = arrays
    q, k = (np.concatenate([x, np.full_like(x[..., :1], edge)], -1)
            for x, edge in ((q, shift), (k, 1.0)))
    arrays = [q, k, *rest]
    found = Ring(ring_attention, 4, arrays, segments, block=4).found()
    assert all(np.isfinite(x).all() for x in found)
    assert apart(found[:1], expected(arrays, segments)[:1]) < (1e-6 if shift == 0 else 1e-2)


def blocks(*shape):
    return jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.float32)


def products_in(jaxpr):
    """The types of all products of a program: (left, right, result)."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield tuple(x.aval.dtype.name for x in (*equation.invars, *equation.outvars))
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                yield from products_in(getattr(inner, "jaxpr", inner))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_all_products_have_factors_of_the_given_type_and_results_in_float32(dtype):
    queries = blocks(1, 2, 1, 3, 4, 2).astype(dtype), jnp.arange(4)[None], None
    keys = blocks(1, 2, 1, 5, 2).astype(dtype), jnp.arange(5)[None], None
    values, pairs = blocks(1, 2, 1, 5, 6).astype(dtype), jnp.array([[0, 0]])
    dy, of_each = blocks(1, 2, 1, 3, 4, 6).astype(dtype), blocks(1, 2, 1, 3, 4)
    forward = jax.make_jaxpr(lambda: blockwise.look(
        blockwise.begun(queries, values), queries, keys, values, pairs))()
    backward = jax.make_jaxpr(lambda: blockwise.gradient(
        jnp.zeros(queries[0].shape), queries, keys, values, (of_each, dy, of_each), pairs))()
    for program, count in (forward, 2), (backward, 5):
        assert list(products_in(program.jaxpr)) == count * [(dtype, dtype, "float32")]


def test_a_block_of_which_nothing_is_seen_changes_nothing_and_is_no_nan():
    queries = blocks(1, 1, 1, 1, 4, 2), jnp.arange(4)[None], None
    keys = blocks(1, 1, 1, 4, 2), jnp.arange(4)[None] + 2, None  # two queries see nothing
    values = blocks(1, 1, 1, 4, 3)
    pairs = jnp.array([[0, 0]])
    carried = blockwise.look(blockwise.begun(queries, values), queries, keys, values, pairs)
    y, log_sum = blockwise.finished(carried)
    assert np.isfinite(log_sum).all() and not np.asarray(y)[0, 0, 0, 0, :2].any()
    ahead = keys[0], keys[1] + 10, None
    again = blockwise.look(carried, queries, ahead, values, pairs)
    for before, after in zip(carried, again, strict=True):
        np.testing.assert_array_equal(before, after)


def test_the_softmax_is_that_of_all_blocks_in_any_order():
    queries = blocks(1, 1, 1, 1, 4, 2), jnp.arange(4)[None] + 20, None
    keys = blocks(3, 1, 1, 4, 2), jnp.arange(12).reshape(3, 4), None
    values = blocks(3, 1, 1, 4, 3)
    found = []
    for order in ([0, 1, 2], [2, 0, 1]):
        pairs = jnp.array([[0, j] for j in order])
        carried = blockwise.look(blockwise.begun(queries, values), queries, keys, values, pairs)
        found.append(blockwise.finished(carried)[0][0, 0, 0, 0])
    scores = queries[0][0, 0, 0, 0] @ keys[0].reshape(12, 2).T / 2 ** 0.5
    right = jax.nn.softmax(scores) @ values.reshape(12, 3)
    for each in found:
        np.testing.assert_allclose(each, right, rtol=1e-5, atol=1e-6)
