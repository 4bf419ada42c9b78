"""Experts over devices: equal to every expert for every token; bytes, work, causality."""
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_experts import layer, one_mlp
from expert_programs import (
    A, B, BLOCK, C, D, E, F, L, MESHES, PARAMS, RANDOM, S, T, WAYS, X, assert_close, hidden, loss,
    loss_of, placed, program, reference, rules_on
)
from flax.core import FrozenDict
from jax.sharding import PartitionSpec as P

from meshbook import proofs
from meshbook.parallel.experts import dropless, expert_parallel
from meshbook.parallel.routing import route, slots_of
from meshbook.sharding import Sharding, make_mesh


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MESHES)
def test_results_loads_and_every_gradient_are_those_of_all_experts_for_all_tokens(name, way):
    assert_close(program(name, way)[2], reference(way))


def test_a_capacity_drops_what_it_must_and_counts_it():
    *_, before, after = program("(4, 2)", "capacity")[2][0][1]
    assert (after <= before).all() and (after <= B * C).all() and (after < before).any()
    np.testing.assert_array_equal(before.sum(1), B * T * A)
    *_, before, after = program("(4, 2)", "dropless")[2][0][1]
    np.testing.assert_array_equal(before, after)


def moved(name, way):
    """{(kind, axes): (count, bytes)} of a program."""
    mesh, compiled, _ = program(name, way)
    return {key: (each.count, each.bytes) for key, each in
            proofs.collectives(compiled, mesh).items()}


@pytest.mark.parametrize("name, rows", [("(8)", 1), ("(4, 2)", 1), ("(2, 2, 2)", 2)])
def test_slots_travel_in_four_all_to_alls_of_a_layer(name, rows):
    found = moved(name, "capacity")
    assert found["all-to-all", ("expert",)] == (4 * L, 4 * L * 4 * E * rows * C * D)
    assert not {"all-gather", "reduce-scatter", "collective-permute"} & {kind for kind, _ in found}


