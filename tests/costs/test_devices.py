"""Devices: every figure has a source and one unit, and no program beats a floor."""
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from meshbook.costs.devices import DEVICES, GIB, floors
from meshbook.hlo.collectives import collectives
from meshbook.planning import topologies
from meshbook.sharding import make_mesh


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
def test_a_compiled_ring_has_the_wire_bytes_of_an_all_reduce(shape):
    mesh = make_mesh(shape)
    ways = mesh.shape["batch"]
    both = {}
    for name, reduce in (("ring", lambda x: ring_all_reduce(x, "batch", ways)),
                         ("psum", lambda x: jax.lax.psum(x, "batch"))):
        each = jax.jit(jax.shard_map(reduce, mesh=mesh, in_specs=P("batch"), out_specs=P("batch"),
                                     check_vma=False))
        x = jax.device_put(jnp.arange(ways * 64.0), jax.sharding.NamedSharding(mesh, P("batch")))
        both[name] = each(x), collectives(each.lower(x).compile(), mesh).wire("batch")
    assert jnp.array_equal(both["ring"][0], both["psum"][0])
    assert both["ring"][1] == both["psum"][1] == 2 * (ways - 1) / ways * 64 * 4


def test_two_cores_make_a_chip_and_floors_are_its_data_sheet():
    v2, v5e = DEVICES["TPU v2"], DEVICES["TPU v5e"]
    assert floors(v2, 23e12, 350e9, 248e9) == {"compute": 1, "memory": 1, "interconnect": 1}
    assert floors(v5e, 2 * 197e12, 0, 0)["compute"] == 2
    assert floors(v5e, 0, 0, 200e9)["interconnect"] == 1


CHIPS = {  # TFLOP/s, GiB, GB/s to memory, GB/s over all links in one direction; of a chip
    "TPU v2": (46, 16, 700, 248), "TPU v3": (123, 32, 900, 328), "TPU v4": (275, 32, 1200, 300),
    "TPU v5e": (197, 16, 819, 200), "TPU v5p": (459, 95, 2765, 600),
    "TPU v6e": (918, 32, 1638, 400), "TPU7x": (2307, 192, 7380, 600),
    "A100": (312, 80, 2039, 300), "H100": (989, 80, 3350, 450), "H200": (989, 141, 4800, 450),
    "B200": (2250, 180, 8000, 900)}
NETWORK = {  # Gbit/s of a chip to other slices or nodes, where a source says
    "TPU v5e": 6400 / 256, "TPU v5p": 50, "TPU v6e": 25_600 / 256, "A100": 200, "H100": 400,
    "H200": 400, "B200": 400}
CLOSED = {"TPU v4": 4, "TPU v5p": 4, "TPU v5e": 16, "TPU v6e": 16}  # sizes whose ends are linked
CLOCK = {"TPU v2": 700, "TPU v3": 940, "TPU v4": 1050, "TPU v5e": 1500, "TPU v5p": 1750,
         "TPU v6e": 1750, "TPU7x": 2200}  # MHz
SUMMING = {"H100", "H200", "B200"}  # their switches


@pytest.mark.parametrize("name", CHIPS)
def test_the_figures_are_those_of_the_data_sheets(name):
    device, cores = DEVICES[name], 2 if name in ("TPU v2", "TPU v3", "TPU7x") else 1
    assert (device.flops * cores / 1e12, device.memory * cores / GIB,
            device.bandwidth * cores / 1e9, device.interconnect / 1e9) == CHIPS[name]
    assert device.network == NETWORK.get(name, 0) / 8 * 1e9
    assert (device.ring, device.clock) == (CLOSED.get(name, 0), CLOCK.get(name, 0) * 1e6)
    is_gpu = not name.startswith("TPU")
    assert (device.switch, device.node) == (is_gpu, 8 if is_gpu else 0)
    assert device.adds == (name in SUMMING) and device.hop == (0 if is_gpu else 1e-6)


def test_every_device_is_known_and_says_where_its_figures_stand():
    assert list(DEVICES) == list(CHIPS)
    for device in DEVICES.values():
        assert re.search(r"https://\S+|doi:10\.\d+/\S+", device.source), device.name
        assert (device.memory / GIB).is_integer()  # one unit: a whole number of GiB


def test_data_sheets_mean_gib_where_they_write_gb():
    """What programs get, or nvidia-smi shows, is more than so many times 10^9 bytes."""
    shown = {"H100": 81_559 * 2**20, "H200": 143_771 * 2**20, "B200": 183_359 * 2**20,
             "TPU v5e": 15.75 * GIB}
    for name, size in shown.items():
        memory = DEVICES[name].memory
        assert memory / GIB * 1e9 < size <= memory


def test_a_program_that_does_not_fit_was_refused_by_no_more_than_there_is():
    cells = [each for each in topologies.recorded().values() if not each.fits]
    assert cells
    for each in cells:
        device = DEVICES[f"TPU {each.topology.partition('-')[0]}"]
        assert device.memory / GIB * 1e9 < each.available < device.memory
