"""The decoder whose tokens are split between products: equal results and bytes, less held."""
import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from test_decoder import BATCH, CONFIGS, DOCUMENTS, TOKENS, assert_close

from meshbook import proofs
from meshbook.models.decoder import Decoder
from meshbook.models.losses import language_loss
from meshbook.sharding import Sharding, make_mesh
from meshbook.training import create_state
from meshbook.training.loop import value_and_gradients

B, T, D, L = 8, 16, 32, 2
SEQUENCE = Sharding.sequence_parallel()
RULES = {
    "one device": Sharding.none(), "tensor": Sharding.tensor_parallel(), "sequence": SEQUENCE,
    "overlapped": Sharding.sequence_parallel(overlapped=True),
    "again": Sharding.sequence_parallel(regather=True),
    "overlapped again": Sharding.sequence_parallel(overlapped=True, regather=True),
    "and fully sharded": SEQUENCE.also(parameters={"D": "batch"}),
    "all at once": Sharding.fully_sharded(regather=True).also(activations={"T": "model"}),
}
RULES["all at once"] = dataclasses.replace(RULES["all at once"], overlapped=True)


@functools.cache
def state(name, rules, shape, **changes):
    config = dataclasses.replace(CONFIGS[name], **changes)
    make = lambda: Decoder(config, RULES[rules], rngs=nnx.Rngs(0))
    return create_state(make, optax.sgd(0.1), make_mesh(shape), loss=language_loss)


@functools.cache
def step(name, rules, shape, **changes):
    """(program of loss and gradients, what it finds: metrics, gradients)."""
    made, key = state(name, rules, shape, **changes), jax.random.key(3)
    key = jax.device_put(key, jax.NamedSharding(made.program.mesh, jax.P()))
    batch = made.program.place(BATCH | DOCUMENTS)
    with jax.set_mesh(made.program.mesh), jax.default_matmul_precision("highest"):
        program = jax.jit(value_and_gradients).lower(made, batch, key).compile()
        (_, metrics), gradients = jax.device_get(program(made, batch, key))
    return program, metrics, gradients


@pytest.mark.parametrize("name, rules, shape", [
    ("groups", "sequence", (2, 2)), ("gelu", "again", (4, 2)), ("latent", "overlapped", (4, 2)),
    ("plain", "and fully sharded", (4, 2)), ("latent", "all at once", (4, 2))])
def test_loss_and_every_gradient_are_those_of_one_device(name, rules, shape):
    _, expected, gradients = step(name, "one device", (1, 1))
    _, metrics, found = step(name, rules, shape)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=2e-6)
    assert_close(found, gradients, 1e-6)


@pytest.mark.parametrize("rules", ["sequence", "overlapped", "overlapped again", "all at once"])
def test_four_ways_give_the_same_too(rules):
    _, expected, gradients = step("plain", "one device", (1, 1))
    _, metrics, found = step("plain", rules, (2, 4))
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=2e-6)
    assert_close(found, gradients, 1e-6)


def test_dropout_is_that_of_one_device_in_every_bit():
    config = dict(dropout=0.25)
    _, expected, gradients = step("plain", "one device", (1, 1), **config)
    _, metrics, found = step("plain", "sequence", (2, 4), **config)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=2e-6)
    assert abs(expected["loss"] - step("plain", "one device", (1, 1))[1]["loss"]) > 1e-3
    assert_close(found, gradients, 1e-6)


def wire(rules, shape, name="plain"):
    """Bytes along model, less those of parameters whose tokens' gradients are summed there."""
    made, mesh = state(name, rules, shape), make_mesh(shape)
    moved = proofs.collectives(step(name, rules, shape)[0], mesh)
    return moved, {kind: moved.wire("model", kind=kind)
                   for kind, axes in moved if axes == ("model",)}


@pytest.mark.parametrize("rules, kinds, factor", [
    ("tensor", {"all-reduce"}, 1), ("sequence", {"all-gather", "reduce-scatter"}, 1),
    ("overlapped", {"all-gather", "reduce-scatter", "collective-permute"}, 1),
    ("again", {"all-gather", "reduce-scatter"}, 5 / 4),
    ("overlapped again", {"all-gather", "reduce-scatter", "collective-permute"}, 5 / 4)])
