"""Is it really sharded? What the first proof accepts, what it refuses, and what its messages say."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from tiny_mlp import BATCHES, SPECS, mesh_of, put, weights
from tiny_vit import RULES

from meshbook import proofs
from meshbook.proofs import ProofFailed


@pytest.fixture(scope="module")
def mesh():
    return mesh_of()


def test_expectations_may_be_specs_shardings_prefixes_and_other_containers(mesh):
    params = put(weights(), mesh, SPECS)
    named = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    state = {"params": params, "moments": (params, params), "nothing": ()}
    verdict = proofs.assert_sharded(state, {"params": named, "moments": (SPECS, named)})
    assert repr(verdict) == "sharded: 6 leaves on 8 devices, 24.6 kB per device"
    proofs.assert_sharded(params["w_in"], P(None, "model"))
    proofs.assert_sharded({"a": params["w_in"], "b": params["w_in"]}, P(None, "model"))
    proofs.assert_sharded(state, {"params": named, "moments": (SPECS, named), "nothing": P()})
    with jax.set_mesh(mesh):
        proofs.assert_sharded(params, SPECS)
    proofs.assert_sharded(put(jax.random.key(0), mesh, P()), P())
    mixed = state | {"step": jnp.zeros(())}
    proofs.assert_sharded(mixed, jax.tree.map(lambda leaf: leaf.sharding, mixed))


def test_a_wrong_slice_is_named_with_leaf_device_and_both_slices(mesh):
    state = {"params": put(weights(), mesh, {**SPECS, "w_out": P()})}
    with pytest.raises(ProofFailed) as caught:
        proofs.assert_sharded(state, {"params": SPECS})
    assert str(caught.value).startswith(
        "leaf params/w_out, device 0 (cpu): expected [0:32, 0:32] (P('model',) on mesh "
        "{'batch': 4, 'model': 2}), found [0:64, 0:32] of shape (64, 32)")
    assert (caught.value.leaf, caught.value.device) == ("params/w_out", 0)


def test_an_array_on_one_device_is_not_replicated(mesh):
    with pytest.raises(ProofFailed, match=r"device 1 \(cpu\): expected \[0:2\].*found nothing"):
        proofs.assert_sharded(jnp.zeros(2), NamedSharding(mesh, P()))
    one = NamedSharding(Mesh(mesh.devices[:1, :1], mesh.axis_names), P())
    with pytest.raises(ProofFailed, match=r"device 1 \(cpu\): expected nothing"):
        proofs.assert_sharded(put(np.zeros(2), mesh, P()), one)


def test_specs_alone_do_not_hide_two_orders_of_devices(mesh):
    turned = Mesh(mesh.devices[::-1], mesh.axis_names, axis_types=mesh.axis_types)
    tree = {"a": put(np.zeros(8), mesh, P("batch")), "b": put(np.zeros(8), turned, P("batch"))}
    with pytest.raises(ProofFailed, match="leaf b: expected the devices in the order of a"):
        proofs.assert_sharded(tree, P("batch"))


@pytest.mark.parametrize("expected,message", [
    ({"w_in": P()}, "leaf w_out: no expected sharding; `expected` names w_in"),
    ({f"w{n}": P() for n in range(9)}, "`expected` names w0, w1, w2, w3, w4, w5$"),  # six of them
    (SPECS | {"bias": P()}, "names bias, which the tree does not have; it has w_in, w_out"),
    (SPECS | {"w_in": P("modle")}, "expected axes among batch, model, found modle in"),
    (SPECS | {"w_in": P(None, None, "model")}, r"does not fit shape \(32, 64\).*length 3 for 2"),
    (SPECS | {"w_in": "model"}, "expected a sharding or a PartitionSpec for w_in, found 'model'"),
])
def test_expectations_that_do_not_fit_are_refused(mesh, expected, message):
    with pytest.raises(ValueError, match=message):
        proofs.assert_sharded(put(weights(), mesh, SPECS), expected)


def test_extents_scalars_hosts_and_missing_meshes_are_named(mesh):
    with pytest.raises(ValueError, match=r"P\('batch',\) on mesh .* does not fit shape \(6,\)"):
        proofs.assert_sharded(put(np.zeros(6), mesh, P()), P("batch"))
    with pytest.raises(ValueError, match=r"does not fit shape \(\).*length 1 for 0 dimensions"):
        proofs.assert_sharded(put(np.float32(0), mesh, P()), P("batch"))
    gone = jnp.zeros(3)
    gone.delete()
    with pytest.raises(ValueError, match="leaf gone: its numbers are gone, it was donated"):
        proofs.assert_sharded({"gone": gone}, P(), mesh)
    with pytest.raises(ValueError, match="needs a mesh; no leaf lies on one"):
        proofs.assert_sharded(jnp.zeros(3), P())
    with pytest.raises(ProofFailed, match="leaf w: expected a jax.Array on devices, found ndarray"):
        proofs.assert_sharded({"w": np.zeros(3)}, P(), mesh)


def test_the_table_adds_up_and_shows_in_a_notebook(mesh):
    table = proofs.sharding_table({"params": put(weights(), mesh, SPECS), "step": jnp.zeros(())})
    assert repr(table).splitlines() == [
        "leaf          shape     dtype    spec              devices  bytes per device",
        "params/w_in   (32, 64)  float32  P(None, 'model')  0-7                 4,096",
        "params/w_out  (64, 32)  float32  P('model',)       0-7                 4,096",
        "step          ()        float32  one device        0                       4",
        "3 leaves                                           0-7                 8,196",
    ]
    assert "| `params/w_in` | (32, 64) | float32 | `P(None, 'model')` |" in table._repr_markdown_()
    assert sorted(table.bytes_by_device.values()) == [8192] * 7 + [8196]


def test_replicas_are_compared_bit_for_bit(mesh):
    array = put(np.array([1.0, np.nan, -0.0], np.float32), mesh, P())
    assert repr(proofs.assert_replicas_equal({"a": array})) == "replicas equal: 1 leaf, 8 copies"
    pieces = [shard.data for shard in array.addressable_shards]
    pieces[5] = jax.device_put(np.array([1.0, np.nan, 1e-3], np.float32), jax.devices()[5])
    drifted = jax.make_array_from_single_device_arrays((3,), array.sharding, pieces)
    with pytest.raises(ProofFailed, match=(
            r"leaf a: device 0 \(cpu\) and device 5 \(cpu\) should hold the same \[0:3\]; largest "
            r"difference 0.001, at \(2,\): expected -0, found 0.001")):
        proofs.assert_replicas_equal({"a": drifted})
    verdict = proofs.assert_replicas_equal(
        {"key": put(jax.random.key(1), mesh, P()), "host": np.zeros(2)})
    assert repr(verdict) == "replicas equal: 1 leaf, 8 copies; 1 without copies"
    assert verdict.compared == ["key"]


@pytest.mark.parametrize("tree", [
    lambda mesh: {"a": np.ones(3), "f": print}, lambda mesh: {},
    lambda mesh: jax.pmap(lambda i: i * jnp.ones(4))(jnp.arange(8.0)),
    lambda mesh: put(np.ones(8), mesh, P(("batch", "model"))), lambda mesh: jnp.ones(3)])
def test_where_nothing_has_a_copy_no_verdict_says_that_copies_are_equal(mesh, tree):
    verdict = proofs.assert_replicas_equal(tree(mesh))
    assert repr(verdict).startswith("no replicas, nothing compared: ") and verdict.copies < 2


def test_a_tree_without_leaves_is_not_sharded(mesh):
    for tree in {}, {"a": ()}, None:
        with pytest.raises(ValueError, match="a tree with leaves, found none"):
            proofs.assert_sharded(tree, P("batch"), mesh)


# Is the data that of the whole? --------------------------------------------------------------------

HELD = 2 * 4 * 32 * 64 // 2  # both weights, half of each


def remade(array, change):
    """The same array after a change to the list of its shards' data, in the order of devices."""
    shards = sorted(array.addressable_shards, key=lambda shard: shard.device.id)
    pieces = change([np.asarray(shard.data) for shard in shards])
    pieces = [jax.device_put(piece, shard.device) for piece, shard in zip(pieces, shards)]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, pieces)


