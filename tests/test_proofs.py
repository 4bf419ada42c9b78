"""What each proof accepts, what it refuses, and what its messages say."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from meshbook import proofs
from meshbook.proofs import ProofFailed, Run

B, D, F = 16, 32, 64
SPECS = {"w_in": P(None, "model"), "w_out": P("model")}


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4, 2), ("batch", "model"), axis_types=(AxisType.Auto,) * 2)


def weights():
    draw = np.random.default_rng(0).normal
    return {"w_in": draw(size=(D, F)).astype(np.float32) / 6,
            "w_out": draw(size=(F, D)).astype(np.float32) / 8}


def put(tree, mesh, specs):
    return jax.device_put(tree, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))


def loss(params, x):
    return jnp.mean((jax.nn.relu(x @ params["w_in"]) @ params["w_out"] - jnp.sin(x)) ** 2)


def step(params, x):
    value, gradients = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), {"loss": value}


STEP = jax.jit(step, donate_argnums=0)
GRADIENTS = jax.jit(jax.grad(loss))
BATCHES = [np.random.default_rng(n).normal(size=(B, D)).astype(np.float32) for n in range(20)]


def plain(**changes):
    one = dict(step=STEP, state=jax.tree.map(jnp.asarray, weights()), gradients=GRADIENTS,
               params=lambda state: state)
    return Run(**(one | changes))


def split(mesh, **changes):
    rows = lambda x: jax.device_put(x, NamedSharding(mesh, P("batch")))
    run = dict(step=lambda state, x: STEP(state, rows(x)), state=put(weights(), mesh, SPECS),
               gradients=lambda state, x: GRADIENTS(state, rows(x)), params=lambda state: state)
    return Run(**(run | changes))


# Is it really sharded? ----------------------------------------------------------------------------

def test_expectations_may_be_specs_shardings_prefixes_and_other_containers(mesh):
    params = put(weights(), mesh, SPECS)
    named = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    state = {"params": params, "moments": (params, params), "nothing": ()}
    verdict = proofs.assert_sharded(state, {"params": named, "moments": (SPECS, named)})
    assert repr(verdict) == "sharded: 6 leaves on 8 devices, 24.6 kB a device"
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
        "leaf          shape     dtype    spec              devices  bytes a device",
        "params/w_in   (32, 64)  float32  P(None, 'model')  0-7               4,096",
        "params/w_out  (64, 32)  float32  P('model',)       0-7               4,096",
        "step          ()        float32  one device        0                     4",
        "3 leaves                                           0-7               8,196",
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
    proofs.assert_replicas_equal({"key": put(jax.random.key(1), mesh, P()), "host": np.zeros(2)})


# Is it the same training? -------------------------------------------------------------------------

def test_runs_that_agree_leave_their_states_alive(mesh):
    a, b = split(mesh), plain()
    verdict = proofs.assert_same_training(a, b, BATCHES)
    assert repr(verdict).startswith("same training: 20 steps, losses within ")
    assert verdict.loss_difference < 2e-6 and len(verdict.losses) == 20
    assert verdict.gradient_difference < 1e-5 and verdict.parameter_difference < 1e-5
    assert verdict.losses[-1][0] < verdict.losses[0][0]  # it trained
    np.testing.assert_array_equal(a.state["w_in"], weights()["w_in"])  # nothing was donated
    proofs.assert_same_training((a.step, a.state), (b.step, b.state), iter(BATCHES[:3]))


def test_a_step_may_return_the_loss_itself(mesh):
    bare = plain(step=lambda state, x: (state, loss(state, x)), gradients=None, params=None)
    proofs.assert_same_training(bare, bare, BATCHES[:2])


def scaled_loss(factor):
    def changed(state, x):
        state, metrics = STEP(state, x)
        return state, {"loss": metrics["loss"] * factor}

    return changed


@pytest.mark.parametrize("changes,message", [
    (dict(step=scaled_loss(1.001)),
     r"loss at step 0, device 0 \(cpu\): expected .* found .* 1.0e-03"),
    (dict(step=scaled_loss(jnp.nan)),
     "loss of run a at step 0.*expected a finite number, found nan"),
    (dict(gradients=lambda s, x: jax.tree.map(lambda g: g * 1.0001, GRADIENTS(s, x))),
     r"gradient, leaf w_(in|out): .* of the global norm apart"),
    (dict(gradients=lambda s, x: {"w_in": GRADIENTS(s, x)["w_in"]}),
     "gradients: expected the same leaves in both runs.*only in the second: w_out"),
    (dict(gradients=lambda s, x: jax.tree.map(lambda g: g.T, GRADIENTS(s, x))),
     r"gradients, leaf w_in: expected shape \(32, 64\), found \(64, 32\)"),
    (dict(gradients=lambda s, x: jax.tree.map(lambda g: g * jnp.inf, GRADIENTS(s, x))),
     "leaf w_in: expected finite numbers"),
    (dict(params=lambda s: jax.tree.map(lambda p: p * 1.01, s)),
     "parameter at the start, leaf w_in"),
])
def test_what_differs_is_named(changes, message):
    with pytest.raises(ProofFailed, match=message):
        proofs.assert_same_training(plain(**changes), plain(), BATCHES[:3])


def test_parameters_are_compared_after_the_last_step():
    def lazy(state, x):  # says the right loss, and learns a thousandth less of one weight
        after, metrics = STEP(jax.tree.map(jnp.copy, state), x)
        after["w_out"] = after["w_out"] + 1e-3 * (state["w_out"] - after["w_out"])
        return after, metrics

    with pytest.raises(ProofFailed, match="parameter after the last step, leaf w_out"):
        proofs.assert_same_training(plain(step=lazy), plain(), BATCHES[:1])


def test_a_gradient_that_is_zero_is_reported_and_its_parameter_is_not_compared():
    state = jax.tree.map(jnp.asarray, weights() | {"key_bias": np.zeros(D, np.float32)})

    def noisy(sign):  # what Adam makes of a rounding error
        def stepped(state, x):
            rest = {name: state[name] for name in SPECS}
            after, metrics = STEP(rest, x)
            return after | {"key_bias": state["key_bias"] + sign * 1e-3}, metrics
        return stepped

    def gradients(state, x):
        return GRADIENTS({name: state[name] for name in SPECS}, x) | {"key_bias": jnp.full(D, 1e-9)}

    runs = [plain(step=noisy(sign), state=state, gradients=gradients) for sign in (1, -1)]
    verdict = proofs.assert_same_training(*runs, BATCHES[:3])
    assert verdict.zero == ["key_bias"] and "not compared: key_bias" in repr(verdict)


def test_a_loss_that_differs_between_devices_is_seen(mesh):
    def uneven(state, x):
        each = jax.shard_map(lambda x: jnp.mean(x**2), mesh=mesh, in_specs=P("batch"),
                             out_specs=P(), check_vma=False)
        return state, {"loss": jax.jit(each)(x)}

    even = lambda state, x: (state, {"loss": np.mean(np.square(x[: B // 4]))})
    with pytest.raises(ProofFailed, match=r"loss at step 0, device [1-7] \(cpu\)"):
        proofs.assert_same_training((uneven, {}), (even, {}), BATCHES[:1])


def test_nothing_to_compare_is_refused():
    with pytest.raises(ValueError, match="gradients from both runs or from neither"):
        proofs.assert_same_training(plain(), plain(gradients=None), BATCHES[:1])
    with pytest.raises(ValueError, match="at least one batch"):
        proofs.assert_same_training(plain(), plain(), [])
    with pytest.raises(ValueError, match=r"scalar loss from run a, found shape \(2,\)"):
        bare = plain(gradients=None, params=None)
        proofs.assert_same_training((lambda s, x: (s, jnp.zeros(2)), {}), bare, BATCHES[:1])


# What does it communicate, and is the work divided? -----------------------------------------------

@pytest.fixture(scope="module")
def compiled(mesh):
    rows = jax.device_put(BATCHES[0], NamedSharding(mesh, P("batch")))
    return STEP.lower(put(weights(), mesh, SPECS), rows).compile()


def test_predictions_hold_or_are_named(compiled, mesh):
    right = {"model": 4 * (B // 4) * D, "batch": 4 * (D * F + 1)}
    verdict = proofs.assert_communicates(compiled, mesh, right)
    assert repr(verdict) == ("communicates as predicted: batch 8.20 kB in 1 collective; "
                             "model 512 B in 1")
    with pytest.raises(ProofFailed, match="batch: expected 8,192 bytes on one device, found 8,196"):
        proofs.assert_communicates(compiled, mesh, right | {"batch": 4 * D * F})
    with pytest.raises(ProofFailed, match="along batch: expected 0 bytes"):
        proofs.assert_communicates(compiled, mesh, {"model": right["model"]})
    with pytest.raises(ProofFailed, match="along batch, model: expected 4 bytes.* found 0"):
        proofs.assert_communicates(compiled, mesh, right | {("model", "batch"): 4})
    with pytest.raises(ValueError, match="expected axes among batch, model, found 'modle'"):
        proofs.assert_communicates(compiled, mesh, {"modle": 1})


def test_traffic_prints_as_a_table(compiled, mesh):
    moved = proofs.collectives(compiled, mesh)
    assert repr(moved).splitlines() == [
        "collective  along  count  bytes a device",
        "all-reduce  batch      1           8,196",
        "all-reduce  model      1             512",
    ]
    assert "| all-reduce | batch | 1 | 8,196 |" in moved._repr_markdown_()
    assert moved.total == (2, 8708) and moved.along("model") == (1, 512)
    assert moved.along("batch", "model") == moved.along("model", kind="all-gather") == (0, 0)
    assert repr(proofs.collectives(jax.jit(jnp.sin).lower(1.0).compile(), mesh)) == "no collectives"


def test_the_work_is_divided_or_both_figures_are_named(compiled):
    useful = 5 * 2 * B * D * F  # the input needs no gradient
    verdict = proofs.assert_divided(compiled, 8, useful)
    assert repr(verdict) == "work divided: 41.0 kFLOP a device x 8 = 1.000 x 328 kFLOP useful"
    with pytest.raises(ProofFailed, match=r"expected 1.333 x the useful FLOPs over 8.*found 41"):
        proofs.assert_divided(compiled, 8, useful, factor=4 / 3)


def test_the_proofs_import_only_jax_and_numpy():
    code = ("import sys, meshbook.proofs; others ='flax', 'torch', 'optax', 'grain', 'matplotlib'; "
            "print([name for name in others if name in sys.modules])")
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
