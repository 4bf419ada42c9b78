"""Gradients that wait, are scattered or added up in parts: on any mesh those of one device."""
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from properties import examples, shapes

from meshbook.parallel.accumulation import in_microbatches
from meshbook.parallel.zero import value_and_grad
from meshbook.sharding import Sharding, beside, make_mesh

PRESETS = {"ZeRO-2": Sharding.zero2(), "ZeRO-3, again": Sharding.fully_sharded(True),
           "ZeRO-1": Sharding.zero1(), "ZeRO-3": Sharding.fully_sharded(False),
           "by the compiler": Sharding.fully_sharded(), "whole": Sharding.tensor_parallel(),
           "nothing split": Sharding.data_parallel()}
AXES = "batch", "more", "model"  # rows are split over the first two
ROWS = AXES[:2]


@dataclass(frozen=True)
class Net:
    """Two layers under some rules, with what gradients of a program are asked for."""

    rules: Sharding
    lives: Any
    rows: tuple = ROWS
    waits: bool = False

    def model(self, params):
        return SimpleNamespace(sharding=self.rules)

    def loss(self, params, program, batch, key=None):
        """The mean over rows of counts_B * sin(result) * directions_D: counts are of any sign."""
        used = lambda name: self.rules.weight(name.split("_")[1], params[name], jnp.float32)
        product = lambda sums, x, w, letters: jnp.einsum(
            sums, x, w, out_sharding=self.rules.activation(letters))
        h_BF = product("BD,DF->BF", batch["x"], used("w_DF"), "BF")
        h_BF = jnp.tanh(h_BF + beside(self.rules, "F", params["b_F"], h_BF))
        y_BD = product("BF,FD->BD", h_BF, used("w_FD"), "BD")
        y_BD = jnp.sin(y_BD + beside(self.rules, "D", params["b_D"], y_BD))
        each_B = (y_BD * jnp.cos(jnp.arange(y_BD.shape[1]))).sum(-1)
        loss = (batch["counts"] * each_B).mean()
        return loss, {"loss": loss}


def on_one_device(params, batch):
    h_BF = jnp.tanh(batch["x"] @ params["w_DF"] + params["b_F"])
    y_BD = jnp.sin(h_BF @ params["w_FD"] + params["b_D"])
    return (batch["counts"] * (y_BD * jnp.cos(jnp.arange(y_BD.shape[1]))).sum(-1)).mean()


@examples(4)
@example((2, 2, 2), "ZeRO-1", 2, (2, 1, 2))
@example((2, 2, 1), "ZeRO-2", 3, (1, 1, 2))
@example((2, 1, 3), "ZeRO-3, again", None, (1, 2, 1))
@given(shapes().filter(lambda shape: len(shape) == 3), st.sampled_from([*PRESETS]),
       st.sampled_from([3, 2, None, 1, 5]), st.tuples(*[st.integers(1, 2)] * 3))
def test_gradients_are_those_of_one_device_and_lie_where_moments_do(shape, preset, parts, times):
    batch, more, model = shape
    B, D, F = (each * ways for each, ways in zip(
        times, (batch * more * (parts or 1), batch, model), strict=True))
    normal = np.random.default_rng(B * D * F).normal
    draw = lambda *sizes: normal(size=sizes).astype(np.float32)
    params = {"w_DF": draw(D, F), "b_F": draw(F), "w_FD": draw(F, D), "b_D": draw(D)}
    given = {"x": draw(B, D), "counts": draw(B)}
    mesh, rules = make_mesh(shape, AXES), PRESETS[preset].also(activations={"B": ROWS})
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        lives = {name: rules.lives(name.split("_")[1]) for name in params}
        by_hand = rules.gradients is not None
        net = Net(rules, {name: each["lives"] for name, each in lives.items()} if by_hand else None)
        loss = in_microbatches(net.loss, parts) if parts else net.loss
        stored = {name: rules.parameter(name.split("_")[1]) for name in params}
        rows = {name: P(ROWS) for name in given}
        (value, metrics), grads = jax.jit(lambda params, batch: value_and_grad(loss)(
            params, net, batch))(*jax.device_put((params, given), (stored, rows)))
    with jax.enable_x64(True):
        wide = jax.tree.map(np.float64, (params, given))
        expected, right = jax.device_get(jax.value_and_grad(on_one_device)(*wide))
    np.testing.assert_allclose([value, metrics["loss"]], expected, rtol=1e-5, atol=1e-6)
    for name, grad in grads.items():
        assert np.linalg.norm(grad - right[name]) <= 3e-6 * max(1, np.linalg.norm(right[name]))
        if by_hand:
            where = jax.NamedSharding(mesh, lives[name]["lives"].moments)
            assert grad.sharding.is_equivalent_to(where, grad.ndim)
