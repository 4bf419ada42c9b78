"""Dropout of the decoder: the same bits on every mesh, and no device draws bits of another's."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshbook.hlo.random_words import random_words
from meshbook.models.decoder import Decoder, DecoderConfig
from meshbook.models.decoder_dropout import dropped, kept, threefry, token_numbers
from meshbook.models.losses import language_loss
from meshbook.models.pipelined import pipelined
from meshbook.parallel import schedules
from meshbook.parallel.accumulation import in_microbatches
from meshbook.parallel.context import Context, zigzag, zigzag_order
from meshbook.parallel.pipeline import gpipe, one_f_one_b
from meshbook.parallel.slots import in_slots
from meshbook.sharding import Sharding, make_mesh
from meshbook.training import compile_step, create_state

B, T, D, L = 8, 16, 22, 4
KEY, LEAST = jax.random.key(3), 64
CONTEXT, STAGES = ("batch", "context"), ("batch", "stage", "model")
TENSOR = Sharding.tensor_parallel()
MESHES = {
    "(8, 1)": ((8, 1), Sharding.data_parallel(), ("batch", "model")),
    "(4, 2)": ((4, 2), TENSOR, ("batch", "model")),
    "fully sharded": ((4, 2), Sharding.fully_sharded(), ("batch", "model")),
    "rows over two axes": ((2, 2, 2), TENSOR.also(B=("batch", "expert")),
                           ("batch", "expert", "model")),
    "sequence": ((2, 4), Sharding.sequence_parallel(), ("batch", "model")),
    "rings": ((2, 4), Sharding.sequence_parallel(overlapped=True), ("batch", "model")),
    "gather": ((2, 4), Sharding.context_parallel(Context("gather")), CONTEXT),
    "ulysses": ((4, 2), Sharding.context_parallel(Context("ulysses")), CONTEXT),
    "zigzag": ((2, 4), Sharding.context_parallel(Context(zigzagged=True)), CONTEXT),
}


@functools.cache
def of_one_device():
    with jax.set_mesh(make_mesh((1, 1))):
        return np.asarray(jax.jit(lambda x: kept(KEY, x, LEAST, Sharding.none()))(
            jnp.ones((B, T, D))))


def of_a_mesh(name, key=KEY):
    """The compiled mask of a mesh, and the mask."""
    shape, rules, axes = MESHES[name]
    mesh = make_mesh(shape, axes)
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((B, T, D)), NamedSharding(mesh, rules.activation("BTD")))
        program = jax.jit(lambda x: kept(key, x, LEAST, rules)).lower(x).compile()
        return program, program(x)


@pytest.mark.parametrize("name", MESHES)
def test_a_mask_is_that_of_one_device_bit_by_bit_and_each_device_draws_its_own_words(name):
    program, mask = of_a_mesh(name)
    order = zigzag_order(T, 4) if name == "zigzag" else slice(None)
    np.testing.assert_array_equal(mask, of_one_device()[:, order])
    own = mask.addressable_shards[0].data.shape
    assert mask.sharding.is_equivalent_to(
        NamedSharding(mask.sharding.mesh, MESHES[name][1].activation("BTD")), 3)
    assert random_words(program) == own[0] * own[1] * 6  # 22 elements are six words
    assert "all-gather" not in program.as_text() and "permute" not in program.as_text()


@pytest.mark.parametrize("axes", [("batch",), ("batch", "expert")])
def test_a_device_that_knows_its_own_rows_alone_draws_the_same(axes):
    rules = TENSOR.also(B=axes)
    mesh = make_mesh((4, 2), ("batch", "expert"))
    mask = jax.jit(jax.shard_map(lambda x: kept(KEY, x, LEAST, rules), mesh=mesh, in_specs=P(axes),
                                 out_specs=P(axes)))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((B, T, D)), NamedSharding(mesh, P(axes)))
        program = mask.lower(x).compile()
        np.testing.assert_array_equal(program(x), of_one_device())
    assert random_words(program) == B // (4 if len(axes) == 1 else 8) * T * 6


def test_words_are_those_of_jax_and_of_a_slice_of_counters_the_slice():
    first, second = jnp.meshgrid(jnp.arange(3, dtype=jnp.uint32), jnp.arange(70, dtype=jnp.uint32),
                                 indexing="ij")
    words = threefry(KEY, first, second)
    np.testing.assert_array_equal(words[0], jax.random.bits(KEY, (70,)))
    np.testing.assert_array_equal(words[1:, 5:9], threefry(KEY, first[1:, 5:9], second[1:, 5:9]))


def test_every_token_has_a_number_of_its_own():
    with jax.set_mesh(make_mesh((1, 1))):
        found = token_numbers(jnp.ones((B, T, D)), Sharding.none())
    np.testing.assert_array_equal(found, np.arange(B * T).reshape(B, T))


def test_every_byte_has_its_share_and_elements_are_independent():
    with jax.set_mesh(make_mesh((1, 1))):
        mask = np.asarray(jax.jit(lambda x: kept(KEY, x, LEAST, Sharding.none()))(
            jnp.ones((16, 32, 256))))
    for quarter in range(4):
        assert abs(mask[..., 64 * quarter:64 * (quarter + 1)].mean() - 0.75) < 0.005
    for one, other in ((mask[1:], mask[:-1]), (mask[:, 1:], mask[:, :-1]),
                       (mask[..., 1:], mask[..., :-1]), (mask[..., 64:], mask[..., :-64])):
        assert abs((one & other).mean() - 0.75 ** 2) < 0.005


@pytest.mark.parametrize("rate, share", [(0.1, 26 / 256), (0.25, 0.25), (0.9, 230 / 256)])
def test_dropout_keeps_the_mean_and_drops_its_share(rate, share):
    x = jnp.ones((16, 32, 256))
    with jax.set_mesh(make_mesh((1, 1))):
        y = dropped(x, rate, KEY, Sharding.none())
    assert abs((y == 0).mean() - share) < 0.005 and abs(y.mean() - 1) < 0.02
    assert dropped(x, rate, None, Sharding.none()) is x
    assert dropped(x, 0, KEY, Sharding.none()) is x


ROWS = 16
WORDS = ROWS * T * 4 * 2 * L  # of a pass through the layers: four words a token, in two places


def in_zigzag(params, program, batch, key=None):
    return language_loss(params, program, zigzag(batch, program.mesh.shape["context"]), key)


def batch_of(rows=ROWS):
    tokens = np.random.default_rng(0).integers(0, 120, (rows, T + 1)).astype(np.int32)
    return {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}


@functools.cache
def step(name, loss=language_loss, remat="none", impl="threefry2x32"):
    """(words that a device draws in a step, loss, parameters after it)."""
    shape, rules, axes = (MESHES | STAGED | {"one": ((1, 1), Sharding.none(), None)})[name]
    config = DecoderConfig(vocabulary=120, tokens=T, embed=16, hidden=24, heads=4, layers=L,
                           dropout=0.25, remat=remat)
    key = jax.random.key(3, impl=impl)
    mesh = make_mesh(shape, axes or ("batch", "model"))
    made = create_state(lambda: Decoder(config, rules, rngs=nnx.Rngs(0)), optax.sgd(0.5), mesh,
                        loss=in_zigzag if name == "zigzag" else loss,
                        **({"rows": rules.activations["B"]} if name[:4] == "rows" else {}))
    batch = made.program.place(batch_of())
    program = compile_step(made, batch, key)
    words = random_words(program)
    state, metrics = program(made, batch, key)
    return words, float(metrics["loss"]), jax.device_get(state.params)


STAGED = {"(2, 2, 2)": ((2, 2, 2), TENSOR.in_stages(), STAGES),
          "(4, 2, 1)": ((4, 2, 1), TENSOR.in_stages(), STAGES)}


def assert_same(found, expected):
    np.testing.assert_allclose(found[1], expected[1], rtol=2e-6)
    for one, other in zip(jax.tree.leaves(found[2]), jax.tree.leaves(expected[2]), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


@pytest.mark.parametrize("name, remat", [
    ("(8, 1)", "none"), ("(4, 2)", "all"), ("fully sharded", "none"), ("sequence", "none"),
    ("sequence", "all"), ("sequence", "products"), ("gather", "none"), ("zigzag", "all"),
    ("rows over two axes", "none")])
def test_a_step_draws_each_devices_own_words_and_trains_as_one_device(name, remat):
    shape, rules, axes = MESHES[name]
    sizes = dict(zip(axes, shape))
    split = [axis for letter in "BT" for axis in np.atleast_1d(rules.activations[letter]) if axis]
    found = step(name, remat=remat)
    passes = 1 if remat == "none" else 2  # a layer that is computed again draws again
    assert found[0] * np.prod([sizes[axis] for axis in split]) == passes * WORDS
    assert step("one", remat=remat)[0] == passes * WORDS
    assert_same(found, step("one"))


M = 4
SCHEDULES = {  # with passes of a microbatch through the layers, for each of M microbatches
    "gpipe": (gpipe, (M + 1) / M), "lockstep": (one_f_one_b, 2 * (M + 2) / M),
    "ZB-H1": (in_slots(schedules.zero_bubble), None)}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("shape", STAGED)
def test_in_a_pipeline_a_device_draws_the_words_of_its_own_rows(shape, name):
    schedule, passes = SCHEDULES[name]
    found = step(shape, pipelined(schedule, M))
    assert_same(found, step("one", in_microbatches(language_loss, M)))
    own = WORDS // 2 // STAGED[shape][0][0]
    assert found[0] == own * passes if passes else found[0] % (own // M) == 0


def test_a_generator_without_threefry_draws_no_words_of_it_and_depends_on_the_mesh():
    free = jax.random.key(3, impl="rbg")
    shares, masks = [], {}
    for name in MESHES:
        program, mask = of_a_mesh(name, free)
        assert not random_words(program)
        shares.append(np.mean(mask))
        masks[name] = np.asarray(mask)
    assert np.allclose(shares, 0.75, atol=0.03)
    assert (masks["(8, 1)"] != masks["(4, 2)"]).any()
    for name, ways in ("(8, 1)", 8), ("sequence", 2):  # devices do not repeat each other
        first, second, *_ = np.split(masks[name], ways)
        assert (first != second).any()
    again, first = (step("sequence", remat=remat, impl="rbg") for remat in ("all", "none"))
    assert_same(again, first)
