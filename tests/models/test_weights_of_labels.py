"""Labels that count a half, thrice or anything: every loss and metric is the weighted mean."""
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from moved import moved

from meshbook.models import MiniGPT, MiniGPTConfig
from meshbook.models.balanced_loss import balanced_loss
from meshbook.models.decoder import Decoder, DecoderConfig
from meshbook.models.expert_layers import ExpertSizes
from meshbook.models.fused_loss import one_pass_cross_entropy
from meshbook.models.losses import chunked_cross_entropy, language_loss
from meshbook.models.pipelined import pipelined
from meshbook.parallel.pipeline import gpipe
from meshbook.sharding import Sharding, make_mesh
from meshbook.training import create_state, evaluate, weighted_mean

B, T, D, V, VOCABULARY = 8, 6, 12, 128, 100
RANDOM = np.random.default_rng(0)
LABELS = RANDOM.integers(0, VOCABULARY, (B, T)).astype(np.int32)
WEIGHTS = {
    "halves": np.where(RANDOM.random((B, T)) < 0.4, 0.5, 1), "threes": np.full((B, T), 3.0),
    "any": RANDOM.random((B, T)) * (RANDOM.random((B, T)) < 0.8),
    "rows": np.repeat(RANDOM.permutation([0.0, 0.5, 1, 3, 0, 2, 0.25, 7])[:, None], T, 1),
    "hardly": 1e-3 * RANDOM.random((B, T))}
WEIGHTS = {name: weight.astype(np.float32) for name, weight in WEIGHTS.items()}
CROSS_ENTROPIES = {"chunked": chunked_cross_entropy, "one pass": one_pass_cross_entropy}
LAYOUTS = [("none", (1, 1)), ("data_parallel", (8, 1)), ("fully_sharded", (4, 2))]


def by_hand(logits, labels, weight):
    """The weighted mean of losses, that of right answers, and the gradient to the logits."""
    logits, weight = np.float64(logits), np.float64(weight)
    chances = np.exp(logits - logits.max(-1, keepdims=True))
    chances /= chances.sum(-1, keepdims=True)
    right = labels[..., None] == np.arange(logits.shape[-1])
    losses = -np.log((chances * right).sum(-1))
    share = weight / weight.sum()
    return ((losses * share).sum(), ((logits.argmax(-1) == labels) * share).sum(),
            (chances - right) * share[..., None])


def assert_near(found, expected):
    """Equal to float32's rounding, of the norm."""
    found, expected = np.float64(found), np.float64(expected)
    assert found.shape == expected.shape
    assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected)


@functools.cache
def weighted(name, row, shape, chunk):
    """2.5 times a cross-entropy, the accuracy, and gradients: a function of numpy arrays."""
    rules = getattr(Sharding, row)()

    def loss(head, labels, weight):
        loss, accuracy = CROSS_ENTROPIES[name](
            *head, labels, weight, vocabulary=VOCABULARY, sharding=rules, chunk=chunk)
        return 2.5 * loss, accuracy

    run, mesh = jax.jit(jax.value_and_grad(loss, has_aux=True)), make_mesh(shape)
    specs = (rules.activation("BTD"), rules.parameter("DV"), rules.parameter("V"))

    def found(head, labels, weight):
        with jax.set_mesh(mesh):
            rows = rules.activation("BT")
            return jax.device_get(run(tuple(map(jax.device_put, head, specs)), *(
                jax.device_put(x, rows) for x in (labels, weight))))
    return found


@pytest.mark.parametrize("name", CROSS_ENTROPIES)
@pytest.mark.parametrize("row, shape", LAYOUTS)
def test_cross_entropies_and_their_gradients_are_those_of_the_weighted_mean(name, row, shape):
    head = [RANDOM.normal(size=size).astype(np.float32) for size in ((B, T, D), (D, V), V)]
    hidden, w, b = map(np.float64, head)
    labels = np.where(RANDOM.random((B, T)) < 0.5, (hidden @ w + b)[..., :VOCABULARY].argmax(-1),
                      LABELS).astype(np.int32)
    for weight in WEIGHTS.values():
        (loss, accuracy), (dh, dw, db) = weighted(name, row, shape, 7)(head, labels, weight)
        expected, right, errors = by_hand((hidden @ w + b)[..., :VOCABULARY], labels, weight)
        errors = 2.5 * np.pad(errors, ((0, 0), (0, 0), (0, V - VOCABULARY)))
        assert 0.2 < right < 0.9
        for one, other in (loss, 2.5 * expected), (accuracy, right), (dh, errors @ w.T), (
                dw, np.einsum("btd,btv->dv", hidden, errors)), (db, errors.sum((0, 1))):
            assert_near(one, other)


def test_a_weighted_mean_is_one():
    x = RANDOM.normal(size=(B, T)).astype(np.float32)
    for weight in WEIGHTS.values():
        assert_near(weighted_mean(x, weight), np.average(np.float64(x), weights=weight))
        for found in weighted_mean(jnp.asarray(x), weight), jax.jit(weighted_mean)(x, weight):
            assert_near(found, np.average(np.float64(x), weights=weight))


class Linear(nnx.Module):
    """Logits (..., C) of inputs (..., X)."""

    def __init__(self):
        self.w_XC = nnx.Param(jax.random.normal(jax.random.key(0), (5, 7)))

    def __call__(self, x, key=None):
        return x @ self.w_XC[...]


@functools.partial(jax.jit, static_argnums=0)
def found_by(program, params, batch):
    return jax.value_and_grad(program.loss, has_aux=True)(params, program, batch)


def loss_and_gradients(state, batch):
    """Of the state's loss, in evaluation: ((loss, metrics), gradients), on the host."""
    with jax.set_mesh(state.program.mesh):
        return jax.device_get(found_by(state.program, state.params, state.program.place(batch)))


