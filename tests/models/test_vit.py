"""The vision transformer: its sizes, its layouts, dropout on and off, its dtypes."""
import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from meshes import on_one_device

from meshbook.models import ViT, ViTConfig
from meshbook.models.layers import dropout
from meshbook.planning import costs
from meshbook.sharding import Sharding, make_mesh

SMALL = ViTConfig(embed=32, hidden=64, heads=4, layers=2, patch=8)
IMAGES = np.random.default_rng(0).normal(size=(8, 32, 32, 3)).astype(np.float32)


def build(config=SMALL, sharding=Sharding.none(), seed=0):
    return ViT(config, sharding, rngs=nnx.Rngs(seed))


@on_one_device
def test_the_source_has_as_many_parameters_as_counted_by_hand():
    model = nnx.eval_shape(lambda: build(ViTConfig()))
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))
    assert count == 10_695_562 == costs.vit_parameters(ViTConfig())


@pytest.mark.parametrize("ways", [1, 2, 4])
def test_parameters_of_one_device_along_model(ways):
    with jax.set_mesh(make_mesh((8 // ways, ways))):
        model = build(sharding=Sharding.tensor_parallel())
    held = sum(leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(nnx.state(model)))
    assert held == costs.vit_parameters(SMALL, ways)


@on_one_device
def test_the_order_of_the_patches_matters():
    model = build()
    turned = IMAGES[:, ::-1]
    assert np.abs(model(IMAGES) - model(turned)).max() > 0.1
    model.position_TD[...] = jnp.zeros_like(model.position_TD[...])
    cut = IMAGES.reshape(8, 4, 8, 32, 3)[:, ::-1].reshape(IMAGES.shape)  # rows of patches
    np.testing.assert_allclose(model(IMAGES), model(cut), atol=1e-4)


@on_one_device
def test_dropout_is_on_with_a_key_and_off_without():
    model, key = build(), jax.random.key(1)
    assert (model(IMAGES) == model(IMAGES)).all()
    assert (model(IMAGES, key=key) == model(IMAGES, key=key)).all()
    assert (model(IMAGES, key=key) != model(IMAGES)).any()
    assert (model(IMAGES, key=key) != model(IMAGES, key=jax.random.key(2))).any()


def test_dropout_keeps_the_mean_and_drops_its_share():
    x = jnp.ones((200, 200))
    y = dropout(x, 0.25, jax.random.key(0))
    assert abs(float((y == 0).mean()) - 0.25) < 0.01
    assert abs(float(y.mean()) - 1) < 0.01


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
    (dict(dropout=1.0), r"share in \[0, 1\); found 1.0"),
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
