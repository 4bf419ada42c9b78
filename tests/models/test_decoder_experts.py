"""Experts in the decoder: equal on all meshes to plain experts, balanced, causal, as planned."""
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from expert_decoders import (
    A, AXES, BATCHES, CONFIGS, E, KEY, RANDOM, ROWS, RULES, SIZES, SMALL, TOKENS, logits, step)
from flax import nnx
from moved import moved

from meshbook import proofs
from meshbook.costs.plans import Plan
from meshbook.costs.step import describe
from meshbook.costs.traffic import step_traffic
from meshbook.costs.work import step_work
from meshbook.models.balanced_loss import BIAS, balanced, balanced_loss, loads_of
from meshbook.models.decoder import Decoder, DecoderConfig
from meshbook.models.expert_layers import JAXFORMER
from meshbook.models.reference_decoder import feed_forward, grouped, normalised
from meshbook.parallel.accumulation import in_microbatches
from meshbook.sharding import Sharding, make_mesh
from meshbook.training import clipped, compile_step, create_state, mean_metrics, run


@pytest.mark.parametrize("name, shape", [
    ("capacity", (1, 8, 1)), ("capacity", (2, 2, 2)), ("dropless", (4, 2, 1)),
    ("biased", (2, 2, 2))])
def test_it_trains_as_on_one_device(name, shape):
    state, program = step(name, shape)
    alone, single = step(name)
    found = proofs.assert_same_training(run(state, KEY, program), run(alone, KEY, single), BATCHES)
    assert found.gradient_difference < 1e-6
    zero = [f"layers/1/experts/{BIAS}"] if name == "biased" else []
    assert found.zero == zero and not found.still == (name != "dropless")


@pytest.mark.parametrize("rules", [
    Sharding.zero1(), Sharding.zero2(), Sharding.fully_sharded(regather=False),
    Sharding.fully_sharded(regather=True)], ids=["zero1", "zero2", "kept", "again"])
def test_loads_reach_the_optimizer_where_gradients_wait(rules):
    """Also of a batch in parts: the biases wait as parameters do, and their loads are sums."""
    loss = in_microbatches(balanced_loss, 2)
    runs = []
    for shape, own in ((2, 2, 2), rules.also(E="expert", B=ROWS)), ((1, 1, 1), Sharding.none()):
        make = lambda: Decoder(CONFIGS["biased"], own, rngs=nnx.Rngs(0))
        state = create_state(make, balanced(optax.sgd(0.1, momentum=0.0)), make_mesh(shape, AXES),
                             loss=loss, rows=ROWS)
        runs.append(run(state, KEY, compile_step(state, state.program.place(BATCHES[0]), KEY)))
    assert proofs.assert_same_training(*runs, BATCHES).gradient_difference < 1e-6


def plain(params, tokens_BT):
    """Hidden states and balances: every expert computes every token, weighted by its gate."""
    x_BTD, T = params["token_VD"][tokens_BT], tokens_BT.shape[1]
    at_BT, balances = jnp.broadcast_to(jnp.arange(T), tokens_BT.shape), []
    for number in range(2):
        p = jax.tree.map(lambda x: x[number], params["layers"]["0"])
        x_BTD = x_BTD + grouped(p["attention"], normalised(p["norm1"], x_BTD), at_BT,
                                jnp.tril(jnp.ones((T, T), bool)))
        y_BTD, experts = normalised(p["norm2"], x_BTD), p["experts"]
        scores_BTE = jax.nn.softmax(y_BTD @ experts["w_router_DC"])
        least = jnp.sort(scores_BTE, -1)[..., -A, None]
        gates_BTE = jnp.where(scores_BTE >= least, scores_BTE, 0)
        balances.append(E * ((gates_BTE > 0).mean((0, 1)) / A * scores_BTE.mean((0, 1))).sum())
        gates_BTE /= gates_BTE.sum(-1, keepdims=True)
        for e in range(E):
            one = {name: experts[f"w_{letters}"][e] for name, letters in (
                ("w_in_DSF", "in_EDSF"), ("w_out_FD", "out_EFD"))}
            x_BTD = x_BTD + gates_BTE[..., e, None] * feed_forward(one, y_BTD)
    return normalised(params["norm"], x_BTD), sum(balances)