def test_sums_over_hidden_units_are_of_tokens_and_weights_are_summed_over_batch_alone():
    found, rows = moved("(2, 2, 2)", "capacity"), 2
    tokens = 4 * rows * T * D
    shared = 2 * tokens
    gates = 4 * rows * T * A
    bias = 4 * E // 2 * D  # added by one device
    assert found["all-reduce", ("model",)][1] == L * (2 * tokens + gates + shared + bias)
    sizes = sum(PARAMS[name].size for name in ("EDSF", "ESF", "EFD")) // 2 // 2  # E and F split
    assert found["all-reduce", ("batch",)][1] == 4 * (sizes + PARAMS["ED"].size // 2)


@pytest.mark.parametrize("name, ways, rows", [("(8)", 8, 1), ("(4, 2)", 2, 1), ("(2, 2, 2)", 2, 2)])
def test_without_a_capacity_tokens_are_gathered_and_results_scattered(name, ways, rows):
    found, tokens = moved(name, "dropless"), rows * T
    gathers, scatters = found["all-gather", ("expert",)], found["reduce-scatter", ("expert",)]
    # forward: tokens, their choices and gates; backward: the gradient, choices and gates
    assert gathers[1] == L * 4 * ways * tokens * (2 * D + 4 * A)
    assert scatters == (3 * L, L * 4 * tokens * (2 * D + A))
    assert not {"all-to-all"} & {kind for kind, _ in found}


def useful(slots):
    """FLOPs of the products of so many slots, the router and the shared expert; and backward."""
    experts, router, shared = slots * 2 * D * F * (S + 1), B * T * 2 * D * E, B * T * 4 * D * F
    return 3 * L * experts, 3 * L * router, 3 * L * shared


@pytest.mark.parametrize("name, model", [("one", 1), ("(8)", 1), ("(4, 2)", 1), ("(2, 2, 2)", 2)])
def test_the_work_is_that_of_the_slots_and_each_device_has_its_share(name, model):
    mesh, compiled, _ = program(name, "capacity")
    experts, router, shared = useful(B * E * C)
    assert proofs.work(compiled) == (experts + model * router + shared) / mesh.size


def test_blocks_add_less_than_one_block_of_each_expert():
    _, compiled, _ = program("one", "dropless")
    blocks = (B * T * A + E * (BLOCK - 1)) // BLOCK
    assert blocks * BLOCK < B * T * A + E * BLOCK
    assert proofs.work(compiled) == sum(useful(blocks * BLOCK))


def test_blocks_that_nothing_fills_are_not_computed():
    mesh, compiled, _ = program("(8)", "dropless")
    most = (B * T * A + BLOCK - 1) // BLOCK  # all choices could be for one device's one expert
    _, router, shared = useful(0)
    assert proofs.work(compiled) == useful(most * BLOCK)[0] + (router + shared) / 8
    nothing = {"cond": (1, 0)}
    assert proofs.work(compiled, taken=nothing) == (router + shared) / 8


def outputs(name, x):
    """What the program with a capacity makes of other tokens."""
    mesh, compiled, _ = program(name, "capacity")
    with jax.set_mesh(mesh):
        params, old = placed(mesh, rules_on(mesh))
        return np.asarray(compiled(params, jax.device_put(x, old.sharding))[0][1][0])


@pytest.mark.parametrize("name", MESHES)
def test_no_later_token_and_no_other_row_changes_an_earlier_one(name):
    before = outputs(name, X)
    for t in 1, T // 2, T - 1:
        other = X.copy()
        other[:, t:] = RANDOM.normal(size=other[:, t:].shape)
        np.testing.assert_array_equal(outputs(name, other)[:, :t], before[:, :t])
        other[:, t:] = other[:1, :1]  # all later tokens crowd into the same experts
        np.testing.assert_array_equal(outputs(name, other)[:, :t], before[:, :t])
    other = X.copy()
    other[1:] = other[:1, :1]
    np.testing.assert_array_equal(outputs(name, other)[0], before[0])


def gradients_on(mesh, rules, way):
    """Loss and gradients under other rules, and what moves."""
    step = jax.value_and_grad(functools.partial(loss, rules, WAYS[way]), (0, 1), has_aux=True)
    with jax.set_mesh(mesh):
        arguments = placed(mesh, rules)
        compiled = jax.jit(step).lower(*arguments).compile()
        return jax.device_get(compiled(*arguments)), proofs.collectives(compiled, mesh)


@pytest.mark.parametrize("way", WAYS)
def test_tokens_may_be_split_between_products(way):
    mesh = make_mesh(*MESHES["(2, 2, 2)"])
    found, moves = gradients_on(mesh, rules_on(mesh).also(activations={"T": "model"}), way)
    assert_close(found, reference(way))
    assert ("reduce-scatter", ("model",)) in moves


def test_weights_may_be_stored_in_parts_and_gathered_and_their_gradients_scattered():
    mesh = make_mesh(*MESHES["(2, 2, 2)"])
    rules = rules_on(mesh).also(parameters={"D": "batch"})
    rules = dataclasses.replace(rules, gradients=FrozenDict(), regather=True)
    found, moves = gradients_on(mesh, rules, "capacity")
    assert_close(found, reference("capacity"))
    # of each layer: the slices of experts' weights (E and F split as well), router and shared MLP
    parts = sum(PARAMS[name].size * 4 // (2 * ways) for name, ways in (
        ("EDSF", 4), ("EFD", 4), ("ED", 2), ("DN", 1), ("DF", 2), ("FD", 2)))
    assert moves["reduce-scatter", ("batch",)].bytes == parts
    assert moves["all-to-all", ("expert",)].count == 4 * L


def two_stages(rules, params, x):
    """The layers as two stages of a pipeline: each is on its own devices."""
    def stage(own, x):
        def turn(x, _):
            y, (balance, *_) = hidden(rules, own, x, C)
            return jax.lax.ppermute(y, "stage", [(0, 1), (1, 0)]), balance

        me = jax.lax.axis_index("stage")
        x = jax.lax.pcast(x, "stage", to="varying")
        x, balance_2L = jax.lax.scan(turn, x, length=2)
        return jax.lax.psum((jnp.where(me == 0, x, 0), balance_2L[me]), "stage")

    return jax.shard_map(stage, in_specs=(P("stage"), P()), out_specs=P(), axis_names={"stage"})(
        params, x)


