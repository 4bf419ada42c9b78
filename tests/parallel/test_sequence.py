"""Products of split tokens: what is gathered and scattered, and what cannot be."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshbook import proofs
from meshbook.parallel.sequence import gathered_tokens, products, split_tokens
from meshbook.sharding import make_mesh, reduced

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(4, 8, 6)).astype(np.float32)
W = RANDOM.normal(size=(6, 12)).astype(np.float32)
TOKENS, WHOLE = P("batch", "model"), P("batch", None, "model")


@pytest.mark.parametrize("spec, axes", [
    (P(), ()), (P("batch"), ()), (TOKENS, ("model",)), (WHOLE, ()),
    (P(None, ("a", "b")), ("a", "b")), (P("batch", "model", reduced={"other"}), ("model",))])
def test_the_axes_that_split_tokens(spec, axes):
    assert split_tokens(spec) == axes


def moved(function, x_spec, w_spec):
    mesh = make_mesh((2, 4))
    with jax.set_mesh(mesh):
        x, w = jax.device_put(X, x_spec), jax.device_put(W, w_spec)
        program = jax.jit(function).lower(x, w).compile()
        return {kind for kind, _ in proofs.collectives(program, mesh)}, program(x, w)


@pytest.mark.parametrize("overlapped, kinds", [
    (False, {"all-gather"}), (True, {"collective-permute"})])
def test_tokens_are_gathered_for_columns(overlapped, kinds):
    run = lambda x, w: products(x, [w], [WHOLE], overlapped)[0]
    found, y = moved(run, TOKENS, P(None, "model"))
    assert found == kinds
    np.testing.assert_allclose(y, X @ W, rtol=1e-5, atol=1e-5)


def test_tokens_stay_where_they_are_if_the_result_has_them_so():
    found, y = moved(lambda x, w: products(x, [w], [TOKENS])[0], TOKENS, P())
    assert found == set()
    np.testing.assert_allclose(y, X @ W, rtol=1e-5, atol=1e-5)


def test_what_was_gathered_by_itself_sums_its_gradient_once_and_scatters_it():
    def loss(x, w):
        c = gathered_tokens(x)
        w = reduced(w, "batch")
        y = jnp.einsum("btd,df->btf", c, w, out_sharding=WHOLE)
        return jnp.square(y).sum() + y.sum()

    kinds, found = moved(jax.grad(loss, (0, 1)), TOKENS, P(None, "model"))
    assert {"all-gather", "reduce-scatter"} <= kinds
    expected = jax.grad(lambda x, w: jnp.square(x @ w).sum() + (x @ w).sum(), (0, 1))(X, W)
    for one, other in zip(found, expected):
        assert np.linalg.norm(one - other) <= 1e-6 * np.linalg.norm(other)


def test_what_is_not_split_is_not_gathered():
    found, y = moved(lambda x, w: gathered_tokens(x), P("batch"), P())
    assert found == set()
    np.testing.assert_array_equal(y, X)


def test_results_that_differ_in_their_tokens_are_refused():
    with pytest.raises(ValueError, match="results whose tokens are split alike"):
        moved(lambda x, w: products(x, [w, w], [WHOLE, TOKENS]), TOKENS, P())


def test_tokens_that_would_have_to_change_their_axis_are_refused():
    with pytest.raises(ValueError, match=r"\('model',\) cannot become split over \('batch',\)"):
        moved(lambda x, w: products(x, [w], [P(None, "batch")])[0], P(None, "model"), P())