def test_the_numbers_of_every_slice_are_those_of_the_host(mesh):
    tree = put(weights(), mesh, SPECS)
    verdict = proofs.assert_sharded(tree, SPECS, mesh, HELD, weights())
    assert repr(verdict) == "sharded: 2 leaves on 8 devices, 8.19 kB per device, as predicted"


@pytest.mark.parametrize("change, message", [
    (lambda x: [x[1], x[0], *x[2:]], r"w_in, device 0 \(cpu\): expected the elements of "
     r"\[0:32, 0:32\] of the whole, found others; largest difference"),
    (lambda x: x[::-1], r"w_in, device 0 \(cpu\): expected the elements of"),
    (lambda x: [x[0] + np.eye(32, dtype=np.float32)[::-1], *x[1:]],
     r"largest difference 1, at \(\d+, \d+\)"),
    (lambda x: [*x[:7], np.asarray(x[7].astype(jnp.bfloat16), np.float32)], r"device 7 \(cpu\)"),
    (lambda x: [*x[:3], np.where(x[3] == x[3].max(), np.nan, x[3]), *x[4:]],
     r"device 3 \(cpu\).*largest difference nan, at .* found nan"),
])
def test_shards_of_the_right_place_and_shape_with_other_data_are_caught(mesh, change, message):
    tree = put(weights(), mesh, SPECS)
    tree["w_in"] = remade(tree["w_in"], change)
    with pytest.raises(ProofFailed, match=message):
        proofs.assert_sharded(tree, SPECS, mesh, whole=weights())


