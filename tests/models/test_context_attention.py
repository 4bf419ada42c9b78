"""The decoder whose tokens are split over a context axis, in attention, too."""
import re

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from meshbook import proofs
from meshbook.models.decoder import Decoder, DecoderConfig
from meshbook.models.losses import language_loss
from meshbook.parallel.context import Context, filled_up, zigzag, zigzag_order
from meshbook.sharding import Sharding, make_mesh
from meshbook.training import compile_step, create_state, run

CONFIG = DecoderConfig(vocabulary=200, tokens=32, embed=32, hidden=48, heads=4, layers=2)
B, T, D, L = 8, 32, 32, 2
SGD, KEY = optax.sgd(0.5, momentum=0.0), jax.random.key(0)


def drawn(T):
    random = np.random.default_rng(T)
    tokens, labels = random.integers(0, 200, size=(2, B, T)).astype(np.int32)
    documents = np.sort(random.integers(0, 3, size=(B, T)), 1).astype(np.int32)
    return filled_up({"inputs": tokens, "labels": labels, "segments": documents}, 8)


BATCHES = [drawn(T), drawn(T - 3)]  # the second is filled up
METHODS = {
    "zigzag": Context(zigzagged=True, block=4),
    "gather": Context("gather"),
    "ulysses": Context("ulysses"),
}


def in_zigzag(params, program, batch, key=None):
    return language_loss(params, program, zigzag(batch, program.mesh.shape["context"]), key)


def state(config, rules=Sharding.none(), shape=(1, 1), loss=language_loss):
    mesh = make_mesh(shape, ("batch", "context", "model")[:len(shape)])
    return create_state(lambda: Decoder(config, rules, rngs=nnx.Rngs(0)), SGD, mesh, loss=loss)


def compiled(context, shape, config=CONFIG, loss=None):
    rules = Sharding.context_parallel(context)
    if len(shape) == 3:
        rules = rules.also(H="model", F="model", V="model")
    made = state(config, rules, shape, loss or (
        in_zigzag if context.zigzagged else language_loss))
    return made, compile_step(made, made.program.place(BATCHES[0]), KEY)


@pytest.fixture(scope="module")
def programs():
    return {name: compiled(context, (2, 4)) for name, context in METHODS.items()}


@pytest.fixture(scope="module")
def single():
    return run(state(CONFIG), KEY)


@pytest.mark.parametrize("name", METHODS)
def test_it_trains_as_one_device_does_with_documents_and_filled_up_rows(programs, single, name):
    made, program = programs[name]
    proofs.assert_same_training(run(made, KEY, program), single, BATCHES)


@pytest.mark.parametrize("name, wire", [
    ("zigzag", 18), ("gather", 18), ("ulysses", 8 * 3 / 4)])
def test_bytes_along_the_context_are_those_of_the_formula(programs, name, wire):
    made, program = programs[name]
    u, norms = 4 * B // 2 * T // 4 * D, 4 * D * (2 * L + 1)
    found = proofs.collectives(program, made.program.mesh)
    assert found.wire("context") - 2 * norms * 3 / 4 == L * wire * u


def test_with_tensor_parallelism_and_groups_it_trains_as_one_device_does():
    config = DecoderConfig(vocabulary=200, tokens=T, embed=D, hidden=48, heads=4, groups=2,
                           layers=2, remat="attention")
    made, program = compiled(Context(zigzagged=True, block=3), (2, 2, 2), config)
    proofs.assert_same_training(
        run(made, KEY, program), run(state(config), KEY), BATCHES)
    moved = proofs.collectives(program, made.program.mesh)
    u_keys = 4 * B // 2 * T // 2 * D // 2 // 2  # half of the groups of half of the heads
    assert moved["collective-permute", ("context",)].bytes == L * 6 * u_keys
    masks = re.findall(r"pred\[([\d,]+)\]", program.as_text())  # of one pair of blocks at a time
    assert masks and max(each.count(",") for each in masks) < 5


def test_labels_that_stay_behind_are_refused(single):
    def wrong(params, program, batch, key=None):
        moved = zigzag(batch, 4) | {name: batch[name] for name in ("labels", "weight")}
        return language_loss(params, program, moved, key)

    made, program = compiled(Context(zigzagged=True, block=4), (2, 4), loss=wrong)
    with pytest.raises(proofs.ProofFailed, match="apart"):
        proofs.assert_same_training(run(made, KEY, program), single, BATCHES)


def test_without_positions_tokens_stand_where_the_order_says():
    with jax.set_mesh(make_mesh((2, 4), ("batch", "context"))):
        for context, places in ((Context(zigzagged=True), zigzag_order(T, 4)),
                                (Context(), np.arange(T))):
            rules = Sharding.context_parallel(context)
            model = nnx.eval_shape(lambda: Decoder(CONFIG, rules, rngs=nnx.Rngs(0)))
            np.testing.assert_array_equal(model.places(T), places)


def test_latents_are_refused_in_a_sentence():
    config = DecoderConfig(latent=8, rotary=4, embed=32, heads=4)
    with pytest.raises(ValueError, match="is for keys and values of heads; found latent=8"):
        Decoder(config, Sharding.context_parallel(Context()), rngs=nnx.Rngs(0))


def test_rows_that_the_context_cannot_divide_are_refused_in_a_sentence():
    rules = Sharding.context_parallel(Context())
    with jax.set_mesh(make_mesh((2, 4), ("batch", "context"))), pytest.raises(
            ValueError, match="T=30 does not divide over mesh axis 'context' of size 4"):
        nnx.eval_shape(lambda: Decoder(CONFIG, rules, rngs=nnx.Rngs(0)).hidden(
            np.zeros((B, 30), np.int32)))