def test_experts_stand_inside_of_a_stage_of_a_pipeline():
    mesh = make_mesh((2, 2, 2), ("stage", "batch", "expert"))
    rules = rules_on(mesh)
    with jax.set_mesh(mesh):
        params, x = placed(mesh, rules.also(parameters={"L": "stage"}))
        step = jax.grad(lambda *arguments: loss_of(*two_stages(rules, *arguments)), (0, 1))
        found = jax.jit(step)(params, x)
    assert_close(jax.device_get(found), reference("capacity")[1])


def test_layers_may_be_computed_again_and_then_slots_travel_six_times():
    mesh = make_mesh(*MESHES["(4, 2)"])
    again = functools.partial(loss, rules_on(mesh), C, again=True)
    with jax.set_mesh(mesh):
        step = jax.jit(jax.grad(again, has_aux=True)).lower(*placed(mesh, rules_on(mesh)))
        found = proofs.collectives(step.compile(), mesh)
    assert found["all-to-all", ("expert",)].count == 6 * L


WEIGHTS = {name: PARAMS[name][0] for name in ("EDSF", "ESF", "EFD", "ED")}
CROWDS = {"all to one": np.full((B, T, A), 5), "the last has all": np.full((B, T, A), E - 1),
          "one has none": RANDOM.integers(1, E, (B, T, A)),
          "every expert": np.broadcast_to(np.arange(E), (B, T, E))}


@pytest.mark.parametrize("crowd", CROWDS)
@pytest.mark.parametrize("slots", [1, T, None])
def test_any_choices_are_served_or_dropped_as_the_sum_says(crowd, slots):
    mesh = make_mesh(*MESHES["(4, 2)"])
    rules, experts = rules_on(mesh), CROWDS[crowd].astype(np.int32)
    gates = RANDOM.random(experts.shape).astype(np.float32)
    y = np.stack([np.asarray(one_mlp(WEIGHTS, number, X)) for number in range(E)])
    expected, taken = np.zeros_like(X), np.zeros((B, E), int)
    for row, t, a in np.ndindex(experts.shape):
        expert = experts[row, t, a]
        taken[row, expert] += 1
        if slots is None or taken[row, expert] <= slots:
            expected[row, t] += gates[row, t, a] * y[expert, row, t]
    with jax.set_mesh(mesh):
        put = lambda x, letters: jax.device_put(x, rules.activation(letters))
        x, experts, gates = (put(each, "B") for each in (X, experts, gates))
        weights = {name: put(w, name) for name, w in WEIGHTS.items()}
        if slots is None:
            found = jax.jit(lambda *given: dropless(rules, *given, BLOCK))(
                x, experts, gates, weights)
        else:
            found = jax.jit(lambda x, experts, gates, weights: expert_parallel(
                rules, x, slots_of(experts, E, slots), gates, weights, slots))(
                x, experts, gates, weights)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("way", WAYS)
def test_one_matrix_in_front_is_gelu_and_biases_are_not_needed(way):
    weights = {"EDSF": jnp.asarray(WEIGHTS["EDSF"][:, :, :1]), "EFD": jnp.asarray(WEIGHTS["EFD"])}
    with jax.set_mesh(make_mesh((1, 1))):
        routing, rules = route(X @ PARAMS["DN"][0], A), Sharding.none().also(E=None)
        experts, given = routing.experts_BTA, (routing.gates_BTA, weights)
        if way == "capacity":
            found = expert_parallel(rules, jnp.asarray(X), slots_of(experts, E, C), *given, C)
        else:
            found = dropless(rules, jnp.asarray(X), experts, *given)
    expected = layer(weights, PARAMS["DN"][0], X, A, WAYS[way])[0]
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("rules, shape, message", [
    (dict(B="batch", E="expert"), (4, 2), r"E is split over \('expert',\), and B over \('batch'"),
    (dict(B=("batch", "expert"), E=("batch", "expert")), (2, 3), "E=8 does not divide over mesh"),
    (dict(B=("batch", "expert"), E="expert", T="batch"), (4, 2), r"T is split over \('batch',\)")])
def test_rules_that_cannot_be_are_refused_in_one_sentence(rules, shape, message):
    rules = Sharding.none().also(activations=rules)
    with jax.set_mesh(make_mesh(shape, ("batch", "expert"))):
        with pytest.raises(ValueError, match=message):
            dropless(rules, jnp.asarray(X), jnp.zeros((B, T, A), jnp.int32), jnp.ones((B, T, A)),
                     WEIGHTS)
