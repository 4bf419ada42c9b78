"""Meshes, the table of layouts, and what they say of input that does not fit."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from meshbook.sharding import Sharding, check_split, make_mesh, pin, place

ROWS = ("none", "data_parallel", "tensor_parallel", "fully_sharded")


def test_a_mesh_is_explicit_unless_it_is_told_otherwise():
    assert make_mesh((4, 2)).axis_types == (AxisType.Explicit,) * 2
    assert make_mesh((4, 2), axis_types=AxisType.Auto).axis_types == (AxisType.Auto,) * 2
    mixed = (AxisType.Auto, AxisType.Explicit)
    assert make_mesh((4, 2), axis_types=mixed).axis_types == mixed


def test_a_small_mesh_takes_the_first_devices():
    assert [device.id for device in make_mesh((2, 1)).devices.flat] == [0, 1]


@pytest.mark.parametrize("shape", [(8, 2), (0, 2)])
def test_a_mesh_that_the_devices_cannot_fill(shape):
    with pytest.raises(ValueError, match=r"needs \d+ devices; JAX has 8 .*start\(devices="):
        make_mesh(shape)


def test_a_mesh_needs_a_name_for_each_axis():
    with pytest.raises(ValueError, match="one name for each axis"):
        make_mesh((2, 2, 2))


def test_rows_are_placed_in_order():
    batch = {"inputs": np.arange(16.0).reshape(8, 2), "labels": np.arange(8)}
    for shard in place(batch, make_mesh((4, 2)))["labels"].addressable_shards:
        row = shard.device.id // 2 * 2
        assert shard.data.tolist() == [row, row + 1]


def test_rows_that_do_not_divide():
    with pytest.raises(ValueError, match=r"batch of 10 rows .* size 4: 10 = 4·2 \+ 2"):
        place({"inputs": np.zeros((10, 3))}, make_mesh((4, 2)))


def test_a_mesh_without_a_batch_axis():
    with pytest.raises(ValueError, match="axis 'batch'; found .*'rows'"):
        place({"inputs": np.zeros((8, 3))}, make_mesh((8,), ("rows",)))


@pytest.mark.parametrize("axis_types", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("row", ROWS)
def test_a_product_has_the_layout_of_its_letters(row, axis_types):
    table, mesh = getattr(Sharding, row)(), make_mesh((4, 2), axis_types=axis_types)
    random = np.random.default_rng(0)
    x = random.normal(size=(8, 3, 16)).astype(np.float32)
    w = random.normal(size=(16, 32)).astype(np.float32)
    with jax.set_mesh(mesh):
        x_BTD, w_DF = pin(jnp.asarray(x), table.BTD), pin(jnp.asarray(w), table.DF)
        h_BTF = jax.jit(lambda x, w: table.einsum("BTD,DF->BTF", x, w))(x_BTD, w_DF)
    expected = jax.sharding.NamedSharding(mesh, table.BTF)
    assert h_BTF.sharding.is_equivalent_to(expected, 3)
    np.testing.assert_allclose(h_BTF, x @ w, rtol=1e-4, atol=1e-4)


def test_letters_that_the_table_does_not_have():
    with pytest.raises(KeyError, match="no tensor 'EF' .*DF"):
        Sharding.none().spec("EF")


def test_an_axis_that_the_mesh_does_not_have():
    with pytest.raises(ValueError, match="mesh axis 'model', but the mesh has .*'rows'"):
        check_split("DF", (8, 8), P(None, "model"), make_mesh((8,), ("rows",)))


def test_a_size_that_the_mesh_cannot_divide():
    with pytest.raises(ValueError, match=r"DF\(8, 6\): F=6 does not divide .*'model' of size 4"):
        check_split("DF", (8, 6), P(None, "model"), make_mesh((2, 4)))


def test_a_split_without_a_mesh():
    with pytest.raises(ValueError, match="axis 'model', but there is no mesh"):
        check_split("DF", (8, 8), P(None, "model"))