def test_loss_and_every_gradient_are_those_of_experts_that_compute_all_tokens():
    state, _ = step("dropless", (4, 2, 1))
    params = moved(state.params, 0.1)

    def expected(params):
        hidden_BTD, balances = plain(params, BATCHES[0]["inputs"])
        scores = (hidden_BTD @ params["token_VD"].T)[..., :250]
        taken = jnp.take_along_axis(jax.nn.log_softmax(scores), BATCHES[0]["labels"][..., None], -1)
        return -taken.mean() + SIZES.auxiliary * balances

    batch = state.program.place(BATCHES[0])
    with jax.set_mesh(state.program.mesh):
        found = jax.jit(jax.value_and_grad(lambda params, batch: balanced_loss(
            params, state.program, batch)[0]))(params, batch)
    wanted = jax.jit(jax.value_and_grad(expected))(jax.device_get(params))
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-6)
    whole = optax.tree.norm(wanted[1])
    for path, apart in jax.tree_util.tree_leaves_with_path(jax.tree.map(
            lambda a, b: np.linalg.norm(a - b) / whole, jax.device_get(found[1]), wanted[1])):
        assert apart < 2e-6, (path, apart)


@pytest.mark.parametrize("name", CONFIGS)
def test_later_tokens_change_nothing_before_them(name):
    state, _ = step(name)
    params = moved(state.params, 0.3)
    state, tokens = dataclasses.replace(state, params=params), TOKENS[0][:, :-1]
    changed = tokens.copy()
    changed[:, 9:] = RANDOM.integers(0, 250, (16, 7))
    before, after = logits(state, tokens), logits(state, changed)
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any()


def test_a_row_is_the_same_among_other_rows_and_on_another_mesh():
    state, _ = step("capacity")
    alone = np.concatenate([logits(state, rows) for rows in np.split(TOKENS[0][:, :-1], 4)])
    split, _ = step("capacity", (1, 8, 1))
    np.testing.assert_allclose(logits(split, TOKENS[0][:, :-1]), alone, atol=1e-5)


def test_loads_are_those_of_all_devices_and_dropping_takes_from_them():
    found = {}
    for shape in (None, (2, 2, 2)):
        state, _ = step("capacity", shape)
        with jax.set_mesh(state.program.mesh):
            found[shape] = jax.device_get(loads_of(state, state.program.place(BATCHES[0])))
    one, split = found.values()
    np.testing.assert_array_equal(one.before_E, split.before_E)
    np.testing.assert_array_equal(one.after_E, split.after_E)
    assert (one.before_E.sum(-1) == 16 * 16 * A).all() and one.before_E.shape == (2, E)
    assert (one.after_E <= np.minimum(one.before_E, 16 * 5)).all()
    state, program = step("capacity")
    _, metrics = program(jax.tree.map(jnp.copy, state), state.program.place(BATCHES[0]), KEY)
    dropped = 1 - one.after_E.sum() / one.before_E.sum()
    assert 0 < dropped < 0.5
    np.testing.assert_allclose(metrics["dropped"], dropped, rtol=1e-6)
    np.testing.assert_allclose(metrics["balance"], one.balance.mean(), rtol=1e-6)


def test_a_bias_goes_up_for_idle_experts_and_down_for_busy_ones_by_the_same_rate():
    state, program = step("biased", (2, 2, 2))
    bias = lambda state: np.asarray(state.params["layers"]["1"]["experts"][BIAS])
    assert not bias(state).any()
    new, _ = program(jax.tree.map(jnp.copy, state), state.program.place(BATCHES[0]), KEY)
    with jax.set_mesh(state.program.mesh):
        before = np.asarray(loads_of(state, state.program.place(BATCHES[0])).before_E)
    np.testing.assert_allclose(bias(new), 0.01 * np.sign(before.mean() - before), rtol=1e-6)


