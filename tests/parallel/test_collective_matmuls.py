"""Matmuls in a ring: the values and gradients of plain ones, their work, and what is sent."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshbook import proofs
from meshbook.hlo import module
from meshbook.parallel.overlap import all_gather_matmul, matmul_reduce_scatter, put_together
from meshbook.sharding import make_mesh, reduced, shard_map_over_the_rest

B, T, D, F = 4, 120, 6, 120
RANDOM = np.random.default_rng(0)
X, W, V = (RANDOM.normal(size=shape).astype(np.float32) for shape in ((B, T, D), (D, F), (F, D)))
TARGET = RANDOM.normal(size=(B, T, D)).astype(np.float32)
WAYS = {"plain": {"ring": False}, "ring": {}, "both": {"bidirectional": True}}
TOKENS, HIDDEN = P("batch", "model"), P("batch", None, "model")


def loss_of(y):
    return jnp.square(y - TARGET).sum()


def plain(x, w, v):
    return loss_of(jnp.tanh(x @ w) @ v)


@functools.cache
def compiled(n, way, dtype="float32"):
    """(program of loss and gradients of an MLP, its arguments, mesh)."""
    mesh, options = make_mesh((8 // n, n)), WAYS[way]

    def run(function, x, w, specs, out):
        specs = specs, jax.typeof(w).sharding.spec
        function = functools.partial(function, axis="model", **options)
        return shard_map_over_the_rest(function, specs, out)(x, w)

    def loss(x, w, v):
        w, v = (reduced(each, "batch") for each in (w, v))
        h = jnp.tanh(run(all_gather_matmul, x, w, TOKENS, HIDDEN))
        return loss_of(run(matmul_reduce_scatter, h, v, HIDDEN, TOKENS))

    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        given = [jax.device_put(x.astype(dtype), spec) for x, spec in (
            (X, TOKENS), (W, P(None, "model")), (V, P("model")))]
        program = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(*given).compile()
    return program, given, mesh


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_loss_and_gradients_are_those_of_one_device_and_nothing_is_done_twice(n, way):
    program, given, mesh = compiled(n, way)
    expected = jax.value_and_grad(plain, (0, 1, 2))(X, W, V)
    for one, other in zip(jax.tree.leaves(program(*given)), jax.tree.leaves(expected)):
        assert np.linalg.norm(one - other) <= 1e-6 * np.linalg.norm(other)
    assert proofs.work(program) * mesh.size == 3 * 2 * 2 * B * T * D * F


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_four_times_all_pieces_but_the_own_are_sent(n, way):
    program, _, mesh = compiled(n, way)
    u = B // mesh.shape["batch"] * T * D * 4  # of all tokens of a device's examples
    moved = proofs.collectives(program, mesh)
    if way == "plain":
        assert moved["all-gather", ("model",)] == (2, 2 * u)
        assert moved["reduce-scatter", ("model",)] == (2, 2 * u // n)
    else:
        assert moved["collective-permute", ("model",)] == (4 * (n - 1), 4 * (n - 1) * u // n)
    small = moved["all-reduce", ("model",)].bytes if ("all-reduce", ("model",)) in moved else 0
    ours = moved.wire("model") - small * 2 * (n - 1) / n
    assert ours == pytest.approx(4 * (n - 1) * u / n, rel=1e-9)


def longest_chain(program):
    """How many permutes wait for one another."""
    entry, depth = module.parse(program).computations, {}
    for computation in entry.values():
        for name, each in computation.instructions.items():
            before = max((depth.get(other, 0) for other in each.operands), default=0)
            depth[name] = before + (each.opcode == "collective-permute")
    return max(depth.values())


def test_in_both_directions_half_as_many_steps_wait_for_each_other():
    found = {}
    for way in ("ring", "both"):
        options, mesh = WAYS[way], make_mesh((1, 8))
        function = functools.partial(all_gather_matmul, axis="model", **options)
        with jax.set_mesh(mesh):
            x, w = jax.device_put(X, TOKENS), jax.device_put(W, P(None, "model"))
            run = shard_map_over_the_rest(function, (TOKENS, P(None, "model")), HIDDEN)
            found[way] = longest_chain(jax.jit(run).lower(x, w).compile())
    assert found == {"ring": 7, "both": 4}


def test_several_weights_share_what_was_gathered():
    mesh, specs = make_mesh((2, 4)), (TOKENS, {"q": P(None, "model"), "k": P(None, "model")})
    function = functools.partial(all_gather_matmul, axis="model")
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        x = jax.device_put(X, TOKENS)
        w = jax.device_put({"q": W, "k": 2 * W[:, :8]}, specs[1])
        program = jax.jit(shard_map_over_the_rest(function, specs, {"q": HIDDEN, "k": HIDDEN})
                          ).lower(x, w).compile()
        found = program(x, w)
    assert proofs.collectives(program, mesh)["collective-permute", ("model",)].count == 3
    np.testing.assert_allclose(found["q"], X @ W, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found["k"], 2 * X @ W[:, :8], rtol=1e-5, atol=1e-5)


def test_what_is_summed_over_may_have_several_dimensions():
    mesh, spec = make_mesh((2, 4)), P("batch", None, "model")
    h, w = RANDOM.normal(size=(B, T, 8, 3)), RANDOM.normal(size=(8, 3, D))
    function = functools.partial(matmul_reduce_scatter, axis="model")
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        given = (jax.device_put(h.astype(np.float32), spec),
                 jax.device_put(w.astype(np.float32), P("model")))
        found = jax.jit(shard_map_over_the_rest(function, (spec, P("model")), TOKENS))(*given)
    assert found.sharding.spec.partitions[:2] == TOKENS.partitions
    np.testing.assert_allclose(found, np.einsum("bthk,hkd->btd", h, w), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_bfloat16_stays_bfloat16(way):
    program, given, mesh = compiled(4, way, jnp.bfloat16)
    _, gradients = program(*given)
    assert {each.dtype for each in gradients} == {jnp.dtype("bfloat16")}


def test_pieces_are_joined_in_any_order():
    places = [2, 0, 3, 1]
    pieces = [jnp.asarray(X[:, 30 * at:30 * at + 30]) for at in places]
    np.testing.assert_array_equal(put_together(pieces, places), X)


def test_a_weight_gradient_is_one_matmul():
    """Made piece by piece it would be read and written n times."""
    program, *_ = compiled(4, "ring")
    shapes = [each.shape.dims for computation in module.parse(program).computations.values()
              for each in computation.instructions.values() if each.opcode == "dot"]
    assert shapes.count((D, F // 4)) == shapes.count((F // 4, D)) == 1
