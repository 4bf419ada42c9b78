"""Blocks of one expert each: which slot a choice has, products and gradients, and bad input."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshbook.parallel import grouped
from meshbook.parallel.grouped import blocks_of, grouped_matmul
from meshbook.proofs import work

RANDOM = np.random.default_rng(0)
CHOICES = {
    "spread": RANDOM.integers(0, 5, (12, 2)), "all for one": np.full((12, 2), 3),
    "two have none": RANDOM.integers(1, 4, (12, 2)), "some are elsewhere": np.arange(24) % 9 - 2,
    "nobody's": np.full((12, 2), -1), "in turns": np.arange(24) % 5}


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("block", [1, 4, 7])
def test_each_choice_has_a_slot_in_a_block_of_its_expert_in_the_order_of_tokens(name, block):
    choices = CHOICES[name].reshape(12, 2).astype(np.int32)
    slots, owner = map(np.asarray, blocks_of(jnp.asarray(choices), 5, block))
    count = (24 + 5 * (block - 1)) // block
    assert owner.shape == (count,) and ((owner >= 0) & (owner <= 5)).all()
    here = (choices >= 0) & (choices < 5)
    assert (slots[~here] == count * block).all()
    assert len(set(slots[here])) == here.sum()
    np.testing.assert_array_equal(owner[slots[here] // block], choices[here])
    for expert in range(5):
        own = slots[choices == expert]
        np.testing.assert_array_equal(own, own[:1].sum() + np.arange(len(own)))
    used = sum(-(-(choices == expert).sum() // block) for expert in range(5))
    assert (owner < 5).sum() == used


def plainly(x, w, owner):
    """Every block times its matrix, or times 0."""
    parts = np.split(x, len(owner))
    return np.concatenate([part @ w[e] if e < len(w) else 0 * part @ w[0]
                           for part, e in zip(parts, owner, strict=True)])


X, W = RANDOM.normal(size=(20, 6)), RANDOM.normal(size=(3, 6, 7))


@pytest.mark.parametrize("owner", [(0, 1, 2, 2, 0), (1, 1, 1, 1, 1), (3, 3, 2, 3, 0), (3,) * 5])
def test_products_and_gradients_are_those_of_each_block(owner):
    owner, dy = np.array(owner), RANDOM.normal(size=(20, 7))
    to32 = lambda *arrays: [jnp.asarray(each, jnp.float32) for each in arrays]
    y, back = jax.vjp(lambda x, w: grouped_matmul(x, w, jnp.asarray(owner)), *to32(X, W))
    np.testing.assert_allclose(y, plainly(X, W, owner), rtol=1e-5, atol=1e-6)
    dx, dw = back(*to32(dy))
    np.testing.assert_allclose(dx, plainly(dy, W.swapaxes(1, 2), owner), rtol=1e-5, atol=1e-6)
    expected = np.zeros_like(W)
    for part, dpart, e in zip(np.split(X, 5), np.split(dy, 5), owner, strict=True):
        if e < 3:
            expected[e] += part.T @ dpart
    np.testing.assert_allclose(dw, expected, rtol=1e-5, atol=1e-6)


def test_the_gradient_of_a_matrix_is_summed_in_float32():
    x, w = jnp.ones((1024, 2), jnp.bfloat16), jnp.ones((1, 2, 3), jnp.bfloat16)
    owner = jnp.zeros(1024, jnp.int32)  # 1,024 blocks of one row: in bfloat16 a sum stops at 256
    _, back = jax.vjp(lambda w: grouped_matmul(x, w, owner), w)
    (dw,) = back(jnp.ones((1024, 3), jnp.bfloat16))
    assert dw.dtype == jnp.bfloat16
    np.testing.assert_array_equal(dw.astype(np.float32), 1024)


def test_a_block_of_no_expert_is_not_computed():
    arguments = jnp.zeros((20, 6)), jnp.zeros((3, 6, 7)), jnp.zeros(5, jnp.int32)
    compiled = jax.jit(grouped_matmul).lower(*arguments).compile()
    assert work(compiled) == 20 * 2 * 6 * 7
    assert work(compiled, taken={"cond": (0.4, 0.6)}) == pytest.approx(0.6 * 20 * 2 * 6 * 7)


def test_of_blocks_only_those_of_an_expert_are_computed_forward_and_backward(monkeypatch):
    def noted(needed, make):
        jax.debug.callback(lambda each: seen.append(bool(each)), needed)
        return if_needed(needed, make)

    seen, if_needed = [], grouped.if_needed
    monkeypatch.setattr(grouped, "if_needed", noted)
    owner = jnp.array([3, 0, 2, 3, 1])
    _, back = jax.vjp(lambda x, w: grouped_matmul(x, w, owner), jnp.ones((20, 6)),
                      jnp.ones((3, 6, 7)))
    jax.effects_barrier()
    assert sorted(seen) == 2 * [False] + 3 * [True]
    back(jnp.ones((20, 7)))
    jax.effects_barrier()
    assert sorted(seen) == 3 * 2 * [False] + 3 * 3 * [True]  # of the rows and of the matrices


@pytest.mark.parametrize("policy, again", [
    (jax.checkpoint_policies.dots_with_no_batch_dims_saveable, 0),
    (jax.checkpoint_policies.nothing_saveable, 2)])
def test_what_a_policy_keeps_of_matmuls_by_blocks_is_not_made_twice(policy, again):
    def layer(x, weights):
        h = jnp.sin(grouped_matmul(x, weights[0], owner))
        return x + jnp.sin(grouped_matmul(h, weights[1], owner)), None

    def loss(weights):  # a loop, or XLA would find the second computation to be the first
        run = jax.checkpoint(layer, policy=policy, prevent_cse=False)
        return jax.lax.scan(run, jnp.ones((20, 6)), weights)[0].sum()

    owner = jnp.array([0, 1, 2, 0, 1])
    weights = jnp.ones((2, 3, 6, 7)), jnp.ones((2, 3, 7, 6))
    compiled = jax.jit(jax.grad(loss)).lower(weights).compile()
    assert work(compiled) == 2 * (6 + again) * 2 * 20 * 6 * 7


def test_empty_blocks_are_refused():
    with pytest.raises(ValueError, match="blocks of 1 or more slots; found 0"):
        blocks_of(jnp.zeros((4, 2), jnp.int32), 3, 0)
