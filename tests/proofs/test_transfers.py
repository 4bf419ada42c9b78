"""What `transfers` counts: shards that arrive from another device outside of a program."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from meshbook.proofs.transfers import transfers

X = np.arange(64, dtype=np.float32).reshape(8, 8)


def sharding(spec, devices=slice(0, 4), shape=(2, 2)):
    grid = np.array(jax.devices()[devices]).reshape(shape)
    return NamedSharding(Mesh(grid, ("batch", "model"), axis_types=(AxisType.Auto,) * 2), spec)


HERE, THERE = slice(0, 4), slice(4, 8)


@pytest.mark.parametrize("before, after, count, arrived", [
    (sharding(P("batch")), sharding(P("batch"), THERE), 1, 4 * 128),  # to another mesh
    (sharding(P()), sharding(P(), THERE), 1, 4 * 256),
    (sharding(P("batch")), sharding(P("model")), 1, 2 * 128),  # two devices have it already
    (sharding(P()), sharding(P("batch")), 1, 4 * 128),  # a slice is an array of its own
    (sharding(P("batch")), sharding(P("batch")), 0, 0),
    (sharding(P("batch")), sharding(P("batch", None)), 0, 0),
])
def test_shards_that_a_device_did_not_hold_are_counted(before, after, count, arrived):
    array = jax.device_put(X, before)
    with transfers() as sent:
        moved = jax.device_put(array, after)
    np.testing.assert_array_equal(moved, X)
    assert (sent.count, sent.bytes) == (count, arrived)


def test_what_comes_from_the_host_is_not_counted():
    with transfers() as sent:
        tree = jax.device_put({"x": X, "y": 3.0}, sharding(P()))
        jax.block_until_ready(tree)
    assert (sent.count, sent.bytes) == (0, 0)


def test_every_leaf_and_every_call_adds_up_and_the_function_comes_back():
    put, pair = jax.device_put, jax.device_put([X, X[:4]], sharding(P("batch")))
    with transfers() as sent:
        jax.device_put(pair, sharding(P("batch"), THERE))
        jax.device_put(pair[0], jax.devices()[7])
    assert (sent.count, sent.bytes) == (3, 4 * 128 + 4 * 64 + 256)
    assert jax.device_put is put
    with pytest.raises(RuntimeError, match="mine"):
        with transfers():
            raise RuntimeError("mine")
    assert jax.device_put is put


def test_a_random_key_is_counted_by_its_bits():
    key = jax.device_put(jax.random.key(0), jax.devices()[0])
    with transfers() as sent:
        jax.device_put(key, sharding(P(), THERE))
    assert (sent.count, sent.bytes) == (1, 4 * 8)


def test_an_argument_that_jit_moves_is_an_error():
    add = jax.jit(jnp.add)
    on_mesh, alone = jax.device_put(X, sharding(P("batch"))), jnp.asarray(X)
    add(on_mesh, alone)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed device-to-device transfer"):
        with transfers():
            add(on_mesh, alone)


def test_a_program_may_move_what_it_likes():
    array = jax.device_put(X, sharding(P("batch")))
    reshard = jax.jit(jnp.sin, out_shardings=sharding(P("model")))
    with transfers() as sent:
        reshard(array).block_until_ready()
    assert (sent.count, sent.bytes) == (0, 0)
