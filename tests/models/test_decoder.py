"""The decoder: it equals its plain reference on every mesh, positions, caches, sizes, bad input."""
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from meshes import on_one_device
from moved import moved

from meshbook.models.decoder import Decoder, DecoderConfig
from meshbook.models.losses import language_loss
from meshbook.models.reference_decoder import decoder
from meshbook.models.text_models import MASKED
from meshbook.proofs import work
from meshbook.sharding import Sharding, make_mesh
from meshbook.training import create_state

SMALL = DecoderConfig(vocabulary=250, tokens=16, embed=32, hidden=64, heads=4, layers=2)
CONFIGS = {
    "plain": SMALL,
    "groups": dataclasses.replace(SMALL, groups=2, bias=True),
    "gelu": dataclasses.replace(SMALL, gated=False, bias=True),
    "latent": dataclasses.replace(SMALL, latent=8, rotary=8, layers=4, period=2, bias=True),
    "latent, no biases": dataclasses.replace(SMALL, latent=8, rotary=16),
}
RANDOM = np.random.default_rng(0)
TOKENS = RANDOM.integers(0, 250, (8, 16)).astype(np.int32)
DOCUMENTS = {"segments": (np.arange(16) > 5).astype(np.int32) + np.zeros((8, 1), np.int32),
             "positions": np.where(np.arange(16) > 5, np.arange(16) - 6, np.arange(16))
             + np.zeros((8, 1), np.int64)}
BATCH = {"inputs": TOKENS, "labels": RANDOM.integers(0, 250, (8, 16)).astype(np.int32)}


@functools.cache
def state(name, preset="none", shape=(1, 1), **changes):
    """A state whose biases and norms are not zeros and ones, so that each of them counts."""
    config = dataclasses.replace(CONFIGS[name], **changes)
    rules = getattr(Sharding, preset)()
    made = create_state(lambda: Decoder(config, rules, rngs=nnx.Rngs(0)), optax.sgd(0.1),
                        make_mesh(shape))
    return dataclasses.replace(made, params=moved(made.params, 0.1))


@functools.partial(jax.jit, static_argnums=0)
def forward(program, params, batch):
    return program.model(params)(**batch)


def padded_logits(state, **batch):
    placed = state.program.place(batch)
    with jax.set_mesh(state.program.mesh):
        return np.asarray(forward(state.program, state.params, placed))


def logits(state, **batch):
    return padded_logits(state, **batch)[..., :250]


def loss_and_gradients(state, key=None):
    batch = state.program.place(BATCH)
    run = jax.jit(jax.value_and_grad(lambda params, batch: language_loss(
        params, state.program, batch, key)[0]))
    with jax.set_mesh(state.program.mesh):
        return jax.device_get(run(state.params, batch))


@functools.partial(jax.jit, static_argnums=1)
def plain_loss(params, config, key=None):
    scores = decoder(params, TOKENS, config.dropout, key)[..., :250]
    taken = jnp.take_along_axis(jax.nn.log_softmax(scores), BATCH["labels"][..., None], -1)
    return -taken.mean()


@functools.cache
def of_the_reference(name):
    """Parameters on one device, and the reference's loss and gradients of them."""
    params = jax.device_get(state(name).params)
    return params, jax.value_and_grad(plain_loss)(params, CONFIGS[name])


def assert_close(found, expected, rtol=1e-6):
    whole = np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(expected)))
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(found),
                                  jax.tree.leaves(expected), strict=True):
        apart = np.linalg.norm(np.asarray(one) - np.asarray(other))
        assert apart <= rtol * whole, (jax.tree_util.keystr(path), apart / whole)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_the_reference(name):
    made = state(name)
    params = jax.device_get(made.params)
    np.testing.assert_allclose(logits(made, tokens_BT=TOKENS),
                               decoder(params, TOKENS)[..., :250], atol=2e-5)
    np.testing.assert_allclose(
        logits(made, tokens_BT=TOKENS, **DOCUMENTS),
        decoder(params, TOKENS, **DOCUMENTS)[..., :250], atol=2e-5)


MESHES = [("none", (1, 1)), ("data_parallel", (8, 1)), ("tensor_parallel", (4, 2)),
          ("fully_sharded", (4, 2)), ("fully_sharded", (8, 1))]


@pytest.mark.parametrize("name, preset, shape", [
    *((name, *mesh) for name in ("plain", "latent") for mesh in MESHES),
    *((name, *mesh) for name in ("groups", "gelu", "latent, no biases") for mesh in MESHES[2:4])])
