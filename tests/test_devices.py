"""Floors: what must come in over the links is what a ring moves, and no program beats a floor."""
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from meshbook import topologies
from meshbook.devices import DEVICES, floors, received
from meshbook.sharding import make_mesh
from meshbook.traffic import Moved, Traffic, collectives


def ring_all_reduce(x, axis, ways):
    """The sum over an axis by neighbours alone: each piece goes round once adding, once full."""
    right, at = [(i, (i + 1) % ways) for i in range(ways)], jax.lax.axis_index(axis)
    pieces = x.reshape(ways, -1)
    for turn in range(ways - 1):
        sent = jax.lax.ppermute(pieces[(at - turn) % ways], axis, right)
        pieces = pieces.at[(at - turn - 1) % ways].add(sent)
    for turn in range(ways - 1):
        sent = jax.lax.ppermute(pieces[(at - turn + 1) % ways], axis, right)
        pieces = pieces.at[(at - turn) % ways].set(sent)
    return pieces.reshape(x.shape)


@pytest.mark.parametrize("shape", [(8, 1), (4, 2), (2, 4)])
def test_a_ring_moves_what_an_all_reduce_must_receive(shape):
    mesh = make_mesh(shape)
    ways = mesh.shape["batch"]
    both = {}
    for name, reduce in (("ring", lambda x: ring_all_reduce(x, "batch", ways)),
                         ("psum", lambda x: jax.lax.psum(x, "batch"))):
        each = jax.jit(jax.shard_map(reduce, mesh=mesh, in_specs=P("batch"), out_specs=P("batch"),
                                     check_vma=False))
        x = jax.device_put(jnp.arange(ways * 64.0), jax.sharding.NamedSharding(mesh, P("batch")))
        both[name] = each(x), received(collectives(each.lower(x).compile(), mesh), mesh.shape)
    assert jnp.array_equal(both["ring"][0], both["psum"][0])
    assert both["ring"][1] == both["psum"][1] == 2 * (ways - 1) / ways * 64 * 4


@pytest.mark.parametrize("kind, factor", [
    ("all-gather", 3 / 4), ("reduce-scatter", 3), ("all-to-all", 3 / 4),
    ("collective-permute", 1), ("all-reduce", 3 / 2)])
def test_what_each_collective_must_receive(kind, factor):
    assert received(Traffic({(kind, ("model",)): Moved(5, 800)}), {"model": 4}) == 800 * factor


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    mesh, pair = {"batch": 4, "model": 2}, ("batch", "model")
    parts = {("reduce-scatter", pair): Moved(1, 100), ("all-gather", pair): Moved(1, 800)}
    whole = {("all-reduce", pair): Moved(1, 800)}
    assert received(Traffic(parts), mesh) == received(Traffic(whole), mesh) == 1400


def test_a_collective_that_nobody_counted_is_refused():
    with pytest.raises(KeyError, match="collective-broadcast"):
        received(Traffic({("collective-broadcast", ("model",)): Moved(1, 8)}), {"model": 2})


def test_two_cores_make_a_chip_and_floors_are_its_data_sheet():
    v2, v5e = DEVICES["TPU v2"], DEVICES["TPU v5e"]
    assert floors(v2, 23e12, 358e9, 248e9) == {"compute": 1, "memory": 1, "interconnect": 1}
    assert floors(v5e, 2 * 197e12, 0, 0)["compute"] == 2


def test_a_program_that_does_not_fit_was_refused_by_no_more_than_there_is():
    cells = [each for each in topologies.recorded().values() if not each.fits]
    assert cells
    for each in cells:
        device = DEVICES[f"TPU {each.topology.partition('-')[0]}"]
        assert 0.9 * device.memory < each.available < device.memory
