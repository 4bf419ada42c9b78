"""Parameters as they are used: whole where products need them, gradients where they are stored."""
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from meshbook.hlo.collectives import collectives
from meshbook.sharding import make_mesh
from meshbook.sharding.gradients import WithOwn, opened, waiting

AXES = ("batch", "context", "model")
MESHES = [(2, 2, 2), (4, 2, 1), (2, 4, 1), (8, 1, 1), (3, 2, 1), (1, 4, 2)]
LAYOUTS = {  # of w (D, F): stored, used; tokens are split over "batch" and "context"
    "rows in parts": (P("batch"), P()), "columns in parts": (P(None, "batch"), P()),
    "both, of two axes": (P("context", ("model", "batch")), P(None, "model")),
    "one dimension of two axes": (P(("batch", "context")), P()),
    "behind model": (P(("model", "batch")), P("model")), "whole": (P(), P()),
    "only split as it is used": (P(None, "model"), P(None, "model"))}


def numbers(rng, *shape):
    return rng.standard_normal(shape, np.float32)


def inputs(mesh, dtype=np.float32):
    rng = np.random.default_rng(3)
    x_BTD, w_DF, weight_BTF = (numbers(rng, 24, 8, 24), numbers(rng, 24, 48).astype(dtype),
                               numbers(rng, 24, 8, 48))
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    return (put(x_BTD, "batch", "context"), w_DF, put(weight_BTF, "batch", "context"),
            np.einsum("btd,btf->df", x_BTD, weight_BTF))


def value_and_gradient(mesh, stored, used, whole=False, dtype=None):
    """Of the sum of weighted products with a parameter; whole: it stands beside its own part."""
    x_BTD, w_DF, weight_BTF, expected_DF = inputs(mesh)
    w_DF = jax.device_put(w_DF, NamedSharding(mesh, stored))

    def loss(own):
        given = WithOwn(jax.lax.stop_gradient(jax.reshard(own, used)), own) if whole else own
        w = opened(given, waiting(used, "batch", "context"), dtype)
        out = "model" if "model" in str(used.partitions[-1:]) else None
        y_BTF = jnp.einsum("btd,df->btf", x_BTD.astype(w.dtype), w,
                           out_sharding=P("batch", "context", out))
        return (y_BTF.astype(jnp.float32) * jax.reshard(weight_BTF, P("batch", "context", out))
                ).sum()

    with jax.set_mesh(mesh):
        step = jax.jit(jax.value_and_grad(loss))
        return step.lower(w_DF).compile(), *step(w_DF), w_DF, expected_DF


@pytest.mark.parametrize("name, shape", list(itertools.product(LAYOUTS, MESHES)))
def test_a_gradient_is_the_sum_over_all_tokens_where_the_parameter_is_stored(name, shape):
    mesh, (stored, used) = make_mesh(shape, AXES), LAYOUTS[name]
    for whole in (False, True):
        program, value, g_DF, w_DF, expected_DF = value_and_gradient(mesh, stored, used, whole)
        np.testing.assert_allclose(g_DF, expected_DF, rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(value, (expected_DF * np.asarray(w_DF)).sum(), rtol=1e-4)
        assert g_DF.sharding.is_equivalent_to(NamedSharding(mesh, stored), 2)


@pytest.mark.parametrize("name, sums", [
    ("rows in parts", {"reduce-scatter": [("batch",)], "all-reduce": [("context",)]}),
    ("columns in parts", {"reduce-scatter": [("batch",)], "all-reduce": [("context",)]}),
    ("one dimension of two axes", {"reduce-scatter": [("batch", "context")]}),
    ("whole", {"all-reduce": [("batch", "context")]})])
def test_what_is_split_in_storage_is_scattered_and_only_the_rest_all_reduced(name, sums):
    """Of the value there is an all-reduce, too; it is one number."""
    mesh = make_mesh((2, 4, 1), AXES)
    program = value_and_gradient(mesh, *LAYOUTS[name])[0]
    found = collectives(program, mesh)
    for kind in ("reduce-scatter", "all-reduce"):
        large = [key for key in found.keys() if key[0] == kind and found[key].bytes > 8]
        assert [tuple(axes) for _, axes in large] == sums.get(kind, [])


@pytest.mark.parametrize("name", ("rows in parts", "whole"))
def test_products_are_narrow_and_gradients_have_the_dtype_of_what_is_stored(name):
    mesh = make_mesh((2, 2, 2), AXES)
    program, value, g_DF, w_DF, expected_DF = value_and_gradient(
        mesh, *LAYOUTS[name], dtype=jnp.bfloat16)
    assert g_DF.dtype == jnp.float32 and w_DF.dtype == jnp.float32
    off = np.abs(np.asarray(g_DF) - expected_DF).max() / np.abs(expected_DF).max()
    assert 1e-4 < off < 2e-2  # rounded by the products


def test_an_axis_that_splits_a_parameter_is_not_waited_for():
    with jax.set_mesh(make_mesh((2, 2, 2), AXES)):
        assert waiting(P(None, "model"), "batch", ("model", "context")) == P(
            None, "model", reduced={"batch", "context"})
        assert waiting(P("batch", reduced={"context"}), "batch") == P(
            "batch", reduced={"context"})
        assert waiting(P(), None) == P()
    with jax.set_mesh(make_mesh((1, 1, 1), AXES)):
        assert waiting(P(), "batch") == P()
