"""Meshes, the sharding rules, and what they say of input that does not fit."""
import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from meshbook.hlo.collectives import collectives
from meshbook.sharding import (
    Sharding, WithOwn, check_split, extra_axes, make_mesh, opened, place, reduced, row_groups
)
from meshbook.sharding.meshes import axis_sizes

PRESETS = ("none", "data_parallel", "tensor_parallel", "fully_sharded")


def test_a_mesh_is_explicit_unless_it_is_told_otherwise():
    assert make_mesh((4, 2)).axis_types == (AxisType.Explicit,) * 2
    assert make_mesh((4, 2), axis_types=AxisType.Auto).axis_types == (AxisType.Auto,) * 2
    mixed = (AxisType.Auto, AxisType.Explicit)
    assert make_mesh((4, 2), axis_types=mixed).axis_types == mixed


def test_a_small_mesh_takes_the_first_devices():
    for shape in (1, 1), (2, 1), (1, 3):
        found = [device.id for device in make_mesh(shape).devices.flat]
        assert found == list(range(max(shape)))


def test_a_mesh_is_written_as_axes_and_sizes_and_data_is_another_name_for_batch():
    assert axis_sizes("data=4, model=2") == axis_sizes("batch=4,model=2") == {
        "batch": 4, "model": 2}
    assert list(axis_sizes("stage=2,batch=1")) == ["stage", "batch"]
    assert axis_sizes("batch=12") == {"batch": 12} and axis_sizes("") == {}
    for wrong in "batch=0", "batch=-1", "batch", "batch=2,data=4", "4", "batch=two", "a b=2":
        with pytest.raises(ValueError, match=f"data=4,model=2; found '{wrong}'"):
            axis_sizes(wrong)


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
    with pytest.raises(ValueError, match="mesh axis 'batch'; the mesh has .*'rows'"):
        place({"inputs": np.zeros((8, 3))}, make_mesh((8,), ("rows",)))


@pytest.mark.parametrize("row", PRESETS)
def test_a_product_has_the_layout_of_its_letters(row):
    rules, mesh = getattr(Sharding, row)(), make_mesh((4, 2))
    random = np.random.default_rng(0)
    x = random.normal(size=(8, 3, 16)).astype(np.float32)
    w = random.normal(size=(16, 32)).astype(np.float32)
    with jax.set_mesh(mesh):
        x_BTD = jax.reshard(x, rules.activation("BTD"))
        w_DF = jax.reshard(w, rules.parameter("DF"))
        h_BTF = jnp.einsum("BTD,DF->BTF", x_BTD, rules.gather("DF", w_DF, x.dtype),
                           out_sharding=rules.activation("BTF"))
    expected = jax.sharding.NamedSharding(mesh, rules.activation("BTF"))
    assert h_BTF.sharding.is_equivalent_to(expected, 3)
    np.testing.assert_allclose(h_BTF, x @ w, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("row, kept", [("tensor_parallel", 2), ("fully_sharded", 8)])
@pytest.mark.parametrize("how, sums", [("weight", 1), ("gather", 2)])
def test_the_gradient_of_a_weight_that_is_used_twice_is_summed_once(how, sums, row, kept):
    rules, mesh = getattr(Sharding, row)(), make_mesh((4, 2))
    random = np.random.default_rng(0)
    x = random.normal(size=(2, 8, 3, 16)).astype(np.float32)
    w = random.normal(size=(16, 32)).astype(np.float32)

    def loss(w_DF, x_NBTD):
        w_DF = getattr(rules, how)("DF", w_DF, jnp.float32)
        times = lambda x_BTD: jnp.einsum("BTD,DF->BTF", x_BTD, w_DF,
                                         out_sharding=rules.activation("BTF"))
        return (times(x_NBTD[0]) * jnp.cos(times(x_NBTD[1]))).sum()

    with jax.set_mesh(mesh):
        arguments = (jax.device_put(w, rules.parameter("DF")),
                     jax.device_put(x, P(None, *rules.activation("BTD"))))
        program = jax.jit(jax.grad(loss)).lower(*arguments).compile()
        found = program(*arguments)
    right = jax.grad(lambda w: ((x[0] @ w) * jnp.cos(x[1] @ w)).sum())(w)
    np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-4)
    assert found.addressable_shards[0].data.size == w.size // kept
    sent = collectives(program, mesh)["all-reduce", ("batch",)]
    assert sent.bytes == sums * 4 * w.size // 2  # half of the columns on a device


def test_what_is_reduced_is_not_split_and_not_manual():
    along = lambda x: jax.typeof(x).sharding.spec.reduced
    mesh = make_mesh((4, 2))
    with jax.set_mesh(mesh):
        x = jnp.ones((8, 4))
        split = jax.device_put(x, P("batch"))
        assert along(reduced(split, "batch", ("batch", "model"), None)) == {"model"}
        assert reduced(split, "batch") is split and reduced(x) is x
        seen = []
        jax.jit(jax.shard_map(
            lambda x: seen.append(along(reduced(x, "batch", "model"))) or x,
            axis_names={"batch"}, in_specs=P("batch"), out_specs=P("batch")))(split)
    assert seen == [{"model"}]


def test_a_letter_without_a_rule():
    with pytest.raises(KeyError, match=r"no rule for dimension E of EF: .* also\(E=None\) adds one"):
        Sharding.none().parameter("EF")


