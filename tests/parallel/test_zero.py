"""ZeRO 1, 2 and 3: what each device holds, what it sends, and that training stays the same."""
import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict
from jax.sharding import PartitionSpec as P

from meshbook import proofs
from meshbook.models import MiniGPT, MiniGPTConfig
from meshbook.models.decoder import Decoder, DecoderConfig
from meshbook.models.losses import language_loss
from meshbook.parallel.accumulation import in_microbatches
from meshbook.parallel.zero import GATHERS, regathered
from meshbook.sharding import Sharding, beside, extra_axes, make_mesh
from meshbook.training import clipped, compile_step, create_state, evaluate, run
from meshbook.training.loop import value_and_gradients

SMALL = DecoderConfig(vocabulary=120, tokens=16, embed=32, hidden=64, heads=4, layers=2)
KEY = jax.random.key(0)
TOKENS = np.random.default_rng(0).integers(0, 120, (16, 17)).astype(np.int32)
BATCHES = [{"inputs": TOKENS[:, :-1], "labels": TOKENS[:, 1:]}]
PRESETS = {"once": dataclasses.replace(Sharding.tensor_parallel(), gradients=FrozenDict()),
           "zero1": Sharding.zero1(), "zero2": Sharding.zero2(),
           "kept": Sharding.fully_sharded(regather=False),
           "again": Sharding.fully_sharded(regather=True)}
THREE = Sharding({"B": ("data", "fsdp"), "H": "model", "F": "model", "V": "model"},
                 {"D": "fsdp", "H": "model", "F": "model", "V": "model"}, FrozenDict(),
                 regather=True)


def state_of(rules, shape, config=SMALL, parts=1, names=("batch", "model"), model=Decoder):
    loss = in_microbatches(language_loss, parts) if parts > 1 else language_loss
    rows = tuple(name for name in names if name != "model")
    optimizer = optax.chain(clipped(0.5), optax.adam(1e-3))
    return create_state(lambda: model(config, rules, rngs=nnx.Rngs(0)), optimizer,
                        make_mesh(shape, names), loss=loss, rows=rows)


@functools.cache
def compiled(preset, shape=(8, 1), parts=1, **changes):
    config = dataclasses.replace(SMALL, **changes)
    names = ("batch", "model") if len(shape) == 2 else ("data", "fsdp", "model")
    rules = PRESETS.get(preset, Sharding.none() if preset == "none" else THREE)
    state = state_of(rules, shape, config, parts, names)
    return state, compile_step(state, state.program.place(BATCHES[0]), KEY)


def held(tree):
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


def size_of(preset, shape=(8, 1), which=lambda name: True, **changes):
    """Bytes of the parameters on one device of those along "model", before "batch" divides them."""
    ways = shape[-1]
    params = jax.tree_util.tree_leaves_with_path(compiled("none", (1, 1), **changes)[0].params)
    split = ("VD", "DHK", "DSGK", "HKD", "DSF", "FD")
    return sum(4 * leaf.size // (ways if path[-1].key.endswith(split) else 1)
               for path, leaf in params if which(jax.tree_util.keystr(path)))


@pytest.mark.parametrize("preset, shape", [
    ("zero1", (8, 1)), ("zero2", (8, 1)), ("kept", (8, 1)), ("again", (8, 1)),
    ("zero1", (4, 2)), ("zero2", (4, 2)), ("again", (4, 2))])