def test_an_optimizer_sees_no_gradient_of_a_bias():
    params = {"experts": {BIAS: jnp.zeros((2, 4)), "w_in_EF": jnp.zeros((4, 3))}}
    loads = jnp.array([[4.0, 0, 2, 2], [1, 1, 1, 5]])
    loads = {"experts": {BIAS: loads, "w_in_EF": jnp.ones((4, 3))}}
    optimizer = balanced(optax.adam(1e-2), 0.5)
    updates, state = optimizer.update(loads, optimizer.init(params), params)
    moments = state[0].mu["experts"]
    assert not np.asarray(moments[BIAS]).any() and moments["w_in_EF"].all()
    np.testing.assert_array_equal(updates["experts"][BIAS],
                                  [[-0.5, 0.5, 0, 0], [0.5, 0.5, 0.5, -0.5]])
    np.testing.assert_allclose(updates["experts"]["w_in_EF"], -1e-2, rtol=1e-5)


@pytest.mark.parametrize("optimizer", [
    optax.adamw(1e-3), optax.chain(clipped(1.0), balanced(optax.adamw(1e-3)))], ids=["none", "in"])
def test_an_optimizer_that_would_take_loads_for_gradients_is_refused(optimizer):
    """Also where only a part of it is balanced: a norm is of all that it is given."""
    state = create_state(lambda: Decoder(CONFIGS["biased"], Sharding.none(), rngs=nnx.Rngs(0)),
                         optimizer, make_mesh((1, 1, 1), AXES), loss=balanced_loss, rows=ROWS)
    with pytest.raises(ValueError, match="around everything else; found another"):
        compile_step(state, state.program.place(BATCHES[0]), KEY)
    assert mean_metrics(state, BATCHES[:1])["balance"] > 0  # to be evaluated it needs none


def test_loads_are_in_no_norm():
    """The norm of the gradient is that of a model without biases, and clips as much."""
    found = {}
    for biased in True, False:
        sizes = dataclasses.replace(CONFIGS["biased"].experts, biased=biased)
        config = dataclasses.replace(CONFIGS["biased"], experts=sizes)
        state = create_state(lambda: Decoder(config, Sharding.none(), rngs=nnx.Rngs(0)),
                             balanced(optax.chain(clipped(0.1), optax.sgd(0.1))),
                             make_mesh((1, 1, 1), AXES), loss=balanced_loss, rows=ROWS)
        program = compile_step(state, state.program.place(BATCHES[0]), KEY)
        state, _ = program(state, state.program.place(BATCHES[0]), KEY)
        found[biased] = float(state.opt_state["0"]["gradient_norm"]), jax.device_get(state.params)
    (one, params), (other, without) = found.values()
    assert one == pytest.approx(other, rel=1e-6) and one > 0.1
    params["layers"]["1"]["experts"].pop(BIAS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), params, without)


def planned_on(mesh, config=SMALL):
    return describe(config, Plan(**mesh.shape, rules="tensor_parallel"), 16)


@pytest.mark.parametrize("shape", [(1, 8, 1), (4, 2, 1), (2, 2, 2)])
def test_parameters_work_and_all_to_alls_are_those_of_the_formulas(shape):
    name = "biased" if shape == (2, 2, 2) else "capacity"
    state, program = step(name, shape)
    held = sum(leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(state.params))
    planned = planned_on(state.program.mesh, CONFIGS[name])
    work = step_work(planned)
    assert held == planned.numbers["stored"]
    proofs.assert_divided(program, 8, 8 * work.useful, work.factor, rtol=1e-9)
    found, slots = proofs.collectives(program, state.program.mesh), ("all-to-all", ("expert",))
    assert found[slots] == step_traffic(planned)[slots]


@pytest.mark.parametrize("name, shape", [
    ("capacity", (1, 8, 1)), ("capacity", (4, 2, 1)), ("capacity", (2, 2, 2)),
    ("biased", (2, 2, 2))])
def test_all_that_travels_is_that_of_the_formula(name, shape):
    state, program = step(name, shape)
    proofs.assert_communicates(program, state.program.mesh,
                               step_traffic(planned_on(state.program.mesh, CONFIGS[name])))


def test_one_device_has_no_all_to_all():
    state, program = step("capacity")
    assert not step_traffic(planned_on(state.program.mesh))
    assert not proofs.collectives(program, state.program.mesh)


def test_jaxformer_has_as_many_parameters_as_it_says_and_counts_its_active_ones_so():
    config = DecoderConfig.jaxformer(experts=JAXFORMER)
    with jax.set_mesh(make_mesh((1, 1))):
        model = nnx.eval_shape(lambda: Decoder(config, Sharding.none(), rngs=nnx.Rngs(0)))
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    padding = (config.padded - config.vocabulary) * config.embed
    listed = describe(config, Plan(), 1)
    assert count == listed.numbers["stored"] == 949_248_384 + padding
    outside = config.vocabulary * config.embed + 2 * config.embed
    assert listed.active - padding - outside == 343_321_728


