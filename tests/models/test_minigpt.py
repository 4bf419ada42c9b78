"""MiniGPT: what a position sees, padding, tables and meshes, bad input."""
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from meshes import on_one_device
from test_vit import all_equations
from tiny_gpt import CONFIG, ROWS, build, place_all, tiny_state, weights

from meshbook.costs.plans import Plan
from meshbook.costs.step import describe
from meshbook.hlo import module
from meshbook.models import MiniGPTConfig
from meshbook.models.text_models import MASKED, look_up
from meshbook.sharding import Sharding, make_mesh

TOKENS = np.random.default_rng(0).integers(0, 250, (8, 16)).astype(np.int32)


@functools.cache
def state(row="none", shape=(1, 1)):
    return tiny_state(row, shape)


@functools.cache
def compiled(program, *names):
    """The model's logits as a compiled program."""
    def apply(params, batch):
        return program.model(params)(**batch)

    batch = program.place({name: TOKENS for name in names})
    params = place_all(weights(), program.specs[0], program.mesh)
    with jax.set_mesh(program.mesh):
        return jax.jit(apply).lower(params, batch).compile()


def logits(state, tokens=TOKENS, **documents):
    batch = state.program.place({"tokens_BT": tokens} | documents)
    return np.asarray(compiled(state.program, *batch)(state.params, batch))


@on_one_device
def test_the_source_has_as_many_parameters_as_counted_by_hand():
    config = MiniGPTConfig()
    model = nnx.eval_shape(lambda: build(config))
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))
    padding = (config.padded - config.vocabulary) * (2 * config.embed + 1)
    assert config.padded == 50_304
    found = describe(config, Plan(), 1).numbers["stored"]
    assert count == found == 27_430_481 + padding
    eight = dataclasses.replace(config, layers=8)
    assert describe(eight, Plan(), 1).numbers["stored"] == 29_013_585 + padding