def test_loss_and_every_gradient_are_those_of_the_reference(name, preset, shape):
    made, (params, expected) = state(name, preset, shape), of_the_reference(name)
    jax.tree.map(np.testing.assert_array_equal, made.params, params)
    found = loss_and_gradients(made)
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-6)
    assert_close(found[1], expected[1], 2e-6)


@pytest.mark.parametrize("name", ["groups", "latent"])
def test_dropout_is_that_of_the_reference_on_every_mesh(name):
    key = jax.random.key(3)
    model_key = jax.random.split(key)[1]
    for preset, shape in ("none", (1, 1)), ("tensor_parallel", (4, 2)):
        made = state(name, preset, shape, dropout=0.25)
        config = dataclasses.replace(CONFIGS[name], dropout=0.25)
        expected = plain_loss(jax.device_get(made.params), config, model_key)
        np.testing.assert_allclose(loss_and_gradients(made, key)[0], expected, rtol=2e-6)
        assert abs(expected - plain_loss(jax.device_get(made.params), config)) > 1e-3


def products_of_a_layer(config):
    """FLOPs of the matmuls of a layer in the forward pass, for one token."""
    D, F, T, H, K = config.embed, config.hidden, config.tokens, config.heads, config.head_size
    G, R, P = config.groups or H, config.latent, config.rotary
    made = {"in": 2 * D * F * (1 + config.gated), "last": 2 * F * D, "out": 2 * D * D,
            "scores": 2 * T * D, "values": 2 * T * D}
    if not R:
        return made | {"query": 2 * D * D, "kept": 2 * D * 2 * G * K}
    return made | {"latents": 2 * D * 2 * R, "query": 2 * R * D, "kept": 2 * R * 2 * D,
                   "turned": 2 * 2 * R * P * (1 + H), "turned scores": 2 * T * H * P}


@pytest.mark.parametrize("name", ["plain", "groups", "latent, no biases"])
def test_what_is_computed_again_is_what_its_policy_does_not_keep(name):
    again = {"none": (), "products": ("scores", "values", "turned scores"),
             "attention": ("all", "last", "values"), "all": ("all", "last")}
    one = products_of_a_layer(CONFIGS[name])
    total, held, expected = sum(one.values()), {}, None
    for policy, names in again.items():
        made = state(name, remat=policy)
        if names[:1] == ("all",):
            more = total - sum(one[each] for each in names[1:])
        else:
            more = sum(one.get(each, 0) for each in names)
        batch = made.program.place({"tokens_BT": TOKENS})

        def loss(params):
            return jnp.square(made.program.model(params).hidden(**batch)).sum()

        with jax.set_mesh(made.program.mesh):
            program = jax.jit(jax.grad(loss)).lower(made.params).compile()
            found = jax.device_get(program(made.params))
        expected = found if expected is None else expected
        assert_close(found, expected)
        assert work(program) == (3 * total + more) * TOKENS.size * 2  # layers
        held[policy] = program.memory_analysis().temp_size_in_bytes
    assert held["none"] > held["products"] > held["all"]


@pytest.mark.parametrize("name", CONFIGS)
def test_no_position_sees_what_follows(name):
    changed = TOKENS.copy()
    changed[:, 9:] = (changed[:, 9:] + 1) % 250
    before, after = (logits(state(name), tokens_BT=x) for x in (TOKENS, changed))
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert np.abs(before[:, 9:] - after[:, 9:]).max(-1).min() > 1e-3


@pytest.mark.parametrize("name, preset, shape", [
    *((name, "none", (1, 1)) for name in ("groups", "latent")),
    *((name, "tensor_parallel", (4, 2)) for name in ("plain", "groups", "latent, no biases"))])
