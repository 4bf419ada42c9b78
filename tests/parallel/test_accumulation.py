"""Checkpointed blocks and microbatches: the same training, less memory, and what it costs."""
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
from tiny_vit import B, BATCHES, KEY, STILL as CONFIG, compiled, normalised, run

from meshbook import proofs
from meshbook.costs.plans import Plan
from meshbook.costs.step import describe
from meshbook.costs.traffic import step_traffic
from meshbook.costs.work import step_work
from meshbook.hlo.collectives import Moved
from meshbook.models.checkpointed_vit import CheckpointedViT
from meshbook.models.decoder import Decoder, DecoderConfig
from meshbook.models.losses import language_loss
from meshbook.parallel.accumulation import in_microbatches
from meshbook.sharding import Sharding, make_mesh
from meshbook.training import create_state, loss_and_metrics

PARTS = 4
KINDS = {"plain": {}, "checkpointed": {"model": CheckpointedViT},
         "parts": {"loss": in_microbatches(loss_and_metrics, PARTS)}}


def program(kind="plain", shape=(1, 1)):
    return compiled("tensor_parallel", shape, CONFIG, prepare=normalised, **KINDS[kind])


@pytest.mark.parametrize("shape", [(1, 1), (4, 2)])
@pytest.mark.parametrize("kind", ["checkpointed", "parts"])
def test_training_is_the_same(kind, shape):
    proofs.assert_same_training(run(*program(kind, shape)), run(*program()), BATCHES[:3])


def test_dropout_is_the_same_when_a_block_is_computed_again():
    plain, again = (run(*compiled(**KINDS[kind])) for kind in ("plain", "checkpointed"))
    proofs.assert_same_training(again, plain, BATCHES[:3])


@on_one_device
def test_each_part_draws_its_own_dropout():
    loss = in_microbatches(lambda params, program, batch, key: (
        jax.random.uniform(key) * params, {}), PARTS)
    draws = jax.random.split(KEY, PARTS)
    expected = np.mean([jax.random.uniform(key) for key in draws])
    found = loss(1.0, None, BATCHES[0], KEY)[0]
    assert np.allclose(found, expected) and not np.allclose(found, jax.random.uniform(draws[0]))


def test_parts_take_less_memory():
    """Checkpoints do on a TPU (test_topologies.py); on CPU XLA computes both copies at once."""
    needed = [program(kind)[1].memory_analysis().temp_size_in_bytes for kind in ("parts", "plain")]
    assert needed[0] < needed[1] / 2


def test_a_checkpoint_costs_the_forward_pass_of_the_blocks_again():
    extra = proofs.work(program("checkpointed")[1]) - proofs.work(program()[1])
    T, D, F = CONFIG.tokens, CONFIG.embed, CONFIG.hidden
    block = B * (T * (8 * D * D + 4 * D * F) + 4 * T * T * D)
    last = B * 2 * T * D * F  # the last product of a block is not needed again
    assert extra == CONFIG.layers * (block - last)


def test_parts_cost_no_work_and_gradients_of_matrices_travel_once():
    state, step = program("parts", (4, 2))
    mesh = state.program.mesh
    planned = describe(CONFIG, Plan(**mesh.shape, rules="tensor_parallel"), B)
    work, traffic = step_work(planned), step_traffic(planned)
    proofs.assert_divided(step, 8, 8 * work.useful, work.factor, rtol=1e-9)
    size = lambda x: x.addressable_shards[0].data.size
    others = 2 + sum(size(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)
                     if not path[-1].key.startswith("w_"))  # two metrics; what sums use at once
    found = proofs.collectives(step, mesh)["all-reduce", ("batch",)]
    whole = traffic["all-reduce", ("batch",)].bytes
    assert whole + 4 * (PARTS - 1) * others < found.bytes <= whole + 4 * PARTS * others
    traffic["all-reduce", ("batch",)] = found
    (sums, size) = traffic["all-reduce", ("model",)]
    traffic["all-reduce", ("model",)] = PARTS * sums, size
    proofs.assert_communicates(step, mesh, traffic)


@on_one_device
def test_what_cannot_be_cut_is_refused():
    with pytest.raises(ValueError, match="16 rows does not divide into 5 parts"):
        in_microbatches(loss_and_metrics, 5)({}, None, BATCHES[0])
    with pytest.raises(ValueError, match="expected 1 or more parts; found 0"):
        in_microbatches(loss_and_metrics, 0)
    with pytest.raises(ValueError, match="labels that all count; found a batch with weights"):
        in_microbatches(loss_and_metrics, 4)({}, None, BATCHES[0] | {"weight": np.ones(B)})


DECODER = DecoderConfig(vocabulary=250, tokens=16, embed=32, hidden=64, heads=4, layers=2)
DECODERS = {
    "plain": dataclasses.replace(DECODER, bias=True),
    "groups": dataclasses.replace(DECODER, groups=2, gated=False, remat="all"),
    "latent": dataclasses.replace(DECODER, latent=8, rotary=8, layers=4, period=2, bias=True),
}
RANDOM = np.random.default_rng(0)
TEXTS = {name: RANDOM.integers(0, 250, (32, 16)).astype(np.int32) for name in ("inputs", "labels")}


