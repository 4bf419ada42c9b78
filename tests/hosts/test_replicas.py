"""Replicas with other bits, and batches of the same rows, are found; right ones raise no alarm."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flips import flipped, with_flip
from jax.sharding import NamedSharding, PartitionSpec as P
from soak import make_state, make_stream

from meshbook.hosts.replicas import Different, check_batch, check_replicas, hash_of
from meshbook.sharding import make_mesh, place
from meshbook.training import fit


@pytest.mark.parametrize("mesh", [(8, 1), (4, 2), (2, 4), (1, 8)])
def test_a_right_state_raises_no_alarm(mesh):
    state = make_state(mesh)
    check_replicas(state, 0)
    state, _ = fit(state, [next(make_stream())], jax.random.key(0))
    check_replicas(state, 1)


@pytest.mark.parametrize("bit", [0, 7])
def test_one_flipped_bit_is_found_with_its_leaf_and_device(bit):
    state = with_flip(make_state((8, 1)), "params/w_FC", 3, bit)
    with pytest.raises(Different, match=r"step 12: .*; params/w_FC differs on device 3 \(process 0"
                       r"\) from devices 0 \(process 0\), 1 .* and 3 more$"):
        check_replicas(state, 12)


@pytest.mark.parametrize("name", ["opt_state/0/mu/w_FC", "opt_state/0/nu/w_FC", "step"])
def test_a_bit_of_the_optimizer_or_a_counter_is_found_too(name):
    with pytest.raises(Different, match=f"; {name} differs on device 3"):
        check_replicas(with_flip(make_state((8, 1)), name, 3), 12)


def test_of_two_replicas_nobody_knows_which_is_right():
    state = with_flip(make_state((2, 4)), "params/w_XF", 1)
    with pytest.raises(Different, match=r"params/w_XF differs between device 1 \(process 0\) and "
                       r"device 5 \(process 0\)"):
        check_replicas(state, 3)


def test_a_bit_that_has_no_replica_is_not_claimed_to_be_found():
    check_replicas(with_flip(make_state((1, 8)), "params/w_XF", 3), 3)


def test_the_losses_of_a_flipped_run_look_fine():
    state = with_flip(make_state((8, 1)), "params/w_FC", 3)
    batch = next(make_stream())
    (_, found), (_, right) = (fit(each, [batch], jax.random.key(0))
                              for each in (state, make_state((8, 1))))
    assert found[0]["loss"] == pytest.approx(right[0]["loss"], rel=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool", "uint8", "float16"])
def test_every_flipped_bit_changes_the_hash(dtype):
    x = np.asarray(jnp.arange(6).astype(dtype))
    before = hash_of(jnp.asarray(x))
    for at in range(x.nbytes):
        for bit in range(1 if dtype == "bool" else 8):
            other = x.copy()
            other.view(np.uint8)[at] ^= 1 << bit
            assert hash_of(jnp.asarray(other)) != before, (at, bit)


@pytest.mark.parametrize("other", [[2, 1, 3], [-1, -2, 3], [-1, 2, -3]])
def test_swapped_elements_and_two_signs_change_the_hash(other):
    assert hash_of(jnp.float32([1, 2, 3])) != hash_of(jnp.float32(other))


def test_a_batch_whose_replicas_differ_is_refused():
    mesh = make_mesh((4, 2))
    batch = place(next(make_stream()), mesh)
    check_batch(batch, mesh)
    wrong = batch | {"inputs": flipped(batch["inputs"], 5)}
    with pytest.raises(Different, match="the batch differs between device 4 .* and device 5"):
        check_batch(wrong, mesh)
    with pytest.raises(Different, match="the batch differs between device 0 .* and device 1"):
        check_batch(batch | {"labels": flipped(batch["labels"], 1)}, mesh)


def test_states_of_any_sharding_are_hashed():
    mesh = make_mesh((4, 2))
    x = jax.device_put(np.arange(16.0), NamedSharding(mesh, P(("batch", "model"))))
    check_batch({"x": x}, mesh, ("batch", "model"))


def test_of_three_leaves_that_differ_all_are_named_and_of_four_one_is_counted():
    names = ["params/w_FC", "params/w_XF", "opt_state/0/mu/w_FC", "opt_state/0/nu/w_FC"]
    state = make_state((8, 1))
    for count, name in enumerate(names, 1):
        state = with_flip(state, name, 3)
        with pytest.raises(Different) as found:
            check_replicas(state, 0)
        assert str(found.value).count("differs on device 3") == min(count, 3)
        assert str(found.value).endswith("; and 1 more") is (count == 4)
        assert str(found.value).count("; ") == min(count, 3) + (count == 4)


def test_a_hash_sees_the_lowest_bit_of_any_element():
    x = np.random.default_rng(0).integers(0, 2**32, 300, dtype=np.uint32)
    changed = np.stack([x, *(x ^ (np.arange(x.size) == at) for at in range(x.size))]).astype(x.dtype)
    assert len(set(np.asarray(jax.vmap(hash_of)(changed)).tolist())) == x.size + 1


@pytest.mark.parametrize("apart", [1, 2**8, 2**14, 2**15, 2**16, 2**17 - 1])
def test_elements_that_were_swapped_are_seen_however_far_apart(apart):
    x = np.random.default_rng(1).integers(0, 2**16, 2**17 + 5, dtype=np.uint16)
    other = x.copy()
    other[[3, 3 + apart]] = x[[3 + apart, 3]]
    assert x[3] != x[3 + apart] and hash_of(jnp.asarray(x)) != hash_of(jnp.asarray(other))


@pytest.mark.parametrize("place", [0, 255])
def test_no_two_values_of_an_element_have_the_same_hash(place):
    x = np.random.default_rng(2).integers(0, 2**16, 256, dtype=np.uint16)
    with_value = lambda value: hash_of(jnp.asarray(x).at[place].set(value))
    found = jax.vmap(with_value)(jnp.arange(2**16, dtype=jnp.uint16))
    assert found.dtype == jnp.uint32 and np.unique(found).size == 2**16