def test_bytes_on_the_wire_are_those_of_tensor_parallelism(rules, kinds, factor):
    shape = rows, n = 2, 4
    u = B // rows * T * D * 4
    moved, sent = wire(rules, shape)
    layers = 2 * L * 4 * u * (n - 1) / n * factor  # attention and MLP, forward and backward
    ends = 2 * 2 * u * (n - 1) / n  # embedding and head
    softmax = 3 * B // rows * T * 4 * 2 * (n - 1) / n  # of the loss: a maximum and two sums
    norms = (2 * L + 1) * D * 4 * 2 * (n - 1) / n * (rules != "tensor")  # scales see 1/n of tokens
    assert set(sent) == kinds | {"all-reduce"}
    assert sum(sent.values()) == layers + ends + softmax + norms


def test_a_ring_sends_a_piece_at_a_time():
    moved, _ = wire("overlapped", (2, 4))
    u = B // 2 * T * D * 4
    assert moved["collective-permute", ("model",)] == (2 * L * 4 * 3, 2 * L * 4 * 3 * u // 4)


def test_no_work_is_done_twice_and_latents_no_longer_n_times():
    one = proofs.work(step("plain", "one device", (1, 1))[0])
    for rules in "tensor", "sequence", "overlapped", "overlapped again":
        assert proofs.work(step("plain", rules, (2, 4))[0]) * 8 == one
    alone = proofs.work(step("latent", "one device", (1, 1))[0])
    config = CONFIGS["latent"]
    down = 2 * D * 2 * config.latent  # FLOPs of the down-projection of a token
    turned = 2 * 2 * config.latent * config.rotary / 2  # of every other layer
    repeated = 3 * B * T * config.layers * (down + turned)
    assert proofs.work(step("latent", "tensor", (4, 2))[0]) * 8 == alone + repeated
    assert proofs.work(step("latent", "all at once", (4, 2))[0]) * 8 == alone


def temporaries(rules, layers):
    made = step("plain", rules, (2, 4), layers=layers)[0]
    return made.memory_analysis().temp_size_in_bytes


def test_each_layer_keeps_less_than_with_tensor_parallelism():
    u = B // 2 * T * D * 4
    held = {rules: (temporaries(rules, 6) - temporaries(rules, 2)) / 4 / u
            for rules in ("tensor", "sequence", "again")}
    assert held["tensor"] - held["sequence"] > 2
    assert held["sequence"] - held["again"] > 1  # two gathered inputs, less a quarter of each


def test_latents_are_gathered_and_not_what_they_are_made_of():
    """2·R + P numbers of a token in front of the attention, D in front of the MLP."""
    config, (rows, n) = CONFIGS["latent"], (4, 2)
    moved, _ = wire("sequence", (rows, n), "latent")
    R, P = config.latent, config.rotary
    each = B // rows * T * 4
    gathered = each * (config.layers * (2 * R + D) + 2 * P)  # forward; 2 of 4 layers have P
    gathered += each * (2 * config.layers * D + D)  # backward of what was scattered; embedding
    gathered += each * D  # in front of the head
    assert moved["all-gather", ("model",)].bytes == gathered


def test_tokens_that_the_mesh_cannot_divide_are_refused():
    made = state("plain", "sequence", (2, 4))
    batch = made.program.place({"tokens_BT": TOKENS[:, :14]})
    with jax.set_mesh(made.program.mesh), pytest.raises(ValueError, match="T=14 does not divide"):
        made.program.model(made.params)(**batch)


def test_tokens_split_without_heads_and_hidden_units_are_refused():
    rules = Sharding.data_parallel().also(activations={"T": "model"})
    with jax.set_mesh(make_mesh((4, 2))), pytest.raises(ValueError, match="model, and H is not"):
        Decoder(CONFIGS["plain"], rules, rngs=nnx.Rngs(0))


def test_a_cache_of_split_tokens_is_refused():
    made = state("plain", "sequence", (4, 2))
    with jax.set_mesh(made.program.mesh), pytest.raises(ValueError, match="tensor_parallel"):
        model = made.program.model(made.params)
        model.extend(TOKENS[:, :1], model.empty_cache(8), 0, jax.numpy.zeros(8, int))
