"""Routing: scores and gates, slots of a row, ties and crowds, balance by loss and by bias."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_experts import choices_of
from jax.sharding import PartitionSpec as P
from meshes import on_one_device

from meshbook.parallel.routing import (
    balance_loss, capacity, loads, route, slots_of, update_bias
)
from meshbook.sharding import make_mesh

pytestmark = on_one_device
RANDOM = np.random.default_rng(0)
LOGITS = RANDOM.normal(size=(4, 9, 6)).astype(np.float32)
SCORES = {"softmax": np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True),
          "sigmoid": 1 / (1 + np.exp(-LOGITS))}


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("active", [1, 2, 6])
def test_the_best_experts_weigh_as_much_as_their_scores(kind, active):
    found, scores = route(LOGITS, active, kind), SCORES[kind]
    best = np.argsort(-scores, -1)[..., :active]
    np.testing.assert_array_equal(found.experts_BTA, best)
    gates = np.take_along_axis(scores, best, -1)
    gates = gates / gates.sum(-1, keepdims=True) if active > 1 else gates
    np.testing.assert_allclose(found.gates_BTA, gates, rtol=1e-6)
    np.testing.assert_allclose(found.shares_BTE, scores / scores.sum(-1, keepdims=True), rtol=1e-6)


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("active", [1, 2])
def test_the_router_learns_from_its_gates(kind, active):
    weights = RANDOM.normal(size=(4, 9, active)).astype(np.float32)
    total = lambda logits: (route(logits, active, kind).gates_BTA * weights).sum()
    gradient = jax.grad(total)(LOGITS)
    assert np.abs(gradient).sum(-1).min() > 0
    step, direction = 1e-3, RANDOM.normal(size=LOGITS.shape).astype(np.float32)
    slope = (total(LOGITS + step * direction) - total(LOGITS - step * direction)) / (2 * step)
    np.testing.assert_allclose((gradient * direction).sum(), slope, rtol=2e-3)


@pytest.mark.parametrize("kind", SCORES)
def test_a_bias_changes_who_is_chosen_and_not_what_they_weigh(kind):
    bias = np.array([0, 0, 0, 0, 0, 9], np.float32)
    found, scores = route(LOGITS, 2, kind, bias), SCORES[kind]
    assert (found.experts_BTA[..., 0] == 5).all()
    gates = np.take_along_axis(scores, np.asarray(found.experts_BTA), -1)
    np.testing.assert_allclose(found.gates_BTA, gates / gates.sum(-1, keepdims=True), rtol=1e-6)
    np.testing.assert_allclose(found.shares_BTE, route(LOGITS, 2, kind).shares_BTE)
    weights = RANDOM.normal(size=found.gates_BTA.shape)
    gradient = jax.grad(lambda bias: (route(LOGITS, 2, kind, bias).gates_BTA * weights).sum())
    np.testing.assert_array_equal(gradient(bias), 0)


def test_ties_go_to_the_first_experts_on_every_device():
    found = route(np.zeros_like(LOGITS), 2)
    np.testing.assert_array_equal(found.experts_BTA[0, 0], [0, 1])
    np.testing.assert_allclose(found.gates_BTA, 0.5)


def test_scores_that_are_all_zero_in_float32_weigh_nothing_and_are_no_nan():
    found = route(np.full_like(LOGITS, -1e4), 2, "sigmoid")
    assert np.isfinite(found.gates_BTA).all() and np.isfinite(found.shares_BTE).all()


@pytest.mark.parametrize("slots", [1, 2, 3, 9])
@pytest.mark.parametrize("crowd", ["spread", "one", "ties", "one has none"])
def test_slots_are_taken_in_the_order_of_tokens_and_no_two_choices_have_one(slots, crowd):
    logits = LOGITS.copy()
    logits[..., 2] += {"one": 50, "one has none": -50}.get(crowd, 0)
    logits = np.zeros_like(logits) if crowd == "ties" else logits
    experts = route(logits, 2).experts_BTA
    expected, kept = choices_of(logits, 2, slots)
    np.testing.assert_array_equal(experts, expected)
    found = np.asarray(slots_of(experts, 6, slots))
    np.testing.assert_array_equal(found < 6 * slots, kept)
    np.testing.assert_array_equal((found // slots)[kept], expected[kept])
    assert (found[~kept] == 6 * slots).all()
    for row, own in zip(found, kept, strict=True):
        assert len(set(row[own])) == own.sum()
    np.testing.assert_array_equal(loads(jnp.asarray(found // slots), 6),
                                  np.bincount(expected[kept], minlength=6))


def changed_by_later_tokens(slots):
    """Whether `slots(experts)`, kept or not, of early tokens depend on later ones."""
    experts = jnp.asarray(RANDOM.integers(0, 6, (4, 9, 2)).astype(np.int32))
    crowded = experts.at[:, 5:].set(experts[:, :1])
    return not np.array_equal(slots(experts)[:, :5], slots(crowded)[:, :5])


def test_priority_is_causal_and_the_usual_ones_are_not():
    def over_all_tokens(experts):  # one capacity for the batch: later tokens of row 0 before row 1
        return slots_of(experts.reshape(1, -1, 2), 6, 9).reshape(experts.shape)

    def first_choices_first(experts):  # second choices wait until all first ones have places
        ranked = experts.swapaxes(1, 2).reshape(len(experts), -1, 1)
        return slots_of(ranked, 6, 3).reshape(len(experts), 2, -1).swapaxes(1, 2)

    assert not changed_by_later_tokens(lambda experts: slots_of(experts, 6, 3))
    assert changed_by_later_tokens(over_all_tokens)
    assert changed_by_later_tokens(first_choices_first)


def test_a_shorter_row_has_the_slots_of_its_tokens_in_a_longer_one():
    experts = route(LOGITS, 2).experts_BTA
    np.testing.assert_array_equal(slots_of(experts[:, :5], 6, 2), slots_of(experts, 6, 2)[:, :5])


@pytest.mark.parametrize("factor, expected", [(1, 4), (1.25, 5), (1.3, 6), (0.01, 1), (100, 16)])
def test_capacity_is_rounded_up_and_never_more_than_the_tokens(factor, expected):
    assert capacity(factor, 16, 2, 8) == expected
    assert capacity(1.1, 50, 2, 10) == 11  # 11.000000000000002 in floating point


@pytest.mark.parametrize("shape, spec", [
    ((4, 2), P(("batch", "expert"))), ((8,), P(None, "expert")), ((2, 2), P("batch", "expert"))])
def test_choices_loads_and_the_balance_loss_are_those_of_the_whole_batch(shape, spec):
    logits = RANDOM.normal(size=(8, 8, 6)).astype(np.float32)

    def found(logits):
        routing = route(logits, 2)
        slots = slots_of(routing.experts_BTA, 6, 2)
        return slots, loads(slots // 2, 6), balance_loss(routing), routing.experts_BTA

    mesh = make_mesh(shape, ("batch", "expert")[-len(shape):])
    one = jax.jit(found)(logits)
    slope = jax.jit(jax.grad(lambda x: found(x)[2]))
    expected = slope(logits)
    with jax.set_mesh(mesh):
        placed = jax.device_put(logits, jax.NamedSharding(mesh, spec))
        compiled = jax.jit(found).lower(placed).compile()
        split, gradient = compiled(placed), slope(placed)
    for each, other in zip(split, one, strict=True):
        np.testing.assert_allclose(each, other, rtol=1e-6)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-9)
    share = np.bincount(np.ravel(one[3]), minlength=6) / one[3].size
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(one[2], 6 * (share * p.mean((0, 1))).sum(), rtol=1e-6)
    halves = [found(half)[2] for half in np.split(logits, 2)]
    assert abs(np.mean(halves) - one[2]) > 1e-4  # the mean of devices' own losses is another number


def test_the_balance_loss_is_one_for_even_shares_and_falls_by_its_gradient():
    assert balance_loss(route(np.zeros_like(LOGITS), 6)) == pytest.approx(1)
    skewed = LOGITS + np.arange(6, dtype=np.float32)
    loss = jax.value_and_grad(lambda logits: balance_loss(route(logits, 2)))
    before, gradient = loss(skewed)
    assert 1 < loss(skewed - 5 * gradient)[0] < before


def test_a_bias_evens_out_the_loads():
    bias, spread = jnp.zeros(6), []
    skewed = RANDOM.normal(size=(8, 64, 6)).astype(np.float32) + np.arange(6, dtype=np.float32) / 3
    for _ in range(60):
        counts = loads(route(skewed, 2, "sigmoid", bias).experts_BTA, 6)
        spread.append(float(counts.std() / counts.mean()))
        bias = update_bias(bias, counts, 0.01)
    assert spread[0] > 0.5 and max(spread[-5:]) < 0.1
    even = update_bias(jnp.zeros(3), jnp.array([4.0, 2, 3]), 0.5)
    np.testing.assert_array_equal(even, [-0.5, 0.5, 0])


@pytest.mark.parametrize("call, message", [
    (lambda: route(LOGITS, 7), "1 to 6 of 6 experts; found active=7"),
    (lambda: route(LOGITS, 0), "found active=0"),
    (lambda: route(LOGITS, 2, "tanh"), "softmax, sigmoid; found 'tanh'"),
    (lambda: capacity(0, 16, 2, 8), "capacity of 1 or more slots; found 0, a factor of 0"),
    (lambda: capacity(-1.5, 16, 2, 8), "found -6"),
    (lambda: slots_of(jnp.zeros((1, 2, 2), jnp.int32), 4, 0), "1 or more slots; found 0")])
def test_bad_input_is_refused_in_one_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()


