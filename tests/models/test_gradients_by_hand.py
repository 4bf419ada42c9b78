"""Every gradient written by hand: linear in its cotangent, and that of plain code in float64.

A hand-written rule that appears in the package and has no row in `rules_by_hand` makes a test fail.
"""
import ast
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rules_by_hand import CASES, RANDOM, normal

import meshbook
from meshbook.models.balanced_loss import charged
from meshbook.models.fused_loss import one_pass_cross_entropy
from meshbook.models.losses import chunked_cross_entropy
from meshbook.parallel.routing import balance_loss, route
from meshbook.sharding import Sharding, make_mesh
from meshbook.training import weighted_mean

FACTORS = 3, -0.5, 0
CLOSE = 3e-6


@pytest.mark.parametrize("loss", [chunked_cross_entropy, one_pass_cross_entropy])
@pytest.mark.usefixtures("one_device")
def test_what_labels_count_has_no_gradient_rather_than_a_part_of_it(loss):
    """The sum of losses keeps none with respect to weights: nor must the number that divides it."""
    head = jax.device_put((normal(1, 2, 3), normal(3, 4), normal(4)))
    labels = jnp.array([[0, 3]])
    run = lambda weight: loss(
        *head, labels, weight, vocabulary=4, sharding=Sharding.none(), chunk=2)[0]
    np.testing.assert_array_equal(jax.jit(jax.grad(run))(jnp.array([[0.5, 2.0]])), 0)


def like(random, tree):
    return jax.tree.map(lambda x: random.normal(size=x.shape).astype(np.float32), tree)


@functools.cache
def results(name):
    """(cotangents, what the package makes of them, what plain code in float64 makes of the first).

    The first two cotangents are drawn, the third is their sum, and the others are the first one
    times FACTORS.
    """
    case = CASES[name]
    with jax.set_mesh(make_mesh(*case.mesh)), jax.default_matmul_precision("highest"):
        given = jax.device_put(case.given, case.specs)
        shapes = jax.eval_shape(case.function, *given)
        random = np.random.default_rng([*name.encode()])
        one, other = like(random, shapes), like(random, shapes)
        more = [jax.tree.map(lambda x, k=k: np.float32(k) * x, one) for k in FACTORS]
        dys = [one, other, jax.tree.map(np.add, one, other), *more]

        @jax.jit
        def both(given, dy):
            y, back = jax.vjp(case.function, *given)
            return y, back(dy)

        put = lambda dy: jax.device_put(dy, jax.tree.map(lambda x: x.sharding.spec, shapes))
        found = [jax.device_get(both(given, put(dy))) for dy in dys]
    with jax.enable_x64(True):
        wide = jax.tree.map(np.float64, (case.given, dys[0]))
        y, back = jax.vjp(case.plain, *wide[0])
        expected = jax.device_get((y, back(wide[1])))
    return dys, found, expected


def assert_close(found, expected, of=None):
    """Every leaf, apart by at most CLOSE of the norm of its own, or of the one in `of`."""
    for one, other, size in zip(*map(jax.tree.leaves, (found, expected, of or expected)),
                                strict=True):
        assert np.linalg.norm(np.float64(one) - other) <= CLOSE * np.linalg.norm(size)


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_those_of_plain_code_with_any_cotangent(name):
    _, found, expected = results(name)
    assert all(np.linalg.norm(x) > 0 for x in jax.tree.leaves(expected))
    assert_close(found[0], expected)


@pytest.mark.parametrize("name", CASES)
def test_a_loss_that_is_multiplied_has_its_gradient_multiplied(name):
    _, (one, *_, three, minus, nothing), _ = results(name)
    for k, (_, gradient) in zip(FACTORS, (three, minus, nothing), strict=True):
        assert_close(gradient, jax.tree.map(lambda x: k * x, one[1]))


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_two_cotangents_add_up(name):
    _, (one, other, both, *_), _ = results(name)
    sizes = jax.tree.map(lambda x, y: np.abs(x) + np.abs(y), one[1], other[1])
    assert_close(both[1], jax.tree.map(np.add, one[1], other[1]), of=sizes)


