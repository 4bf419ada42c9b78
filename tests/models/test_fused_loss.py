"""The loss that looks at its logits once: equal to the plain one, nothing twice, on every mesh."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_losses import (
    B, CHUNK, D, HEAD, LABELS, T, V, VOCABULARY, WEIGHT, assert_equal, compiled, expected)
from tiny_gpt import ROWS, mesh_of

from benchmarks.odds_kernel import kernel_odds
from meshbook import proofs
from meshbook.hlo import module
from meshbook.models.fused_loss import one_pass_cross_entropy, plain_odds
from meshbook.sharding import Sharding


def one_pass(head, labels, weight=None, row="none", chunk=CHUNK, **options):
    return one_pass_cross_entropy(
        head["hidden"], head["w"], head["b"], labels, weight, vocabulary=VOCABULARY,
        sharding=getattr(Sharding, row)(), chunk=chunk, **options)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("chunk", [1, CHUNK, 37, 10_000])
def test_value_and_gradients_are_the_plain_ones(chunk, weighted):
    assert_equal(compiled(functools.partial(one_pass, chunk=chunk), weighted=weighted)[1], weighted)


@pytest.mark.parametrize("row", ROWS)
def test_and_so_they_are_on_a_mesh_by_every_preset(row):
    mesh = mesh_of((4, 2))
    program, found = compiled(functools.partial(one_pass, row=row), row, (4, 2), weighted=True)
    assert_equal(found, True)
    times = {"none": 8, "data_parallel": 2}.get(row, 1)
    useful = 2 * B * T * V * (3 * D + 1)  # the bias is as one more row of the weights
    proofs.assert_divided(program, 8, useful, times, rtol=1e-9)
    moved, tokens = proofs.collectives(program, mesh), B // 4 * T
    split = row in ("tensor_parallel", "fully_sharded")
    assert moved.along("model").bytes == (4 * (tokens * D + 4 * tokens) if split else 0)


@pytest.mark.usefixtures("one_device")
def test_a_token_that_does_not_count_does_nothing_however_wrong_it_is():
    far = HEAD | {"b": np.where(np.arange(V) == 7, 500, HEAD["b"]).astype(np.float32)}
    weight = np.float32(WEIGHT > 0)
    assert 0 < weight.sum() < weight.size
    grad = jax.jit(jax.value_and_grad(one_pass, has_aux=True))
    (loss, _), gradients = grad(far, np.where(weight > 0, 7, 3).astype(np.int32), weight)
    assert np.isfinite(loss) and all(np.isfinite(x).all() for x in gradients.values())


@pytest.mark.usefixtures("one_device")
def test_a_loss_beyond_its_range_is_infinite_and_a_label_beyond_the_vocabulary_is_not_a_number():
    far = HEAD | {"b": np.where(np.arange(V) == 7, 500, HEAD["b"]).astype(np.float32)}
    run = jax.jit(one_pass)
    assert run(far, np.where(LABELS == 7, 8, LABELS))[0] == np.inf
    assert np.isnan(run(HEAD, np.where(np.arange(T) == 3, VOCABULARY, LABELS).astype(np.int32))[0])


@pytest.mark.usefixtures("one_device")
def test_bfloat16_keeps_its_types_and_a_float32_loss():
    head = jax.tree.map(lambda x: x.astype(jnp.bfloat16), HEAD)
    (loss, accuracy), gradients = jax.jit(jax.value_and_grad(one_pass, has_aux=True))(head, LABELS)
    assert loss.dtype == jnp.float32 and {str(x.dtype) for x in gradients.values()} == {"bfloat16"}
    (right, right_accuracy), right_gradients = expected(False)
    np.testing.assert_allclose(loss, right, rtol=0.02)
    np.testing.assert_allclose(accuracy, right_accuracy, atol=0.02)
    for name, each in right_gradients.items():
        apart = np.linalg.norm(gradients[name].astype(np.float32) - each)
        assert apart < 0.02 * np.linalg.norm(each), name


@pytest.mark.usefixtures("one_device")
def test_a_tie_for_the_largest_logit_counts_as_right():
    flat = jax.tree.map(np.zeros_like, HEAD)
    loss, accuracy = jax.jit(one_pass)(flat, LABELS, WEIGHT)
    np.testing.assert_allclose(loss, np.log(VOCABULARY), rtol=1e-6)
    assert accuracy == 1


@pytest.mark.usefixtures("one_device")
def test_the_logits_are_never_all_there():
    program = jax.jit(jax.grad(lambda head: one_pass(head, LABELS)[0])).lower(HEAD).compile()
    largest = max(each.shape.size for computation in module.parse(program).computations.values()
                  for each in computation.instructions.values()
                  if not isinstance(each.shape, tuple))
    assert largest < B * T * V // 2


@pytest.mark.usefixtures("one_device")
def test_evaluation_makes_no_gradients():
    program = jax.jit(one_pass).lower(HEAD, LABELS).compile()
    assert proofs.work(program) == 2 * B * T * D * V


def operands(dtype):
    random = np.random.default_rng(0)
    numbers = [random.normal(size=size) for size in ((128, 64), (64, 256), 256, 128)]
    return [jnp.asarray(x, kind) for x, kind in zip(numbers, (dtype, dtype) + 2 * (jnp.float32,))]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_kernel_makes_the_same_odds(dtype):
    found, right = kernel_odds(*operands(dtype), interpret=True), plain_odds(*operands(dtype))
    assert [x.dtype for x in found] == [dtype, jnp.float32, dtype]
    assert {x.dtype for x in right} == {np.dtype("float32")}
    for one, other in zip(found, right, strict=True):
        rtol = 1e-5 if dtype == jnp.float32 else 0.01
        np.testing.assert_allclose(*(x.astype(jnp.float32) for x in (one, other)), rtol=rtol)


def test_the_kernel_says_which_sizes_it_takes():
    h_nD, w_Dv, b_v, label_n = operands(jnp.float32)
    with pytest.raises(ValueError, match="n to be a multiple of 128; found n=100"):
        kernel_odds(h_nD[:100], w_Dv, b_v, label_n[:100])