def test_rules_are_values():
    one, other = Sharding.fully_sharded(), Sharding.fully_sharded()
    assert one == other and hash(one) == hash(other)
    assert one != Sharding.tensor_parallel() and one.also(D="model") != one


def test_a_rule_that_is_given_again_replaces_the_old_one():
    rules = Sharding.fully_sharded().also(D=None, parameters={"F": "batch"})
    assert (rules.parameter("DF"), rules.activation("BTF")) == (
        P(None, "batch"), P("batch", None, "model"))
    assert Sharding.fully_sharded().parameter("DF") == P("batch", "model")  # as it was


def test_an_axis_splits_one_dimension_of_a_tensor_the_last_that_asks_for_it():
    rules = Sharding({"B": ("data", "fsdp"), "T": "model", "F": "model", "D": "fsdp"})
    assert rules.activation("BTD") == P("data", "model", "fsdp")
    assert rules.activation("BTF") == P(("data", "fsdp"), None, "model")


def test_rules_leave_out_axes_that_are_manual():
    rules, seen = Sharding.fully_sharded(), []

    def local(x):
        seen.append((rules.activation("BTF"), rules.parameter("DF")))
        return x

    x = jnp.ones((8, 8))
    for manual in ({"batch"}, {"model"}, {"batch", "model"}):
        jax.shard_map(local, mesh=make_mesh((4, 2)), axis_names=manual, in_specs=P(),
                      out_specs=P())(x)
    assert seen == [(P(None, None, "model"), P(None, "model")), (P("batch"), P("batch")),
                    (P(), P())]


def test_rows_are_split_over_several_axes():
    mesh = make_mesh((2, 2, 2), ("data", "fsdp", "model"))
    placed = place({"x": np.arange(8)}, mesh, ("data", "fsdp"))["x"]
    assert [shard.data.tolist() for shard in placed.addressable_shards] == [
        [row, row + 1] for row in (0, 0, 2, 2, 4, 4, 6, 6)]
    with pytest.raises(ValueError, match="6 rows .* of size 4: 6 = 4·1 .* 2"):
        place({"x": np.arange(6)}, mesh, ("data", "fsdp"))


def test_an_axis_that_the_mesh_does_not_have():
    with pytest.raises(ValueError, match="mesh axis 'model', but the mesh has .*'rows'"):
        with jax.set_mesh(make_mesh((8,), ("rows",))):
            check_split("DF", (8, 8), P(None, "model"))


def test_a_size_that_the_mesh_cannot_divide():
    with pytest.raises(ValueError, match=r"DF\(8, 6\): F=6 does not divide .*'model' of size 4"):
        with jax.set_mesh(make_mesh((2, 4))):
            check_split("DF", (8, 6), P(None, "model"))


@pytest.mark.parametrize("types, found", [
    (None, "no mesh"), (AxisType.Auto, r"an Auto mesh, \('batch', 'model'\)"),
    ((AxisType.Explicit, AxisType.Auto), r"an Auto mesh, \('batch', 'model'\)")])
def test_a_mesh_that_is_not_explicit_is_named(types, found):
    around = contextlib.nullcontext() if types is None else jax.set_mesh(
        make_mesh((4, 2), axis_types=types))
    with around, pytest.raises(ValueError, match=rf"DF\(8, 8\) needs an .*; found {found}$"):
        check_split("DF", (8, 8), P(None, "model"))


def test_of_several_processes_all_devices_have_to_be_in_the_mesh(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for shape in ((8, 1), (4, 2), (1, 8)):
        assert row_groups(make_mesh(shape)) == (0, 1)  # these devices are all of one process
    with pytest.raises(ValueError, match="has 4 devices, and 2 processes have 8: expected a mesh"):
        row_groups(make_mesh((2, 2)))


@pytest.mark.parametrize("stored, used, extra", [
    (P("batch", "model"), P(None, "model"), {0: ("batch",)}),
    (P("batch", "model"), P(), {0: ("batch",), 1: ("model",)}),
    (P(None, None, ("model", "batch")), P(None, None, "model"), {2: ("batch",)}),
    (P("batch"), P("batch", None, None), {})])
def test_a_dimension_that_a_spec_leaves_out_is_not_split(stored, used, extra):
    assert extra_axes(stored, used) == extra


def test_what_is_split_in_use_alone_is_refused_in_any_dimension():
    for stored, used in (P(), P("model")), (P("batch"), P("batch", None, "model")):
        with pytest.raises(ValueError, match="expected the axes of its use first in storage"):
            extra_axes(stored, used)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("how", ["as it lies", "gathered", "given whole"])
def test_a_parameter_is_used_in_the_type_that_is_asked_for_and_its_gradient_keeps_its_own(
        how, dtype):
    def loss(own, whole, x_BD):
        w = opened(WithOwn(whole, own) if how == "given whole" else own, used, dtype)
        assert w.dtype == (dtype or jnp.float32) and w.shape == (8, 2)
        return jnp.einsum("BD,DF->BF", x_BD.astype(w.dtype), w).sum().astype(jnp.float32)

    used = P(reduced={"batch"})
    with jax.set_mesh(make_mesh((4, 2))):
        whole = jax.device_put(np.arange(16, dtype=np.float32).reshape(8, 2), P())
        own = whole if how == "as it lies" else jax.reshard(whole, P("batch"))
        x_BD = jax.device_put(np.ones((4, 8), np.float32), P("batch"))
        found = jax.jit(jax.grad(loss))(own, whole, x_BD)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, np.full((8, 2), 4.0))
