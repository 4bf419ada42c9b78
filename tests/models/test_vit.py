"""The vision transformer: its sizes, its layouts, dropout on and off, its dtypes."""
import contextlib
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec as P
from meshes import on_one_device

from meshbook.costs.plans import Plan
from meshbook.costs.step import describe
from meshbook.models import ViT, ViTConfig
from meshbook.models.layers import dropout, kept
from meshbook.models.vit import MeanViT, whitening
from meshbook.sharding import Sharding, make_mesh

SMALL = ViTConfig(embed=32, hidden=64, heads=4, layers=2, patch=8)
IMAGES = np.random.default_rng(0).normal(size=(8, 32, 32, 3)).astype(np.float32)


def build(config=SMALL, sharding=Sharding.none(), seed=0):
    return ViT(config, sharding, rngs=nnx.Rngs(seed))


@on_one_device
def test_the_source_has_as_many_parameters_as_counted_by_hand():
    model = nnx.eval_shape(lambda: build(ViTConfig()))
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))
    assert count == 10_695_562 == describe(ViTConfig(), Plan(), 1).numbers["stored"]


@pytest.mark.parametrize("ways", [1, 2, 4])
def test_parameters_of_one_device_along_model(ways):
    with jax.set_mesh(make_mesh((8 // ways, ways))):
        model = build(sharding=Sharding.tensor_parallel())
    held = sum(leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(nnx.state(model)))
    plan = Plan(8 // ways, model=ways, rules="tensor_parallel")
    assert held == describe(SMALL, plan, 8).numbers["stored"]


@on_one_device
def test_the_order_of_the_patches_matters():
    model = build()
    turned = IMAGES[:, ::-1]
    assert np.abs(model(IMAGES) - model(turned)).max() > 0.1
    model.position_TD[...] = jnp.zeros_like(model.position_TD[...])
    cut = IMAGES.reshape(8, 4, 8, 32, 3)[:, ::-1].reshape(IMAGES.shape)  # rows of patches
    np.testing.assert_allclose(model(IMAGES), model(cut), atol=1e-4)


def of_the_mean(shape, row):
    """The logits of a MeanViT on a mesh of this shape, sharded by a preset."""
    with jax.set_mesh(make_mesh(shape)):
        model = MeanViT(SMALL, getattr(Sharding, row)(), rngs=nnx.Rngs(0))
        return np.asarray(jax.jit(lambda x: model(x))(IMAGES))


@pytest.mark.parametrize("row", ["data_parallel", "tensor_parallel", "fully_sharded"])
def test_a_head_that_reads_the_mean_does_so_on_every_mesh(row):
    np.testing.assert_allclose(of_the_mean((4, 2), row), of_the_mean((1, 1), "none"), atol=1e-5)


@on_one_device
def test_a_head_that_reads_the_mean_treats_all_patches_alike():
    model = MeanViT(SMALL, Sharding.none(), rngs=nnx.Rngs(0))
    assert model.embed(IMAGES).shape == (8, SMALL.tokens - 1, 32)
    cut = IMAGES.reshape(8, 4, 8, 32, 3)[:, ::-1].reshape(IMAGES.shape)  # rows of patches
    assert np.abs(model(IMAGES) - model(cut)).max() > 0.01
    model.position_TD[...] = jnp.zeros_like(model.position_TD[...])
    np.testing.assert_allclose(model(IMAGES), model(cut), atol=1e-5)
    model.class_D[...] = jnp.full_like(model.class_D[...], jnp.nan)
    assert np.isfinite(model(IMAGES)).all()


def test_whitened_patches_are_uncorrelated_and_of_variance_one():
    random = np.random.default_rng(0)
    images = np.cumsum(random.normal(size=(400, 32, 32, 3)), axis=1)  # neighbours are alike
    cut = images.reshape(400, 4, 8, 4, 8, 3).transpose(0, 1, 3, 2, 4, 5).reshape(400, 16, 192)
    first_XD = whitening(cut, 32)
    covariance = np.cov(cut.reshape(-1, 192) @ first_XD, rowvar=False)
    assert first_XD.shape == (192, 32) and first_XD.dtype == np.float32
    np.testing.assert_allclose(covariance, np.eye(32), atol=0.02)


def test_patches_have_as_many_components_as_numbers():
    few = np.random.default_rng(0).normal(size=(50, 5, 12))
    assert whitening(few, 16).shape == (12, 12) and whitening(few, 3).shape == (12, 3)
    np.testing.assert_array_equal(whitening(few, 3), whitening(few, 16)[:, :3])


@on_one_device
def test_dropout_is_on_with_a_key_and_off_without():
    model, key = build(), jax.random.key(1)
    assert (model(IMAGES) == model(IMAGES)).all()
    assert (model(IMAGES, key=key) == model(IMAGES, key=key)).all()
    assert (model(IMAGES, key=key) != model(IMAGES)).any()
    assert (model(IMAGES, key=key) != model(IMAGES, key=jax.random.key(2))).any()


@pytest.mark.parametrize("rate, share", [(0.1, 26 / 256), (0.25, 0.25), (1 / 256, 1 / 256)])
@pytest.mark.parametrize("tokens", [1, 64, 66])
def test_dropout_keeps_the_mean_and_drops_its_share(tokens, rate, share):
    x = jnp.ones((500, tokens, 64), jnp.bfloat16)
    y = dropout(x, rate, jax.random.key(0)).astype(jnp.float32)
    assert dropout(x, rate, None) is x and dropout(x, 0, jax.random.key(0)) is x
    error = (share * (1 - share) / x.size) ** 0.5
    assert abs(float((y == 0).mean()) - share) < 5 * error
    assert set(np.unique(y)) == {0, float(jnp.bfloat16(1 / (1 - share)))}
    by_token = np.asarray(y == 0).mean((0, 2))  # each of a word's bytes has its turn
    assert np.abs(by_token - share).max() < 6 * error * tokens**0.5


def test_every_byte_of_dropout_has_its_share_and_four_that_share_a_word_are_independent():
    key, x = jax.random.key(0), jnp.ones((64, 64, 64))
    drawn = sum(np.asarray(kept(key, x, least), int) for least in range(1, 256))
    counts = np.bincount(drawn.ravel(), minlength=256)
    assert np.abs(counts - x.size / 256).max() < 5 * (x.size / 256) ** 0.5
    quarters = drawn.reshape(64, 4, 16, 64) / 255 - 0.5
    for one, other in itertools.combinations(range(4), 2):
        both = (quarters[:, one] * quarters[:, other]).mean() * 12
        assert abs(both) < 5 / (x.size / 4) ** 0.5


@pytest.mark.parametrize("spec", [P("batch"), P("batch", None, "model"), P("batch", "model")])
def test_dropout_is_equal_on_every_mesh(spec):
    x = np.ones((8, 10, 8), np.float32)
    alone = dropout(jnp.asarray(x), 0.25, jax.random.key(3))
    for shape in (4, 2), (8, 1), (1, 2):
        with jax.set_mesh(make_mesh(shape)):
            split = jax.reshard(x, spec)
            y = jax.jit(dropout, static_argnums=1)(split, 0.25, jax.random.key(3))
            assert jax.typeof(y).sharding.spec == jax.typeof(split).sharding.spec
        np.testing.assert_array_equal(y, alone)


@on_one_device
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_dtype_reaches_every_layer(dtype):
    model = build(dataclasses.replace(SMALL, dtype=dtype))
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {np.dtype("float32")}
    jaxpr = jax.make_jaxpr(lambda x: model(x))(IMAGES)
    dots = [eqn for eqn in all_equations(jaxpr.jaxpr) if eqn.primitive.name == "dot_general"]
    assert len(dots) > 10
    assert {v.aval.dtype for eqn in dots for v in eqn.invars} == {np.dtype(dtype)}
    assert model(IMAGES).dtype == dtype


@on_one_device
def test_param_dtype_reaches_every_parameter():
    model = build(dataclasses.replace(SMALL, param_dtype=jnp.bfloat16))
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {np.dtype(jnp.bfloat16)}


def all_equations(jaxpr):
    """The equations of a jaxpr and of all that it calls."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns"):
                yield from all_equations(inner)
            elif hasattr(inner, "jaxpr"):
                yield from all_equations(inner.jaxpr)


@on_one_device
def test_a_profile_reads_like_the_code():
    text = jax.jit(lambda x: build()(x)).lower(IMAGES).as_text(debug_info=True)
    for scope in ("embed", "block_0", "block_1", "attention", "mlp", "head"):
        assert scope in text


@pytest.mark.parametrize("sizes, words", [
    (dict(patch=5), "32 pixels is not cut evenly by patches of 5"),
    (dict(heads=7), "D=384 does not divide into 7 heads"),
    (dict(dropout=1.0), r"share in \[0, 1\), rounded .* found 1.0"),
    (dict(dropout=0.001), "rounded to a 256th, and not to 0; found 0.001"),
    (dict(dropout=0.999), "rounded to a 256th, and not to 0; found 0.999"),
    (dict(layers=-1), "layers is a number from 1; found -1"),
    (dict(hidden=0), "hidden is a number from 1; found 0"),
])
def test_sizes_that_do_not_fit(sizes, words):
    with pytest.raises(ValueError, match=words):
        ViTConfig(**sizes)


@on_one_device
def test_images_of_another_shape():
    with pytest.raises(ValueError, match=r"expected images \(B, 32, 32, 3\), found \(8, 28, 28, 3\)"):
        build()(np.zeros((8, 28, 28, 3), np.float32))


@pytest.mark.parametrize("change, words", [
    (dict(heads=2), "H=2 does not divide over mesh axis 'model' of size 4"),
    (dict(hidden=66), "F=66 does not divide over mesh axis 'model' of size 4"),
])
def test_heads_and_hidden_units_that_the_mesh_cannot_divide(change, words):
    with jax.set_mesh(make_mesh((2, 4))), pytest.raises(ValueError, match=words):
        build(dataclasses.replace(SMALL, **change), Sharding.tensor_parallel())


@pytest.mark.parametrize("mesh, found", [
    (None, "no mesh"), (make_mesh((4, 2), axis_types=AxisType.Auto), "an Auto mesh, .*'batch'")])
def test_a_model_needs_an_explicit_mesh(mesh, found):
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        with pytest.raises(ValueError, match=f"needs an Explicit mesh around it.*; found {found}"):
            build()