@pytest.mark.parametrize("shape", [(1, 1), (8, 1), (4, 2)])
@pytest.mark.parametrize("each", ["row", "token"])
def test_the_loss_of_a_classifier_and_its_evaluation_are_weighted_means(shape, each):
    state = create_state(Linear, optax.sgd(0.1), make_mesh(shape))
    w, batches = np.float64(state.params["w_XC"]), []
    for weight in WEIGHTS["any"], WEIGHTS["rows"]:
        x = RANDOM.normal(size=(B, T, 5)).astype(np.float32)
        labels = RANDOM.integers(0, 7, (B, T)).astype(np.int32)
        batch = {"inputs": x, "labels": labels, "weight": weight}
        batches.append(batch if each == "token" else {name: x[:, 0] for name, x in batch.items()})
    for batch in batches:
        loss, accuracy, errors = by_hand(batch["inputs"] @ w, batch["labels"], batch["weight"])
        (found, metrics), gradients = loss_and_gradients(state, batch)
        for one, other in (found, loss), (metrics["loss"], loss), (metrics["accuracy"], accuracy), (
                gradients["w_XC"], batch["inputs"].reshape(-1, 5).T @ errors.reshape(-1, 7)):
            assert_near(one, other)
    assert_evaluated(state, batches, [batch["inputs"] @ w for batch in batches])


def assert_evaluated(state, batches, logits):
    """The evaluation of several batches is the mean over all of their labels by weight."""
    logits = np.concatenate(logits)
    labels, weight = (np.concatenate([batch[name] for batch in batches])
                      for name in ("labels", "weight"))
    loss, accuracy, _ = by_hand(logits, labels, weight)
    found = evaluate(state, batches)
    assert_near(found["loss"], loss)
    assert_near(found["accuracy"], accuracy)


SMALL = dict(vocabulary=VOCABULARY, tokens=T, embed=D, hidden=20, heads=2, layers=1)
EXPERTS = ExpertSizes(4, 2, capacity=1.0, auxiliary=0.3)
MODELS = {
    "MiniGPT": (MiniGPT, MiniGPTConfig(**SMALL), language_loss),
    "decoder": (Decoder, DecoderConfig(**SMALL), functools.partial(
        language_loss, cross_entropy=one_pass_cross_entropy)),
    "experts": (Decoder, DecoderConfig(**SMALL, experts=EXPERTS), balanced_loss)}


@functools.cache
def state_of(name, row, shape):
    model, config, loss = MODELS[name]
    make = lambda: model(config, getattr(Sharding, row)(), rngs=nnx.Rngs(0))
    state = create_state(make, optax.sgd(0.1), make_mesh(shape), loss=loss)
    return dataclasses.replace(state, params=moved(state.params, 0.3))


@functools.cache
def logits_and_gradients(name):
    """On one device: (logits, gradients of their sum with errors, and of what balances experts)."""
    state = state_of(name, "none", (1, 1))

    def both(params, errors, inputs):
        def total(params):
            model, added = state.program.model(params), 0.0
            if name == "experts":
                hidden, loads = model.hidden_and_loads(inputs)
                added = EXPERTS.auxiliary * loads.balance.sum()
            else:
                hidden = model.hidden(inputs)
            logits = model.head(hidden)[..., :VOCABULARY]
            return (logits * errors).sum() + added, (logits, added)
        return jax.grad(total, has_aux=True)(params)

    run = jax.jit(both)

    def found(inputs, errors):
        with jax.set_mesh(state.program.mesh):
            return jax.device_get(run(state.params, errors.astype(np.float32), inputs))
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("row, shape", LAYOUTS[:2])
def test_losses_of_models_their_gradients_and_evaluation_are_weighted_means(name, row, shape):
    state = state_of(name, row, shape)
    of_logits, batches, all_logits = logits_and_gradients(name), [], []
    for weight in WEIGHTS["any"], WEIGHTS["rows"]:
        inputs = RANDOM.integers(0, VOCABULARY, (B, T)).astype(np.int32)
        _, (logits, _) = of_logits(inputs, np.zeros((B, T, VOCABULARY)))
        labels = np.where(RANDOM.random((B, T)) < 0.5, logits.argmax(-1), LABELS).astype(np.int32)
        batches.append({"inputs": inputs, "labels": labels, "weight": weight})
        all_logits.append(logits)
        loss, accuracy, errors = by_hand(logits, labels, weight)
        expected, (_, added) = of_logits(inputs, errors)
        (found, metrics), gradients = loss_and_gradients(state, batches[-1])
        for one, other in (found, loss + added), (metrics["loss"], loss), (
                metrics["accuracy"], accuracy):
            assert_near(one, other)
        assert 0.2 < accuracy < 0.9
        whole = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(expected)))
        for one, other in zip(*map(jax.tree.leaves, (gradients, expected)), strict=True):
            assert np.linalg.norm(one - other) <= 3e-6 * whole
    assert_evaluated(state, batches, all_logits)


def test_a_pipeline_refuses_weights_with_which_its_parts_would_not_count_alike():
    config = DecoderConfig(**SMALL | {"layers": 2})
    rules, mesh = Sharding.tensor_parallel().in_stages(), make_mesh(
        (1, 2, 1), ("batch", "stage", "model"))
    state = create_state(lambda: Decoder(config, rules, rngs=nnx.Rngs(0)), optax.sgd(0.1), mesh,
                         loss=pipelined(gpipe, 2))
    batch = {"inputs": LABELS, "labels": LABELS, "weight": WEIGHTS["any"]}
    with pytest.raises(ValueError, match="labels that all count; found a batch with weights"):
        loss_and_gradients(state, batch)
