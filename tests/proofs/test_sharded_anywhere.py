"""assert_sharded on any mesh: what is laid out by hand is accepted, and nothing else is."""
import math

import jax
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from properties import examples, shapes

from meshbook import proofs

NAMES = "abc"


@st.composite
def laid_out(draw):
    """(a mesh, two specs of one array's dimensions, the shape of an array that both divide)."""
    sizes = draw(shapes())
    devices = draw(st.permutations(range(math.prod(sizes))))
    mesh = Mesh(np.array(jax.devices())[list(devices)].reshape(sizes), tuple(NAMES[:len(sizes)]),
                axis_types=(AxisType.Explicit,) * len(sizes))
    rank = draw(st.integers(1, 3))

    def spec():
        of_dimension = [[] for _ in range(rank)]
        for name in draw(st.permutations(mesh.axis_names)):
            place = draw(st.integers(-1, rank - 1))
            if place >= 0:
                of_dimension[place].append(name)
        return P(*(tuple(each) or None for each in of_dimension))

    shape = draw(st.tuples(*[st.integers(1, 2)] * rank))
    return mesh, spec(), spec(), tuple(mesh.size * each for each in shape)


def piece(whole, spec, mesh, coordinates):
    """The slice of an array that a device has, by its coordinates on the mesh."""
    for dimension, axes in enumerate(spec):
        number, ways = 0, 1
        for axis in axes or ():
            number = number * mesh.shape[axis] + coordinates[axis]
            ways *= mesh.shape[axis]
        each = whole.shape[dimension] // ways
        whole = np.take(whole, range(number * each, number * each + each), dimension)
    return whole


def by_hand(whole, spec, mesh):
    """The array whose devices have the pieces that the spec says, put there one by one."""
    pieces = []
    for place in np.ndindex(mesh.devices.shape):
        mine = piece(whole, spec, mesh, dict(zip(mesh.axis_names, place, strict=True)))
        pieces.append(jax.device_put(mine, mesh.devices[place]))
    return jax.make_array_from_single_device_arrays(
        whole.shape, NamedSharding(mesh, spec), pieces)


@examples(60)
@given(laid_out(), st.sampled_from(["float32", "bfloat16", "int8", "complex64"]))
def test_pieces_put_by_hand_are_where_they_should_be(drawn, dtype):
    mesh, spec, other, shape = drawn
    whole = np.asarray(np.arange(math.prod(shape)).reshape(shape) % 100, dtype)
    array = by_hand(whole, spec, mesh)
    parts = math.prod(mesh.shape[axis] for axes in spec for axis in axes or ())
    held = whole.nbytes // parts
    proofs.assert_sharded({"w": array}, spec, mesh, held=held, whole={"w": whole})
    with pytest.raises(proofs.ProofFailed, match="by the formula"):
        proofs.assert_sharded({"w": array}, spec, mesh, held=held + 1)

    places = lambda spec: NamedSharding(mesh, spec).devices_indices_map(shape)
    assume(places(spec) != places(other))
    with pytest.raises(proofs.ProofFailed, match="w"):
        proofs.assert_sharded({"w": array}, other, mesh)


@examples(30)
@given(laid_out(), st.randoms(use_true_random=False))
def test_one_wrong_element_on_one_device_is_found(drawn, chance):
    mesh, spec, _, shape = drawn
    whole = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    pieces = [np.array(shard.data) for shard in by_hand(whole, spec, mesh).addressable_shards]
    shards = by_hand(whole, spec, mesh).addressable_shards
    wrong = chance.randrange(len(pieces))
    pieces[wrong].flat[chance.randrange(pieces[wrong].size)] += 1
    array = jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, spec), [
        jax.device_put(mine, shard.device) for mine, shard in zip(pieces, shards, strict=True)])
    with pytest.raises(proofs.ProofFailed, match="w"):
        proofs.assert_sharded({"w": array}, spec, mesh, whole={"w": whole})
