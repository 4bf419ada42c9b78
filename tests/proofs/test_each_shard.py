"""One device holds one other bit, each device in turn: it is found, in numbers of every type."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flips import with_flip
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from soak import make_state

from meshbook import proofs
from meshbook.hosts.replicas import Different, check_batch, check_replicas, hash_of
from meshbook.proofs.shards import wide
from meshbook.proofs.verdicts import named_leaves
from meshbook.saving.contents import arrays
from meshbook.sharding import make_mesh

KINDS = ("float32", "bfloat16", "float16", "float8_e4m3fn", "complex64", "int32", "int8", "uint8",
         "bool")
SPECS = {"rows": P("batch"), "all": P()}  # two copies of each piece on (4, 2), and eight
MESH = make_mesh((4, 2))


def whole_of(kind):
    """For each of four devices 0, NaN and 1, or 0, 1 and 1 where there is no NaN."""
    is_float = jnp.issubdtype(kind, jnp.inexact)
    return np.tile(np.array([0, np.nan if is_float else 1, 1]), 4).astype(jnp.dtype(kind))


def bits_of(kind):
    """(byte, bit) of the sign of 0, of the sign and last digit of NaN, and of 1's last digit."""
    if kind == "bool":
        return [(2, 0)]
    size = jnp.dtype(kind).itemsize
    return [(size - 1, 7), (2 * size - 1, 7), (size, 0), (2 * size, 0)]


def laid_out(whole, spec):
    return jax.device_put(whole, NamedSharding(MESH, spec))


def with_other_bit(x, device, byte, bit):
    """The same array, but for one bit of what one device holds."""
    def own(shard):
        raw = np.array(shard.data)
        if shard.device.id == device:
            raw.view(np.uint8)[byte] ^= 1 << bit
        return jax.device_put(raw, shard.device)

    return jax.make_array_from_single_device_arrays(
        x.shape, x.sharding, [own(each) for each in x.addressable_shards])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", SPECS)
def test_one_other_bit_on_each_device_in_turn_is_found_with_its_leaf(kind, place):
    whole, spec = whole_of(kind), SPECS[place]
    right = {name: laid_out(whole, spec) for name in ("before", "leaf", "behind")}
    wholes = dict.fromkeys(right, whole)
    proofs.assert_replicas_equal(right)
    proofs.assert_sharded(right, spec, MESH, whole=wholes)
    for device in range(8):
        for byte, bit in bits_of(kind):
            wrong = right | {"leaf": with_other_bit(right["leaf"], device, byte, bit)}
            at = rf" difference .*, at \({byte // whole.itemsize},\): expected "
            for found in (lambda: proofs.assert_replicas_equal(wrong),
                          lambda: proofs.assert_sharded(wrong, spec, MESH)):
                with pytest.raises(proofs.ProofFailed, match=(
                        rf"leaf leaf.* device {device} .*{at}")) as e:
                    found()
                assert e.value.leaf == "leaf"
            with pytest.raises(proofs.ProofFailed, match=f"leaf leaf.* of the whole.*{at}") as e:
                proofs.assert_sharded(wrong, spec, MESH, whole=wholes)
            assert (e.value.leaf, e.value.device) == ("leaf", device)


def test_one_other_bit_of_a_batch_is_found_on_each_device_in_turn():
    right = {kind: laid_out(whole_of(kind), P("batch")) for kind in KINDS}
    # groups with equal rows would be refused for that
    right["number"] = laid_out(np.arange(4), P("batch"))
    check_batch(right, MESH)
    for kind in KINDS:
        for device in range(8):
            for byte, bit in bits_of(kind):
                wrong = with_other_bit(right[kind], device, byte, bit)
                with pytest.raises(Different, match=f"the batch differs .*device {device} "):
                    check_batch(right | {kind: wrong}, MESH)


def test_one_other_bit_of_a_state_is_found_in_each_leaf_and_on_each_device_in_turn():
    state = make_state((8, 1))
    for number, name in enumerate(named_leaves(arrays(state))):
        device = number % 8
        with pytest.raises(Different, match=f"bits; {name} differs on device {device} "):
            check_replicas(with_flip(state, name, device, number % 5), 1)


@pytest.mark.parametrize("kind", ["float64", "int64", "uint64", "complex64", "complex128"])
def test_every_bit_of_eight_bytes_changes_the_hash(kind):
    with jax.enable_x64(True):
        x = np.arange(3).astype(kind)
        before, seen = hash_of(jnp.asarray(x)), set()
        for bit in range(8 * x.nbytes):
            other = x.copy()
            other.view(np.uint8)[bit // 8] ^= 1 << bit % 8
            seen.add(int(hash_of(jnp.asarray(other))))
    assert int(before) not in seen and len(seen) > 0.9 * 8 * x.nbytes


def test_two_leaves_of_one_name_are_refused_and_none_is_left_out():
    tree = {"a/b": laid_out(np.ones(4), P("batch")), "a": {"b": laid_out(np.ones(4), P())}}
    for found in (lambda: proofs.assert_sharded(tree, P("batch"), MESH),
                  lambda: proofs.assert_replicas_equal(tree), lambda: proofs.sharding_table(tree)):
        with pytest.raises(ValueError, match="two leaves that are a/b"):
            found()


def test_numbers_are_compared_in_64_bits():
    """Of a float32, of an integer that a float32 cannot hold, and of a complex number."""
    for value in (jnp.float32(1 / 3), jnp.int32(2**24 + 1), jnp.complex64(1 / 3 + 2j / 3)):
        found = wide(value)
        assert found.dtype == (np.complex128 if jnp.iscomplexobj(value) else np.float64)
        assert found == np.asarray(value).item()
