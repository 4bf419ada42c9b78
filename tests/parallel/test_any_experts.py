"""Experts on any mesh, of any number and capacity: every expert for every token, dropped by a loop.

Gates, choices and the gradient of the result are drawn: choices may be crowded, or none at all.
"""
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from dense_experts import one_mlp
from expert_programs import rules_on
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from properties import examples, shapes

from meshbook.parallel.experts import dropless, expert_parallel
from meshbook.parallel.routing import slots_of
from meshbook.sharding import make_mesh

AXES = "batch", "expert", "model"
ROUNDING = {"float32": 1e-5, "bfloat16": 6e-2}


@st.composite
def layers(draw):
    """(mesh's sizes by name, changes of rules, sizes, capacity or None, block, type, biases)."""
    shape = draw(shapes())
    mesh = dict(zip(draw(st.permutations(AXES)), shape, strict=False))
    batch, expert, model = (mesh.get(axis, 1) for axis in AXES)
    few, yes = st.sampled_from([2, 3, 1]), st.booleans()
    split_tokens, stored_in_parts = "model" in mesh and draw(yes), "batch" in mesh and draw(yes)
    changes = {"activations": {"T": "model"} if split_tokens else {},
               "parameters": {"D": "batch"} if stored_in_parts else {}}
    E = expert * draw(few)
    s = {"B": batch * expert * draw(few), "T": draw(few) * (model if split_tokens else 2), "E": E,
         "A": draw(st.integers(1, min(E, 3))), "D": draw(few) * (batch if stored_in_parts else 1),
         "F": model * draw(few), "S": draw(st.integers(1, 2))}
    capacity = draw(st.none() | st.integers(1, s["T"]))
    return (mesh, changes, s, capacity, draw(st.integers(1, 5)),
            draw(st.sampled_from(["float32", "float32", "bfloat16"])), draw(yes))


def kept(choices_BTA, experts, capacity):
    """Whether each choice is of an expert, and has one of the places of its row."""
    found = np.zeros(choices_BTA.shape, bool)
    for row, choices_TA in enumerate(choices_BTA):
        taken = [0] * (experts + 1)
        for t, a in np.ndindex(choices_TA.shape):
            expert = choices_TA[t, a]
            found[row, t, a] = expert < experts and (capacity is None or taken[expert] < capacity)
            taken[expert] += 1
    return found


def densely(choices_BTA, counts_BTA, x_BTD, gates_BTA, weights):
    """Every expert for every token."""
    y_BTD = 0 * x_BTD
    for number in range(len(weights["EFD"])):
        gate_BT = jnp.where((choices_BTA == number) & counts_BTA, gates_BTA, 0).sum(-1)
        y_BTD = y_BTD + gate_BT[..., None] * one_mlp(weights, number, x_BTD)
    return y_BTD


WITHOUT_SLOTS = ({"expert": 2, "model": 2}, {"activations": {"T": "model"}},
                 dict(B=2, T=4, E=4, A=2, D=3, F=4, S=2), None, 3, "float32", True)
WITH_SLOTS = ({"model": 2, "batch": 2, "expert": 2}, {"parameters": {"D": "batch"}},
              dict(B=4, T=5, E=6, A=3, D=4, F=4, S=1), 1, 1, "float32", True)


@examples(4)
@example(WITHOUT_SLOTS, False, 1)
@example(WITH_SLOTS, True, 2)
@given(layers(), st.booleans(), st.integers(0, 2 ** 32 - 1))
def test_the_result_and_every_gradient_are_those_of_all_experts_for_all_tokens(drawn, wide, seed):
    axes, changes, s, capacity, block, dtype, biased = drawn
    mesh = make_mesh([*axes.values()], [*axes])
    rules = dataclasses.replace(rules_on(mesh).also(**changes), float32_sums=wide)
    random = np.random.default_rng(seed)
    as_type = lambda x, dtype: np.asarray(jnp.asarray(x, dtype))
    normal = lambda letters, dtype=dtype: as_type(
        random.normal(size=[s[letter] for letter in letters]), dtype)
    crowd = random.integers(1, s["E"] + 2)  # up to E, which is no expert
    choices = random.integers(0, crowd, (s["B"], s["T"], s["A"])).astype(np.int32)
    x, gates, dy = normal("BTD"), normal("BTA", "float32"), normal("BTD")
    weights = {name: normal(name) for name in ("EDSF", "EFD", *(["ESF", "ED"] if biased else []))}

    def layer(x, gates, weights):
        if capacity is None:
            return dropless(rules, x, jnp.asarray(choices), gates, weights, block)
        slots = slots_of(jnp.asarray(choices), s["E"], capacity)
        return expert_parallel(rules, x, slots, gates, weights, capacity)

    @jax.jit
    def both(x, gates, weights, dy):
        y, back = jax.vjp(layer, x, gates, weights)
        return y, back(jax.reshard(dy, jax.typeof(y).sharding.spec))

    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        stored = {name: rules.parameter(name) for name in weights}
        rows = P(rules.activations["B"])
        found = jax.device_get(both(*jax.device_put(
            (x, gates, weights, dy), (rows, rows, stored, rows))))
    with jax.enable_x64(True):
        counts = kept(choices, s["E"], capacity)
        y, back = jax.vjp(lambda *given: densely(choices, counts, *given),
                          *jax.tree.map(np.float64, (x, gates, weights)))
        right = jax.device_get((y, back(np.float64(dy))))
    for one, other in zip(*map(jax.tree.leaves, (found, right)), strict=True):
        allowed = ROUNDING[dtype] * (np.linalg.norm(other) + 0.1 * math.sqrt(other.size))
        assert np.linalg.norm(np.float64(one) - other) <= allowed