def test_reading_token_by_token_gives_the_same(name, preset, shape):
    """And what is absorbed into the queries gives the same as keys and values that are made."""
    made = state(name, preset, shape)
    program, first = made.program, np.array([0, 3] * 4, np.int32)
    tokens = TOKENS.copy()
    for row, start in zip(tokens, first):
        row[:start] = 0  # these rows begin later
    placed = program.place({"tokens": tokens, "first": first})

    @functools.partial(jax.jit, static_argnums=(3, 4))
    def read(params, placed, cache, start, stop):
        model = program.model(params)
        part = placed["tokens"][:, start:stop]
        x_BTD, cache = model.extend(part, cache, start, placed["first"])
        return jax.reshard(model.head(x_BTD), model.sharding.activation("B")), cache

    with jax.set_mesh(program.mesh):
        cache, found = jax.jit(lambda params: program.model(params).empty_cache(8))(made.params), []
        for start, stop in ((0, 10), *((at, at + 1) for at in range(10, 16))):
            scores, cache = read(made.params, placed, cache, start, stop)
            found.append(np.asarray(scores))
    found = np.concatenate(found, 1)[..., :250]
    for row, start in enumerate(first):
        alone = np.zeros((8, 16 - start), np.int32)
        alone[0] = TOKENS[row, start:]
        expected = logits(made, tokens_BT=alone)[0]
        np.testing.assert_allclose(found[row, start:], expected, atol=3e-5)


@pytest.mark.parametrize("name, numbers", [("plain", 2 * 32), ("groups", 2 * 16),
                                           ("latent, no biases", 8 + 16)])
def test_numbers_that_a_cache_keeps_of_a_token_and_layer(name, numbers):
    made = state(name)
    with jax.set_mesh(made.program.mesh):
        cache = jax.eval_shape(lambda: made.program.model(made.params).empty_cache(4))
    kept = sum(leaf.size for leaf in jax.tree.leaves(cache))
    assert kept == numbers * 4 * 16 * 2  # rows, tokens, layers


@on_one_device
def test_jaxformer_has_as_many_parameters_as_it_says():
    config = DecoderConfig.jaxformer()
    with jax.set_mesh(make_mesh((1, 1))):
        model = nnx.eval_shape(lambda: Decoder(config, Sharding.none(), rngs=nnx.Rngs(0)))
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    D, F, E = config.embed, config.hidden, 16
    padding = (config.padded - config.vocabulary) * D
    one = 2 * D * F + F + D
    experts = 8 * (E * one + D * E + E + D * 2 * D + 2 * D)  # router, and two shared experts
    assert count - padding - 8 * one + experts == 949_248_384


def test_tokens_that_do_not_exist_are_masked():
    found = padded_logits(state("plain", "tensor_parallel", (4, 2)), tokens_BT=TOKENS)
    assert found.shape == (8, 16, 256) and (found[..., 250:] == MASKED).all()


def dtypes(jaxpr):
    """(primitive, type of its first result) of all equations, those inside others too."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name, eqn.outvars[0].aval.dtype
        for inner in jax.tree.leaves(list(eqn.params.values()),
                                     is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from dtypes(inner)


@pytest.mark.parametrize("name", ["groups", "latent"])
def test_in_bfloat16_the_residual_stream_stays_so_and_softmax_and_norms_are_float32(name):
    made = state(name, dtype=jnp.bfloat16)
    with jax.set_mesh(made.program.mesh):
        model = made.program.model(made.params)
        hidden = jax.eval_shape(model.hidden, TOKENS)
        found = list(dtypes(jax.make_jaxpr(model.hidden)(TOKENS).jaxpr))
    assert hidden.dtype == jnp.bfloat16
    of = lambda *names: {dtype.name for name, dtype in found if name in names}
    assert of("exp", "rsqrt", "cos", "sin") == {"float32"}
    products = [dtype.name for name, dtype in found if name == "dot_general"]
    assert products.count("float32") < products.count("bfloat16")  # scores alone are float32
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(made.params))


@pytest.mark.parametrize("changes, message", [
    ({"groups": 3}, "4 heads do not divide into 3 groups"),
    ({"groups": 2, "latent": 8}, "groups=2 and latent=8"),
    ({"rotary": 8}, "rotary=8 is for latent attention; found latent=0"),
    ({"latent": 8, "rotary": 7}, "turn pairs of numbers; found 7"),
    ({"layers": 4, "period": 3}, "4 layers do not divide into periods of 3"),
    ({"remat": "some"}, "remat is one of all, attention, products, none; found 'some'"),
    ({"period": 0}, "period is a number from 1; found 0"),
    ({"latent": -1}, "latent is a number from 0; found -1")])
def test_sizes_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)


def test_a_row_longer_than_the_window_is_refused():
    with pytest.raises(ValueError, match="a row has 17 tokens; the window has room for 16"):
        logits(state("plain"), tokens_BT=np.zeros((8, 17), np.int32))


def test_groups_that_the_mesh_cannot_divide_are_refused():
    with pytest.raises(ValueError, match="G=2 does not divide over mesh axis 'model' of size 4"):
        state("groups", "tensor_parallel", (2, 4))
