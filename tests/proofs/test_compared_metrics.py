"""Which metrics the proof of the same training compares, and what it says of the others."""
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from tiny_mlp import BATCHES, STEP, mesh_of, plain, weights

from meshbook import proofs
from meshbook.proofs import ProofFailed


def test_a_metric_that_is_zero_at_every_step_says_nothing():
    def counting(state, x):
        right.append(len(right) // 2 == fourth)  # both runs take turns
        state, metrics = STEP(state, x)
        return state, metrics | {"accuracy": jnp.float32(right[-1]), "norm": jnp.ones(())}

    run = plain(step=counting)
    for fourth, compared, reported in (3, "accuracy, norm", []), (99, "norm", ["accuracy"]):
        right = []
        verdict = proofs.assert_same_training(run, run, BATCHES[:5])
        assert f"(allowed 2e-06), {compared} 0.0e+00" in repr(verdict)
        assert verdict.still == reported
        assert repr(verdict).endswith("zero at every step, which says nothing: accuracy") == (
            reported != [])


def logging(metrics):
    def stepped(state, x):
        state, found = STEP(state, x)
        return state, metrics(found["loss"])
    return plain(step=stepped)


@pytest.mark.parametrize("metrics, compared", [
    (lambda loss, k: {"loss": loss, "scalar": {"accuracy": k * loss}}, "scalar/accuracy"),
    (lambda loss, k: {"scalar": {"learning/loss": loss, "norm": [k, 1.0]}}, "scalar/norm/0"),
    (lambda loss, k: {"loss": loss, "aux": {"losses": ({"z_loss": k * loss},)}},
     "aux/losses/0/z_loss"),
])
def test_metrics_within_metrics_are_compared(metrics, compared):
    right, wrong = (logging(lambda loss, k=k: metrics(loss, k)) for k in (1.0, 8.0))
    verdict = proofs.assert_same_training(right, right, BATCHES[:2])
    assert compared in verdict.metric_differences and "loss" in verdict.metric_differences
    with pytest.raises(ProofFailed, match=f"{compared} at step 0, .* expected .* found"):
        proofs.assert_same_training(wrong, right, BATCHES[:2])


def test_metrics_that_are_no_scalars_are_named_and_a_loss_is_needed():
    rows = logging(lambda loss: {"loss": loss, "rows": jnp.ones(3), "kind": {"of": "words"}})
    verdict = proofs.assert_same_training(rows, rows, BATCHES[:2])
    assert repr(verdict).endswith("; no scalars, not compared: kind/of, rows")
    assert verdict.left_out == ["kind/of", "rows"]
    for metrics, found in (lambda loss: {"cost": loss}, "cost"), (
            lambda loss: {"a_loss": loss, "b_loss": loss}, "a_loss, b_loss"), (
            lambda loss: (loss, {}), "tuple"):
        with pytest.raises(ValueError, match=f"loss.*found {found}"):
            proofs.assert_same_training(logging(metrics), rows, BATCHES[:1])


@pytest.mark.parametrize("which", [0, 1])
def test_a_metric_that_one_device_of_either_run_has_otherwise_is_found(which):
    everywhere = NamedSharding(mesh_of(), P())

    def apart(loss):
        own = [jax.device_put(float(loss) * (1 + 1e-3 * (each.id == 5)), each)
               for each in everywhere.mesh.devices.flat]
        return jax.make_array_from_single_device_arrays((), everywhere, own)

    runs = [logging(lambda loss: loss)] * 2
    runs[which] = logging(apart)
    with pytest.raises(ProofFailed, match=r"loss at step 0, device 5 \(cpu\): .* 1.0e-03 apart"):
        proofs.assert_same_training(*runs, BATCHES[:1])


def test_without_gradients_each_leaf_is_held_to_its_own_change():
    def counting(by):  # beside the weights, one leaf that moves a thousand times less
        def stepped(state, x):
            rest, metrics = STEP({name: state[name] for name in weights()}, x)
            return rest | {"count": state["count"] + by}, metrics
        return plain(step=stepped, gradients=None, state=weights() | {"count": jnp.zeros(1)})

    right, wrong = counting(1e-5), counting(1.01e-5)
    proofs.assert_same_training(right, right, BATCHES[:3])
    with pytest.raises(ProofFailed, match="parameter after the last step, leaf count: .*e-06 of "):
        proofs.assert_same_training(wrong, right, BATCHES[:3])


def test_close_to_zero_a_loss_is_compared_with_a_hundredth_of_the_references_first():
    losing = lambda *losses: proofs.Run(lambda number, x: (number + 1, losses[number]), 0)
    one, other = losing(1.0, 0.004), losing(0.6, 0.0)
    verdict = proofs.assert_same_training(other, one, range(2), rtol=0.5)
    assert verdict.loss_difference == pytest.approx(0.4)
    with pytest.raises(ProofFailed, match="loss at step 1, .* 6.7e-01 apart"):
        proofs.assert_same_training(one, other, range(2), rtol=0.5)