def test_swapped_halves_of_every_pair_need_the_host_to_be_seen(mesh):
    """All copies agree, so that only the whole can tell that the halves are exchanged."""
    tree = put(weights(), mesh, SPECS)
    tree["w_in"] = remade(tree["w_in"], lambda x: [x[at ^ 1] for at in range(8)])
    proofs.assert_sharded(tree, SPECS, mesh, HELD)
    with pytest.raises(ProofFailed, match="leaf w_in, device 0"):
        proofs.assert_sharded(tree, SPECS, mesh, HELD, weights())


def test_weights_that_were_rounded_on_the_way_are_caught(mesh):
    rounded = jax.tree.map(lambda x: np.asarray(x.astype(jnp.bfloat16), np.float32), weights())
    with pytest.raises(ProofFailed, match="leaf w_in.*Also wrong: w_out"):
        proofs.assert_sharded(put(rounded, mesh, SPECS), SPECS, mesh, HELD, weights())


def test_without_the_host_copies_are_compared_with_each_other(mesh):
    tree = put(weights(), mesh, SPECS)
    tree["w_out"] = remade(tree["w_out"], lambda x: [*x[:6], x[6] + 1, x[7]])
    with pytest.raises(ProofFailed, match=(
            r"leaf w_out: device 0 \(cpu\) and device 6 \(cpu\) should hold the same")):
        proofs.assert_sharded(tree, SPECS, mesh)


@pytest.mark.parametrize("whole, message", [
    ({"w_in": weights()["w_in"]}, "have the leaves of the tree.*only in one of them: w_out"),
    (weights() | {"bias": np.zeros(3)}, "only in one of them: bias"),
    (weights() | {"w_in": weights()["w_in"].T},
     r"leaf w_in: expected `whole` to have its float32\(32, 64\), found float32\(64, 32\)"),
    (weights() | {"w_in": weights()["w_in"].astype(np.float64)}, r"found float64\(32, 64\)"),
    (weights() | {"w_in": np.asarray(weights()["w_in"].astype(jnp.bfloat16))}, "found bfloat16"),
])
def test_a_whole_of_another_kind_is_refused(mesh, whole, message):
    with pytest.raises(ValueError, match=message):
        proofs.assert_sharded(put(weights(), mesh, SPECS), SPECS, mesh, whole=whole)


LEAVES = {"bool": np.arange(8) % 3 == 0, "int": np.arange(8, dtype=np.int8),
          "scalar": np.float32(3), "half": np.asarray(jnp.arange(8, dtype=jnp.bfloat16)),
          "complex": 1j * np.arange(8, dtype=np.complex64), "empty": np.zeros((8, 0), np.float32)}


@pytest.mark.parametrize("name", LEAVES)
def test_leaves_of_every_kind_are_compared(mesh, name):
    whole = LEAVES[name]
    array = put(whole, mesh, P("batch") if whole.ndim else P())
    proofs.assert_sharded(array, array.sharding, held=whole.nbytes // (4 if whole.ndim else 1),
                          whole=whole)
    if not whole.size:
        return
    less = 1j if name == "complex" else 1
    other = remade(array, lambda x: [*x[:5], np.asarray(less - x[5], x[5].dtype), *x[6:]])
    for changed in (None, whole):
        with pytest.raises(ProofFailed, match=(
                r"device 5 \(cpu\).*difference [1-9].*: expected \d\S*, found -?\d")):
            proofs.assert_sharded(other, array.sharding, whole=changed)