def test_what_is_charged_comes_once_with_any_gradient():
    """The one rule that is not linear: a share of costs, which the schedule scales afterwards."""
    x, costs, share = jax.device_put((normal(4), {"a": 2.0, "b": -1.0}, 0.3))
    y, back = jax.vjp(charged, x, costs, share)
    np.testing.assert_array_equal(y, x)
    dy = jnp.asarray(normal(4))
    for k in (1, *FACTORS):
        dx, dcosts, dshare = back(k * dy)
        np.testing.assert_allclose(dx, k * dy, rtol=1e-6)
        assert dcosts == {"a": share, "b": share} and dshare == 0


BY_HAND = {"custom_vjp", "custom_jvp", "custom_gradient"}


def rules_of(node, function="<module>"):
    """The innermost functions that have a rule by hand, or in which one is given a function."""
    function = node.name if isinstance(node, ast.FunctionDef) else function
    if getattr(node, "attr", getattr(node, "id", None)) in BY_HAND:
        yield function
    for child in ast.iter_child_nodes(node):
        yield from rules_of(child, function)


def test_every_rule_by_hand_has_a_row():
    package = Path(meshbook.__file__).parent
    named = lambda path: ".".join(path.relative_to(package).with_suffix("").parts)
    found = {f"{named(path)}.{function}" for path in package.rglob("*.py")
             for function in rules_of(ast.parse(path.read_text()))}
    assert found == {case.rule for case in CASES.values()} | {"models.balanced_loss.charged"}


def gates_and_shares(logits, kind, experts):
    """Gates and shares of chosen experts: scores over the sum of the chosen ones', and of all."""
    scores = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}[kind](logits)
    gates = jnp.take_along_axis(scores, experts, -1)
    if experts.shape[-1] > 1:
        gates = gates / gates.sum(-1, keepdims=True)
    return gates, scores / scores.sum(-1, keepdims=True)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
@pytest.mark.parametrize("active", [1, 2, 5])
@pytest.mark.usefixtures("one_device")
def test_gradients_go_through_the_sum_by_which_gates_are_divided(active, kind):
    logits, bias = normal(2, 4, 5), normal(5)

    def routed(logits):
        routing = route(logits, active, kind, bias)
        return routing.gates_BTA, routing.shares_BTE, balance_loss(routing)

    routing = route(jnp.asarray(logits), active, kind, bias)  # of which the choice alone is used
    experts = np.asarray(routing.experts_BTA)
    counts = np.bincount(experts.ravel(), minlength=5) / experts.size

    def plain(logits):
        gates, shares = gates_and_shares(logits, kind, experts)
        return gates, shares, 5 * (counts * shares.mean((0, 1))).sum()

    dys = normal(*experts.shape), normal(2, 4, 5), normal()
    y, back = jax.vjp(jax.jit(routed), logits)
    with jax.enable_x64(True):
        wide, way = np.float64(logits), np.float64(normal(2, 4, 5))
        expected, plain_back = jax.vjp(plain, wide)
        total = lambda logits: sum((each * dy).sum() for each, dy in zip(
            plain(logits), dys, strict=True))
        (gradient,) = plain_back(jax.tree.map(np.float64, dys))
        slope = (total(wide + 1e-5 * way) - total(wide - 1e-5 * way)) / 2e-5
        np.testing.assert_allclose((gradient * way).sum(), slope, rtol=1e-7)
        expected = jax.device_get((expected, (gradient,)))
    assert_close((y, back(jax.tree.map(jnp.float32, dys))), expected)


def test_gradients_go_through_the_sum_of_weights_of_a_mean():
    x, weight = RANDOM.normal(size=6), RANDOM.uniform(0.2, 3, 6)
    mean = (x * weight).sum() / weight.sum()
    with jax.enable_x64(True):
        dx, dweight = jax.grad(weighted_mean, (0, 1))(x, weight)
    np.testing.assert_allclose(dx, weight / weight.sum(), rtol=1e-12)
    np.testing.assert_allclose(dweight, (x - mean) / weight.sum(), rtol=1e-12)
