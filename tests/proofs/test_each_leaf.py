"""One leaf is wrong, each in turn: the proof of the same training refuses it and says which."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from properties import examples
from tiny_mlp import BATCHES, GRADIENTS, STEP, plain, put, weights

from meshbook import proofs
from meshbook.proofs import ProofFailed
from meshbook.proofs.verdicts import named_leaves, path_name

ROWS, STEPS = 8, 3
DRAW = np.random.default_rng(0)
NUMBERED = [(number, DRAW.uniform(0.5, 1, ROWS).astype(np.float32)) for number in range(STEPS)]
TREE = {"embed": {"table": DRAW.normal(size=(6, 4))}, "scale": DRAW.normal(size=()),
        "layers": [{"w": DRAW.normal(size=(4, 3)), "b": DRAW.normal(size=3)} for _ in range(2)]}
TREE = jax.tree.map(lambda w: jnp.asarray(w, jnp.float32), TREE)
NAMES = list(named_leaves(TREE))


def slope(w, x, halves=1):
    """The gradient of a mean of exp(x w), never 0: parts of the rows are rounded, then added."""
    wide = np.asarray(w, np.float32)[..., None]
    parts = [np.asarray((each * np.exp(each * wide)).sum(-1) / len(x), w.dtype)
             for each in np.split(x, halves)]
    return jnp.asarray(functools.reduce(np.add, parts), w.dtype)


def run_of(tree, spoil=lambda what, number, tree: tree, compared=("gradients", "params"),
           halves=1, start=lambda state: state):
    """SGD with momentum, whose loss knows nothing of any leaf; spoil(what, step, tree) -> tree."""
    def gradients(state, batch):
        number, x = batch
        return spoil("gradients", number,
                     jax.tree.map(lambda w: slope(w, x, halves), state["params"]))

    def step(state, batch):
        number, x = batch
        found = jax.tree.map(lambda m, g: 0.5 * m + g, state["momentum"], gradients(state, batch))
        momentum = spoil("momentum", number, found)
        params = jax.tree.map(lambda w, m: (w - 0.1 * m).astype(w.dtype), state["params"], momentum)
        metrics = {"loss": 1 / (1 + number), "norm": 2.0, "scores": {"accuracy": 0.5 + number}}
        return {"params": spoil("params", number, params), "momentum": momentum}, spoil(
            "metrics", number, metrics)

    state = {"params": tree, "momentum": jax.tree.map(jnp.zeros_like, tree)}
    offered = {"gradients": gradients, "params": lambda state: state}
    return proofs.Run(step, start(state), **{name: offered[name] for name in compared})


def changed(name, change):
    """A function of a tree that changes the leaf of this name."""
    def of_tree(tree):
        return jax.tree_util.tree_map_with_path(
            lambda path, x: change(x) if path_name(path) == name else x, tree)
    return of_tree


def spoiled(kind, name, change, steps=range(STEPS)):
    """What spoils this leaf of trees of this kind at these steps."""
    def spoil(what, number, tree):
        return changed(name, change)(tree) if what == kind and number in steps else tree
    return spoil


def one_element(value):
    def change(x):
        x = np.array(x)
        x.flat[x.size // 2] = value
        return jnp.asarray(x)
    return change


def refused(a, b, name, **how):
    """Assert that the proof refuses these runs, whichever is the reference, for this leaf."""
    for one, other in (a, b), (b, a):
        with pytest.raises(ProofFailed) as caught:
            proofs.assert_same_training(one, other, NUMBERED, **how)
        assert caught.value.leaf == name and name in str(caught.value), caught.value


def test_equal_runs_pass_and_nothing_is_left_out():
    verdict = proofs.assert_same_training(run_of(TREE), run_of(TREE), NUMBERED)
    assert verdict.zero == verdict.still == verdict.left_out == []
    assert verdict.gradient_difference == verdict.parameter_difference == 0


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("kind", ["gradients", "momentum", "params", "metrics"])
def test_one_number_that_is_not_finite_is_seen_in_each_leaf_at_the_first_and_at_a_later_step(
        kind, value):
    first, later = {"gradients": ("", "momentum/"), "metrics": ("", ""),
                    "momentum": ("momentum/",) * 2, "params": ("momentum/", "params/")}[kind]
    names = NAMES if kind != "metrics" else ["loss", "norm", "scores/accuracy"]
    for name in names:
        for number, seen_in in (0, first), (STEPS - 1, later):
            wrong = run_of(TREE, spoiled(kind, name, one_element(value), [number]))
            refused(wrong, run_of(TREE), seen_in + name)
        with pytest.raises(ProofFailed, match="finite"):  # no more so where both runs have it
            proofs.assert_same_training(wrong, wrong, NUMBERED)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e-3])
def test_one_number_that_is_another_is_seen_in_each_leaf_before_the_first_step(value):
    for name in (f"{kind}/{name}" for kind in ("momentum", "params") for name in NAMES):
        refused(run_of(TREE, start=changed(name, one_element(value))), run_of(TREE), name)


def rows_exchanged(x):
    return x if x.ndim == 0 else x.at[:2].set(x[1::-1])


SEEN_IN = {"gradients": "", "params": "momentum/"}  # where a wrong gradient is first seen
FAULTS = {"lost": jnp.zeros_like, "a hundredth more": lambda x: 1.01 * x,
          "two rows exchanged": rows_exchanged, "of the other sign": lambda x: -x}


@pytest.mark.parametrize("compared", ["gradients", "params"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_gradient_that_is_wrong_in_one_leaf_is_refused_for_that_leaf(fault, compared):
    right, seen_in = run_of(TREE, compared=[compared]), SEEN_IN[compared]
    for name, leaf in named_leaves(TREE).items():
        if fault == "two rows exchanged" and not leaf.ndim:
            continue
        for steps in (range(STEPS), *([[STEPS - 1]] if compared == "params" else [])):
            wrong = spoiled("gradients", name, FAULTS[fault], steps)
            refused(run_of(TREE, wrong, [compared]), right, seen_in + name)


KINDS = st.tuples(st.sampled_from([(), (1,), (3,), (0,), (2, 3), (3, 0), (2, 1, 4)]),
                  st.sampled_from([jnp.float32, jnp.bfloat16]), st.floats(-2, 1))
TREES = st.recursive(KINDS, lambda inner: st.dictionaries(
    st.sampled_from("abcde"), inner, min_size=1, max_size=3), max_leaves=5)
IS_KIND = dict(is_leaf=lambda x: isinstance(x, tuple))


def made(tree, seed):
    """Numbers for a tree of (shape, dtype, power of ten that they are as large as)."""
    draw = np.random.default_rng(seed)
    return jax.tree.map(lambda kind: jnp.asarray(
        10 ** kind[2] * draw.uniform(0.5, 1, kind[0]), kind[1]), {"tree": tree}, **IS_KIND)


@examples(6)
@given(TREES, st.integers(0, 9), st.sampled_from([["gradients", "params"], ["params"]]))
def test_any_tree_passes_with_another_rounding_and_with_no_leaf_that_is_wrong(
        drawn, seed, compared):
    tree = made(drawn, seed)
    leaves = {name: leaf for name, leaf in named_leaves(tree).items() if leaf.size}
    if not leaves:
        return
    is_wide = all(leaf.dtype == jnp.float32 for leaf in leaves.values())
    how = {} if is_wide else dict(rtol=1e-2, tolerance=1e-2)
    right, halves = run_of(tree, compared=compared), run_of(tree, compared=compared, halves=2)
    for other in right, halves:
        proofs.assert_same_training(other, right, NUMBERED, **how)
    gradients = named_leaves(jax.tree.map(lambda w: slope(w, NUMBERED[0][1]), tree))
    size = lambda x: np.linalg.norm(np.float64(x))
    norm = np.sqrt(sum(size(g) ** 2 for g in gradients.values()))
    for name, leaf in leaves.items():
        least = 1e-3 * size(gradients[name]) if is_wide else 0.1 * norm
        change = lambda x: (x + least / x.size ** 0.5).astype(x.dtype)
        refused(run_of(tree, spoiled("gradients", name, change), compared), right,
                SEEN_IN[compared[0]] + name, **how)


# Right programs that look otherwise --------------------------------------------------------------

def in_chunks(rows):
    """Gradients of so many rows at a time, added up in the other order."""
    def gradients(state, x):
        parts = [GRADIENTS(state, each) for each in reversed(np.split(x, len(x) // rows))]
        return jax.tree.map(lambda *each: sum(each) / len(parts), *parts)

    def step(state, x):
        _, metrics = STEP(jax.tree.map(jnp.copy, state), x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradients(state, x)), metrics

    return plain(step=step, gradients=gradients)


def turned(tree):
    return jax.tree.map(jnp.transpose, tree)


def stored_turned():
    return plain(
        state=turned(plain().state), params=turned,
        gradients=lambda state, x: GRADIENTS(turned(state), x),
        step=lambda state, x: (lambda new, found: (turned(new), found))(*STEP(turned(state), x)))


def on_axes_of_other_names():
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    specs = {"w_in": P(None, "tensor"), "w_out": P("tensor")}
    rows = lambda x: jax.device_put(x, NamedSharding(mesh, P("data")))
    return plain(state=put(weights(), mesh, specs), step=lambda state, x: STEP(state, rows(x)),
                 gradients=lambda state, x: GRADIENTS(state, rows(x)))


RIGHT = {"one row at a time": lambda: in_chunks(1), "eight rows at a time": lambda: in_chunks(8),
         "stored turned": stored_turned, "axes of other names": on_axes_of_other_names}


@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_that_look_otherwise_raise_no_alarm(name):
    verdict = proofs.assert_same_training(RIGHT[name](), plain(), BATCHES[:5])
    assert verdict.zero == [] and verdict.gradient_difference < 1e-6
