"""How much rounding is: by nudges of the last digit, or of a tenth of what is allowed."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_mlp import BATCHES, GRADIENTS, SPECS, mesh_of, plain, put, weights

from meshbook import proofs
from meshbook.proofs import same_training
from meshbook.proofs.rounding import nudged


def test_nudges_are_a_tenth_of_a_tolerance_that_is_not_that_of_float32(monkeypatch):
    steps, measured = [], same_training.rounding_of

    def rounding_of(found, state, base, step):
        steps.append(step)
        return measured(found, state, base, step)

    monkeypatch.setattr(same_training, "rounding_of", rounding_of)
    small = lambda state, x: GRADIENTS(state, x) | {"w_out": 1e-8 * state["w_out"]}
    for tolerance in 1e-5, 2e-2:
        runs = (plain(gradients=small, params=None) for _ in range(2))
        proofs.assert_same_training(*runs, BATCHES[:1], tolerance=tolerance)
    assert {0.0, 2e-3} == set(steps)


def test_nudges_change_the_last_digit_and_nothing_else():
    mesh = mesh_of()
    tree = {"w": put(weights()["w_in"], mesh, SPECS["w_in"]), "half": jnp.ones(64, jnp.bfloat16),
            "zero": jnp.zeros(3), "count": jnp.arange(3), "key": jax.random.key(0), "f": print}
    moved = nudged(tree, 1)
    assert moved["w"].sharding == tree["w"].sharding
    for name, eps in ("w", 2.0**-23), ("half", 2.0**-7):
        ratio = np.asarray(moved[name], np.float64) / np.asarray(tree[name], np.float64) - 1
        assert moved[name].dtype == tree[name].dtype and ratio.min() < 0 < ratio.max()
        assert np.abs(ratio).max() <= 2 * eps and np.abs(ratio).min() >= eps / 2
    for name in "zero", "count":
        np.testing.assert_array_equal(moved[name], tree[name])
    assert moved["key"] == tree["key"] and moved["f"] is print
    jax.block_until_ready(jax.jit(lambda x: x + 1, donate_argnums=0)(moved["count"]))
    assert not tree["count"].is_deleted()
    coarse = nudged(tree, 1, 1e-3)["w"]
    assert float(jnp.max(jnp.abs(coarse / tree["w"] - 1))) == pytest.approx(1e-3, rel=1e-3)
