"""Forward, input's gradient and weights' gradient: equations dealt out, each done once."""
import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshbook import proofs
from meshbook.parallel.backward import in_three

DRAW = np.random.default_rng(0).normal
WEIGHTS = {"in": jnp.float32(DRAW(size=(16, 32)) / 4), "out": jnp.float32(DRAW(size=(32, 16)) / 4),
           "unused": jnp.ones(3)}
X_BD, DY_BD = (jnp.float32(DRAW(size=(8, 16))) for _ in range(2))
ONE = 2 * 8 * 16 * 32  # FLOPs of a product


def layer(weights, x_BD, threshold):
    """With a cast of a weight, a call (silu), a comparison, and an input without gradient."""
    w_DF = weights["in"].astype(jnp.bfloat16).astype(jnp.float32)
    h_BF = jax.nn.silu(jnp.where(x_BD > threshold, x_BD, 0) @ w_DF)
    return x_BD + h_BF @ weights["out"]


@functools.cache
def parts(keeping):
    function = layer if keeping == "all" else jax.checkpoint(layer)
    own = (jnp.float32(0.1),)
    three = in_three(function, WEIGHTS, X_BD, *own)
    y_BD, kept = three.forward(WEIGHTS, own, X_BD)
    dx_BD, more = three.of_input(WEIGHTS, own, kept, DY_BD)
    dweights = three.of_weights(WEIGHTS, own, kept, more)
    given = (WEIGHTS, own, X_BD), (WEIGHTS, own, kept, DY_BD), (WEIGHTS, own, kept, more)
    programs = [jax.jit(f).lower(*each).compile() for f, each in zip(
        (three.forward, three.of_input, three.of_weights), given, strict=True)]
    return (y_BD, dweights, dx_BD), kept, more, [
        Fraction(proofs.work(program), ONE) for program in programs]


@pytest.mark.parametrize("keeping", ["all", "input"])
def test_the_parts_are_the_function_and_its_gradients(keeping):
    y_BD, back = jax.vjp(lambda w, x: layer(w, x, jnp.float32(0.1)), WEIGHTS, X_BD)
    for ours, theirs in zip(jax.tree.leaves(parts(keeping)[0]),
                            jax.tree.leaves((y_BD, *back(DY_BD))), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_each_part_does_a_third_and_a_rematerialised_one_computes_all_but_the_last_product_again():
    assert parts("all")[3] == [2, 2, 2]
    assert parts("input")[3] == [2, 3, 2]


def test_what_depends_on_weights_alone_is_not_kept_and_neither_is_what_nobody_reads():
    for keeping, most in ("all", 5), ("input", 1):
        _, kept, more, _ = parts(keeping)
        assert len(kept) <= most
        assert all(x.shape[0] == len(X_BD) for x in (*kept, *more))  # no weight, no cast of one