def test_in_microbatches_experts_stay_where_they_are():
    """Each part has its own all-to-alls; gradients of experts are summed once, along "batch"."""
    config, parts, shape = dataclasses.replace(
        SMALL, experts=dataclasses.replace(SIZES, auxiliary=0.0)), 2, (2, 2, 2)
    def mean_loss(*given):  # how even the loads are is another number in each part
        loss, metrics = balanced_loss(*given)
        return loss, {"loss": metrics["loss"]}

    found = []
    for rules, mesh, loss in ((Sharding.none(), (1, 1, 1), mean_loss),
                              (RULES, shape, in_microbatches(mean_loss, parts))):
        state = create_state(lambda: Decoder(config, rules, rngs=nnx.Rngs(0)),
                             optax.sgd(0.1, momentum=0.0), make_mesh(mesh, AXES), loss=loss,
                             rows=ROWS)
        program = compile_step(state, state.program.place(BATCHES[0]), KEY)
        found.append(run(state, KEY, program))
    assert proofs.assert_same_training(*found[::-1], BATCHES).gradient_difference < 1e-6
    moved = proofs.collectives(program, state.program.mesh)
    predicted = step_traffic(planned_on(state.program.mesh, config))
    slots = predicted["all-to-all", ("expert",)]
    assert moved["all-to-all", ("expert",)] == (parts * slots.count, slots.bytes)
    assert moved["all-reduce", ("batch",)].bytes == predicted["all-reduce", ("batch",)].bytes


def test_experts_multiply_all_slots_at_the_sizes_of_jaxformer():
    sizes = dataclasses.replace(JAXFORMER, active=1)  # slots are shared by 4 · 1024 tokens
    listed = describe(DecoderConfig.jaxformer(experts=sizes, tokens=4096), Plan(), 1)
    found = [each.flops / each.layers for each in listed.placed if each.row.tokens == "BZ"]
    assert sum(found) == 6144 * 4 * 768 * 3072


@pytest.mark.parametrize("changes, message", [
    ({"active": 9}, "a token goes to 1 to 8 of 8 experts; found active=9"),
    ({"active": 0}, "found active=0"), ({"capacity": -1.0}, "capacity is a number from 0"),
    ({"auxiliary": -0.1}, "auxiliary is a number from 0; found -0.1"),
    ({"router": "hash"}, "router is one of softmax, sigmoid; found 'hash'")])
def test_sizes_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SIZES, **changes)


def test_experts_that_the_mesh_cannot_divide_are_refused():
    config = dataclasses.replace(SMALL, experts=dataclasses.replace(SIZES, count=6))
    with pytest.raises(ValueError, match="E=6 does not divide over mesh axis 'expert' of size 8"):
        create_state(lambda: Decoder(config, RULES, rngs=nnx.Rngs(0)), optax.sgd(0.1),
                     make_mesh((1, 8, 1), AXES), loss=balanced_loss, rows=ROWS)


@pytest.mark.parametrize("shape", [None, (2, 2, 2)])
def test_what_products_keep_of_experts_in_blocks_is_not_made_twice(shape):
    done = []
    for remat in "none", "products":
        config = dataclasses.replace(CONFIGS["dropless"], remat=remat)
        rules = RULES if shape else Sharding.none()
        state = create_state(lambda: Decoder(config, rules, rngs=nnx.Rngs(0)),
                             balanced(optax.sgd(0.1), 0.01), make_mesh(shape or (1, 1, 1), AXES),
                             loss=balanced_loss, rows=ROWS)
        done.append(proofs.work(compile_step(state, state.program.place(BATCHES[0]), KEY)))
    scores = 2 * config.layers * 2 * 16 * config.tokens ** 2 * config.embed  # and their values
    assert done[1] - done[0] == scores / math.prod(shape or (1,))


def test_the_work_of_a_dropless_decoder_is_not_a_formula():
    with pytest.raises(ValueError, match="what dropless experts do depends on the tokens"):
        step_work(describe(CONFIGS["dropless"], Plan(), 16))