@functools.cache
def decoder_state(name, preset="none", shape=(1, 1), dropout=0.0):
    """Its norms and biases are not ones and zeros, so that each of them counts."""
    config = dataclasses.replace(DECODERS[name], dropout=dropout)
    made = create_state(lambda: Decoder(config, getattr(Sharding, preset)(), rngs=nnx.Rngs(0)),
                        optax.sgd(0.1), make_mesh(shape), loss=language_loss)
    return dataclasses.replace(made, params=moved(made.params, 0.1))


@functools.cache
def gradients_of(parts, *state, key=False, **options):
    """The compiled loss, metrics and gradients of a batch in so many parts, and what they are."""
    made = decoder_state(*state, **options)
    loss = in_microbatches(language_loss, parts) if parts else language_loss
    key = jax.random.key(3) if key else None
    run = jax.value_and_grad(lambda params, batch: loss(params, made.program, batch, key),
                             has_aux=True)
    with jax.set_mesh(made.program.mesh):
        batch = made.program.place(TEXTS)
        program = jax.jit(run).lower(made.params, batch).compile()
        return program, program(made.params, batch)


def assert_equal(found, expected, rtol=1e-6):
    np.testing.assert_allclose(jax.tree.leaves(found[0]), jax.tree.leaves(expected[0]), rtol=rtol)
    found, expected = jax.device_get((found[1], expected[1]))
    norm = np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(expected)))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(one - other) <= rtol * norm


SPLITS = [("data_parallel", (8, 1)), ("tensor_parallel", (4, 2)), ("fully_sharded", (4, 2))]


@pytest.mark.parametrize("name, preset, shape", [
    *(("latent", *split) for split in SPLITS), ("plain", *SPLITS[0]), ("groups", *SPLITS[1]),
    ("groups", *SPLITS[2])])
def test_gradients_of_parts_are_those_of_the_batch_and_are_summed_once(name, preset, shape):
    program, found = gradients_of(4, name, preset, shape)
    assert_equal(found, gradients_of(0, name)[1])
    mesh = make_mesh(shape)
    step = describe(DECODERS[name], Plan(**mesh.shape, rules=preset), 32)
    moved, expected = proofs.collectives(program, mesh), {}
    gradients = 4 * (step.numbers["used"] + 3)  # the loss twice, accuracy
    expected["all-reduce", ("batch",)] = Moved(1, gradients)
    if preset == "fully_sharded":  # as many elements as are not held already
        missing = step.numbers["used"] - step.numbers["stored"]
        size = 4 * missing * shape[0] // (shape[0] - 1)
        expected["all-gather", ("batch",)] = Moved(
            moved["all-gather", ("batch",)].count, size)
    along = {key: each for key, each in moved.items() if key[1] == ("batch",)}
    assert along == expected
    if shape[1] > 1:  # along "model" it is the same bytes in four times as many sums
        whole = step_traffic(step)["all-reduce", ("model",)]
        assert moved["all-reduce", ("model",)].bytes == whole.bytes


@pytest.mark.parametrize("preset, shape", SPLITS[:2])
def test_parts_cost_no_work_and_less_memory(preset, shape):
    parts, whole = (gradients_of(count, "plain", preset, shape)[0] for count in (4, 0))
    assert proofs.work(parts) == proofs.work(whole)
    needed = [each.memory_analysis().temp_size_in_bytes for each in (parts, whole)]
    assert needed[0] < 0.75 * needed[1]


def test_dropout_of_the_parts_is_the_same_on_every_mesh():
    found = [gradients_of(4, "groups", *where, dropout=0.25, key=True)[1]
             for where in (("none", (1, 1)), ("tensor_parallel", (4, 2)))]
    assert_equal(*found)
    still = gradients_of(4, "groups", "none", (1, 1))[1]
    assert abs(float(found[0][0][0]) - float(still[0][0])) > 1e-4


def test_gradients_are_added_up_in_the_type_of_the_parameters():
    made = decoder_state("plain", "data_parallel", (8, 1))
    config = dataclasses.replace(DECODERS["plain"], dtype=jnp.bfloat16)
    short = create_state(lambda: Decoder(config, Sharding.data_parallel(), rngs=nnx.Rngs(0)),
                         optax.sgd(0.1), make_mesh((8, 1)), loss=language_loss)
    loss = in_microbatches(language_loss, 4)
    with jax.set_mesh(short.program.mesh):
        batch = short.program.place(TEXTS)
        (value, _), grads = jax.jit(jax.value_and_grad(
            lambda params: loss(params, short.program, batch), has_aux=True))(made.params)
    (whole, _), expected = jax.device_get(gradients_of(0, "plain")[1])
    grads = jax.device_get(grads)
    assert 1e-6 < abs(float(value) / float(whole) - 1) < 0.02
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        assert one.dtype == jnp.float32
        assert np.linalg.norm(one - other) < 0.1 * np.linalg.norm(other) + 1e-3