def test_held_and_sent_bytes_are_those_of_the_formula_and_training_is_the_same(preset, shape):
    state, program = compiled(preset, shape)
    n, size = shape[0], size_of(preset, shape)
    whole = preset.startswith("zero")
    assert held(state.params) == (size if whole else size // n)
    assert held(state.opt_state) == 2 * size // n + 4 + 4  # a count, and the norm of the gradients
    layers = size_of(preset, shape, lambda name: "layers" in name)
    moved = proofs.collectives(program, state.program.mesh)
    of = lambda kind: moved.along("batch", kind=kind).bytes
    assert of("reduce-scatter") == size // n
    assert of("all-gather") == size + (layers if preset == "again" else 0)
    leaves = len(jax.tree.leaves(state.params))
    assert of("all-reduce") == 4 * (2 + leaves)  # loss, accuracy, norms of all leaves
    useful, one = proofs.work(program) * 8, compiled("none", (1, 1))
    assert useful == proofs.work(one[1])
    verdict = proofs.assert_same_training(run(state, KEY, program), run(one[0], KEY, one[1]),
                                          BATCHES * 2)
    assert verdict.gradient_difference < 1e-6


def test_a_gradient_that_is_used_twice_is_summed_once_where_gradients_have_a_rule():
    state, program = compiled("once")
    moved = proofs.collectives(program, state.program.mesh)
    assert moved.total.bytes == size_of("once") + 8  # the table's gradient once, loss, accuracy


def test_microbatches_scatter_once_in_stage_1_and_every_time_after_it():
    size = size_of("none")
    for preset, times in ("zero1", 1), ("zero2", 2):
        state, program = compiled(preset, parts=2)
        moved = proofs.collectives(program, state.program.mesh)
        assert moved.along("batch", kind="reduce-scatter").bytes == times * size // 8
        assert moved.along("batch", kind="all-gather").bytes == size
        one = compiled("none", (1, 1))
        proofs.assert_same_training(run(state, KEY, program), run(one[0], KEY, one[1]), BATCHES)


def test_three_axes_of_other_names():
    """Gradients are reduce-scattered along one and all-reduced, as shards, along the other."""
    state, program = compiled("three", (2, 2, 2))
    one = compiled("none", (1, 1))
    size, moved = size_of("three", (2, 2, 2)), proofs.collectives(program, state.program.mesh)
    assert held(state.params) == size // 2
    assert moved.along("fsdp", kind="reduce-scatter").bytes == size // 2
    assert moved.along("data", kind="all-reduce").bytes == size // 2
    proofs.assert_same_training(run(state, KEY, program), run(one[0], KEY, one[1]), BATCHES)


def test_regathering_frees_the_weights_of_the_layers():
    needed = {name: compiled(name)[1].memory_analysis().temp_size_in_bytes
              for name in ("kept", "again")}
    layers = size_of("again", which=lambda name: "layers" in name and "w_" in name)
    assert needed["again"] < needed["kept"] - 0.5 * layers


def test_kept_weights_stay_kept_beside_any_policy_and_nothing_else_does():
    plain, kept = (proofs.work(compiled(name, shape, remat="all")[1])
                   for name, shape in (("none", (1, 1)), ("kept", (8, 1))))
    assert 8 * kept == plain
    moved = proofs.collectives(compiled("kept", remat="all")[1], make_mesh((8, 1)))
    assert moved.along("batch", kind="all-gather").bytes == size_of("kept")


def asked(jaxpr, times=1):
    """Result bytes of all gathers of a program that is not yet compiled, loops multiplied."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in GATHERS:
            total += times * sum(x.aval.size * x.aval.dtype.itemsize for x in eqn.outvars)
        for inner in jax.tree.leaves(list(eqn.params.values()),
                                     is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                total += asked(inner, times * eqn.params.get("length", 1))
    return total


def test_in_bfloat16_gathers_of_weights_count_half():
    """In what the compiler is asked for: that of a CPU widens them to float32 again."""
    config = dataclasses.replace(SMALL, dtype=jnp.bfloat16)
    layers = size_of("kept", which=lambda name: "layers" in name and "scale" not in name)
    norms = size_of("kept", which=lambda name: "layers" in name and "scale" in name)
    for preset, times in ("kept", 1), ("again", 2):
        state = state_of(PRESETS[preset], (8, 1), config)
        with jax.set_mesh(state.program.mesh):
            batch = state.program.place(BATCHES[0])
            found = asked(jax.make_jaxpr(value_and_gradients)(state, batch, KEY).jaxpr)
        others = size_of("kept") - layers - norms  # as stored: they are cast where they are used
        assert found == times * (layers // 2 + norms) + others


def scattered_in(jaxpr):
    """The types in which gradients are reduce-scattered, and weights are gathered."""
    found = {"gathers": [], "sums": []}
    for eqn in jaxpr.eqns:
        kind = ("gathers" if eqn.primitive.name in GATHERS else
                "sums" if eqn.primitive.name == "unreduced_reduce_scatter" else None)
        if kind:
            found[kind].append(eqn.outvars[0].aval.dtype.name)
        inner = jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns"))
        for each in inner:
            each = getattr(each, "jaxpr", each)
            if hasattr(each, "eqns"):
                for kind, dtypes in scattered_in(each).items():
                    found[kind] += dtypes
    return found


@pytest.mark.parametrize("shape", [(8, 1), (4, 2)])
@pytest.mark.parametrize("rules, gathers", [
    (Sharding.zero2(), 0), (Sharding.fully_sharded(False), 5), (Sharding.fully_sharded(True), 10)])
def test_gradients_are_summed_in_the_type_of_products_or_in_float32(rules, gathers, shape):
    config = dataclasses.replace(SMALL, dtype=jnp.bfloat16)
    for wide in False, True:
        state = state_of(dataclasses.replace(rules, float32_sums=wide), shape, config)
        with jax.set_mesh(state.program.mesh):
            found = scattered_in(jax.make_jaxpr(value_and_gradients)(
                state, state.program.place(BATCHES[0]), KEY).jaxpr)
        assert found["sums"].count("bfloat16") == (0 if wide else 5) and len(found["sums"]) == 9
        assert found["gathers"].count("bfloat16") == gathers


@pytest.mark.parametrize("letters", ["DF", "F"])  # reduce-scattered and all-reduced
def test_a_sum_in_float32_is_not_rounded_to_the_type_of_the_products(letters):
    rules = dataclasses.replace(Sharding.fully_sharded(True), float32_sums=True)
    x_BD = np.ones((8, 8), np.float32) + np.arange(8, dtype=np.float32)[:, None] / 128

    def loss(w, x_BD):
        x_BD = x_BD.astype(jnp.bfloat16)
        if letters == "F":
            return (x_BD * beside(rules, "F", w, x_BD)).sum()
        return jnp.einsum("BD,DF->BF", x_BD, rules.used("DF", w, jnp.bfloat16)).sum()

    with jax.set_mesh(make_mesh((8, 1))):
        w = jax.device_put(np.ones((8,) * len(letters), np.float32), rules.parameter(letters))
        x_BD = jax.device_put(x_BD, P("batch"))
        found = jax.jit(jax.grad(loss)).lower(w, x_BD).compile()(w, x_BD)
    expected = np.float32(8 + 28 / 128)  # of eight numbers that bfloat16 has, and it has no such
    assert expected != jnp.bfloat16(expected)
    np.testing.assert_array_equal(found, np.full_like(found, expected))


def test_biases_and_latents_have_parameters_without_d_that_stay_whole():
    changes = dict(latent=8, rotary=8, bias=True)
    state, program = compiled("again", **changes)
    one = compiled("none", (1, 1), **changes)
    split = size_of("again", which=lambda name: "D" in name.rpartition("_")[2], **changes)
    assert held(state.params) == split // 8 + size_of("again", **changes) - split
    proofs.assert_same_training(run(state, KEY, program), run(one[0], KEY, one[1]), BATCHES)


def test_other_models_and_evaluation():
    config = MiniGPTConfig(vocabulary=120, tokens=16, embed=32, hidden=64, heads=4, layers=1,
                           dropout=0.0)
    losses = [evaluate(state_of(rules, shape, config, model=MiniGPT), BATCHES)["loss"]
              for rules, shape in ((Sharding.none(), (1, 1)), (Sharding.zero2(), (8, 1)),
                                   (Sharding.fully_sharded(regather=True), (4, 2)))]
    np.testing.assert_allclose(losses, losses[0], rtol=2e-6)
    state, one = (state_of(rules, shape, config, model=MiniGPT) for rules, shape in (
        (Sharding.zero2(), (4, 2)), (Sharding.none(), (1, 1))))
    proofs.assert_same_training(run(state, KEY), run(one, KEY), BATCHES)


def test_a_policy_goes_by_primitive_and_axis():
    named = lambda name: types.SimpleNamespace(name=name)
    never, gather = lambda *args, **params: False, named("all_gather")
    of = lambda again, axis, policy=never: regathered(policy, again, ("batch",))(
        gather, axis_name=axis)
    assert of(False, "batch") and not of(True, "batch")
    always = lambda *args, **params: True
    assert of(True, "model", always) and not of(False, "model")
    keep = regathered(always, True, ("batch",))
    assert keep(named("dot_general")) and not keep(named("transpose"))


def test_axes_that_storage_adds_stand_last():
    assert extra_axes(P(("model", "batch"), None), P("model")) == {0: ("batch",)}
    with pytest.raises(ValueError, match="dimension 0 .* expected the axes of its use first"):
        extra_axes(P(("batch", "model")), P("model"))