@pytest.mark.parametrize("ways", [2, 4])
def test_parameters_of_one_device_along_model(ways):
    held = state("tensor_parallel", (8 // ways, ways)).params
    held = sum(leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(held))
    plan = Plan(8 // ways, model=ways, rules="tensor_parallel")
    assert held == describe(CONFIG, plan, 8).numbers["stored"]


@pytest.mark.parametrize("row", ROWS)
def test_every_preset_gives_the_same_logits(row):
    documents = {"segments": TOKENS // 64, "positions": TOKENS % 16}
    found = logits(state(row, (4, 2)), **documents)
    np.testing.assert_allclose(found, logits(state(), **documents), atol=1e-5)


def test_no_position_sees_what_follows():
    changed = TOKENS.copy()
    changed[:, 9:] = (changed[:, 9:] + 1) % 250
    before, after = logits(state()), logits(state(), changed)
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert np.abs(before[:, 9:] - after[:, 9:]).max(-1).min() > 1e-3


def test_documents_in_a_row_are_as_if_each_stood_alone():
    segments = np.int32([[1] * 5 + [2] * 11] * 8)
    positions = np.int32([[*range(5), *range(11)]] * 8)
    packed = logits(state(), segments=segments, positions=positions)
    filled = lambda part: np.pad(part, ((0, 0), (0, 16 - part.shape[1])))
    for part in slice(0, 5), slice(5, 16):
        alone = logits(state(), filled(TOKENS[:, part]))
        size = part.stop - part.start
        np.testing.assert_allclose(packed[:, part], alone[:, :size], atol=1e-5)


@on_one_device
@pytest.mark.parametrize("documents", [False, True])
def test_no_constant_of_the_squared_length(documents):
    T, config = 128, dataclasses.replace(CONFIG, tokens=128, layers=1)
    rows = jax.ShapeDtypeStruct((2, T), jnp.int32)
    extra = {"segments": rows, "positions": rows} if documents else {}
    text = jax.jit(lambda x, extra: build(config)(x, **extra)).lower(rows, extra).compile()
    assert largest_constant(text) < T * T
    mask = np.tril(np.ones((T, T), np.float32)) + np.random.default_rng(0).normal(size=(T, T))
    assert largest_constant(jax.jit(lambda x: mask * x).lower(1.0).compile()) == T * T


def largest_constant(compiled):
    """Elements of the largest constant in a program's text."""
    return max((each.shape.size for computation in module.parse(compiled).computations.values()
                for each in computation.instructions.values() if each.opcode == "constant"),
               default=0)


@on_one_device
def test_tokens_that_do_not_exist_are_never_likely_and_have_no_gradient():
    assert (logits(state())[..., 250:] == np.float32(MASKED)).all()
    assert np.isfinite(logits(state())).all()
    def loss(params, tokens):
        scores = state().program.apply(params, tokens)
        return optax.softmax_cross_entropy_with_integer_labels(scores, tokens).mean()

    grads = jax.jit(jax.grad(loss)).lower(state().params, TOKENS).compile()(
        state().params, TOKENS)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
    assert not np.asarray(grads["w_head_DV"])[:, 250:].any()
    assert not np.asarray(grads["b_head_V"])[250:].any()
    assert jax.nn.softmax(logits(state()))[..., 250:].max() == 0


@pytest.mark.parametrize("row, shape", [("none", (1, 1)), ("tensor_parallel", (4, 2))])
def test_a_token_or_position_out_of_range_is_not_a_number(row, shape):
    tokens, places = TOKENS.copy(), np.tile(np.arange(16, dtype=np.int32), (8, 1))
    tokens[[0, 1, 2], 3] = 250, 256, -1
    places[[4, 5], 3] = 16, -1
    found = np.isnan(logits(state(row, shape), tokens, positions=places))
    assert found.all((1, 2)).tolist() == [True, True, True, False, True, True, False, False]
    assert not found[[3, 6, 7]].any()


@pytest.mark.parametrize("row, shape", [("data_parallel", (1, 8)), ("tensor_parallel", (2, 4))])
def test_the_gradient_of_a_frequent_token_is_whole_in_bfloat16(row, shape):
    """A sum in bfloat16 stops at 256 ones: 257 is not one of its numbers."""
    sharding = getattr(Sharding, row)()
    tokens = np.zeros((8, 64), np.int32)

    def total(table_VD):
        x_BTD = look_up("VD", table_VD, tokens, 16, jnp.bfloat16, sharding)
        return x_BTD.astype(jnp.float32).sum()

    with jax.set_mesh(make_mesh(shape)):
        table_VD = jax.reshard(jnp.ones((16, 4)), sharding.parameter("VD"))
        found = np.asarray(jax.jit(jax.grad(total))(table_VD))
    assert (found[0] == tokens.size).all() and not found[1:].any()


@on_one_device
def test_dropout_is_on_with_a_key_and_off_without():
    run, keys = jax.jit(state().program.apply), jax.random.split(jax.random.key(1))
    first, again, other = (run(state().params, TOKENS, keys[at]) for at in (0, 0, 1))
    assert (first == again).all()
    assert (first != other)[..., :250].any()
    np.testing.assert_allclose(
        run(state().params, TOKENS), logits(state()), atol=1e-5)
    assert np.abs(first - logits(state()))[..., :250].max() > 1e-2


@on_one_device
def test_dtype_reaches_every_layer():
    make = lambda: build(dataclasses.replace(CONFIG, dtype=jnp.bfloat16))
    held = jax.tree.leaves(nnx.state(nnx.eval_shape(make)))
    assert {leaf.dtype for leaf in held} == {np.dtype("float32")}
    jaxpr = jax.make_jaxpr(lambda x: make()(x))(TOKENS)
    dots = [each for each in all_equations(jaxpr.jaxpr) if each.primitive.name == "dot_general"]
    assert len(dots) > 8
    assert {v.aval.dtype for each in dots for v in each.invars} == {np.dtype(jnp.bfloat16)}
    assert jaxpr.out_avals[0].dtype == jnp.bfloat16


@pytest.mark.parametrize("sizes, words", [
    (dict(heads=7), "D=256 does not divide into 7 heads"),
    (dict(dropout=1.0), r"share in \[0, 1\), rounded .* found 1.0"),
    (dict(vocabulary=0), "vocabulary is a number from 1; found 0"),
    (dict(tokens=0), "tokens is a number from 1; found 0"),
])
def test_sizes_that_do_not_fit(sizes, words):
    with pytest.raises(ValueError, match=words):
        MiniGPTConfig(**sizes)


@on_one_device
def test_rows_longer_than_the_window():
    with pytest.raises(ValueError, match="a row has 17 tokens; the window has room for 16"):
        build()(np.zeros((1, 17), np.int32))


def test_sizes_that_the_mesh_cannot_divide():
    few = dataclasses.replace(CONFIG, heads=2)
    with jax.set_mesh(make_mesh((2, 4))), pytest.raises(ValueError, match="H=2 does not divide"):
        build(few, Sharding.tensor_parallel())