def test_random_keys_are_compared_by_their_bits(mesh):
    keys, others = (jax.random.split(jax.random.key(seed), 8) for seed in (0, 1))
    array = put(keys, mesh, P("batch"))
    for whole in (keys, np.asarray(jax.random.key_data(keys))):
        proofs.assert_sharded(array, P("batch"), held=2 * 4 * 2, whole=whole)
    with pytest.raises(ProofFailed, match=r"device 0 \(cpu\): expected the elements of \[0:2\]"):
        proofs.assert_sharded(put(others, mesh, P("batch")), P("batch"), whole=keys)


def test_a_shard_that_another_process_holds_is_not_asked_for(mesh, monkeypatch):
    array = put(weights()["w_in"], mesh, P("batch"))
    elsewhere = remade(array, lambda x: [*x[:5], x[5] + 1, *x[6:]])
    shards = [shard for shard in elsewhere.addressable_shards if shard.device.id < 4]
    monkeypatch.setattr(type(array), "addressable_shards", property(lambda self: shards))
    monkeypatch.setattr(type(array), "is_fully_addressable", property(lambda self: False))
    here = {device: index for device, index in array.sharding.devices_indices_map((32, 64)).items()
            if device.id < 4}
    monkeypatch.setattr(NamedSharding, "addressable_devices_indices_map", lambda self, _: here)
    verdict = proofs.assert_sharded(elsewhere, P("batch"), mesh, 2048, weights()["w_in"])
    assert list(verdict.bytes.values()) == [2048] * 4


# Does the expectation come from elsewhere? ---------------------------------------------------------

def test_bytes_that_the_formula_does_not_give_are_named(mesh):
    for wrong in HELD - 1, HELD + 1:
        with pytest.raises(ProofFailed, match=(
                rf"device \d \(cpu\): expected {wrong:,} bytes of 2 leaves by the formula, "
                rf"found {HELD:,}")):
            proofs.assert_sharded(put(weights(), mesh, SPECS), SPECS, mesh, wrong)


def test_specs_are_found_by_the_letters_of_a_name(mesh):
    tree = {"blocks": {"0": {"w_in_DF": 1, "b_in_F": 2, "scale_D": 3}}, "step": 4}
    assert proofs.by_letters(tree, RULES["tensor_parallel"]) == {
        "blocks": {"0": {"w_in_DF": P(None, "model"), "b_in_F": P("model"), "scale_D": P()}},
        "step": P()}
    assert proofs.by_letters([7], {}) == [P()]


def test_stacked_leaves_have_a_first_dimension_more_that_is_not_split():
    tree = {"layers": [{"w_in_DF": 1, "b_out_D": 2}], "head_DV": 3}
    found = proofs.by_letters(tree, {"F": "model", "V": "model"}, stacked="layers")
    assert found == {"layers": [{"w_in_DF": P(None, None, "model"), "b_out_D": P()}],
                     "head_DV": P(None, "model")}
    assert proofs.by_letters(tree, {"F": "model"}) != found


def test_metadata_that_has_no_effect_is_caught(mesh):
    """Flax says that both weights are split; the arrays were made whole, and the step runs."""
    split = {"w_in_DF": P(None, "model"), "w_out_FD": P("model")}
    made = dict(zip(split, weights().values(), strict=True))
    with nnx.use_eager_sharding(False):
        model = nnx.State({name: nnx.Param(put(x, mesh, P()), out_sharding=split[name])
                           for name, x in made.items()})
    assert nnx.to_pure_dict(nnx.get_partition_spec(model)) == split
    params = nnx.to_pure_dict(model)
    rules = {"F": "model"}
    with pytest.raises(ProofFailed, match=r"leaf w_in_DF, device 0.*Also wrong: w_out_FD"):
        proofs.assert_sharded(params, proofs.by_letters(params, rules), mesh, HELD)
    with pytest.raises(ProofFailed, match="expected 8,192 bytes of 2 leaves .*found 16,384"):
        proofs.assert_sharded(params, P(), mesh, HELD)


def test_a_batch_that_lies_whole_on_every_device_is_caught(mesh):
    held = BATCHES[0].nbytes // 4
    proofs.assert_sharded(put(BATCHES[0], mesh, P("batch")), P("batch"), mesh, held, BATCHES[0])
    whole = put(BATCHES[0], mesh, P())
    with pytest.raises(ProofFailed, match=r"expected \[0:4, 0:32\].*found \[0:16, 0:32\]"):
        proofs.assert_sharded(whole, P("batch"), mesh, held, BATCHES[0])
    with pytest.raises(ProofFailed, match="expected 512 bytes of 1 leaf by the formula, found 2,048"):
        proofs.assert_sharded(whole, P(), mesh, held)
