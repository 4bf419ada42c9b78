"""The reference that shares no code with the models: logits, training and evaluation are equal."""
import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from meshes import on_one_device
from tiny_gpt import CONFIG as GPT, tiny_state, weights
from tiny_vit import BATCHES as IMAGES, CONFIG as VIT, KEY, PREPARE, make_state, run

from meshbook import proofs
from meshbook.costs.plans import Plan
from meshbook.costs.step import describe
from meshbook.models import reference
from meshbook.models.losses import language_loss
from meshbook.models.reference import Reference, adamw
from meshbook.sharding import place
from meshbook.training import clipped, compile_step, evaluate, recipe, train_step

B, T, STEPS, CLIP = 16, GPT.tokens, 5, 0.3


def documents(seed, padded=0):
    """Rows of several texts, each with its number and its own positions, and filling at the end."""
    random = np.random.default_rng(seed)
    text = random.integers(0, GPT.vocabulary, (B, T + 1)).astype(np.int32)
    begins = random.random((B, T)) < 0.2
    segments = np.cumsum(begins, 1).astype(np.int32)
    at = np.arange(T)
    first = np.maximum.accumulate(np.where(begins, at, 0), 1)
    weight = (random.random((B, T)) < 0.8).astype(np.float32)
    weight[B - padded:] = 0
    labels = np.where(weight > 0, text[:, 1:], -1).astype(np.int32)
    return {"inputs": text[:, :-1], "labels": labels,
            "segments": segments, "positions": (at - first).astype(np.int32), "weight": weight}


DOCUMENTS = [documents(seed) for seed in range(STEPS)]


def gpt_alone(**more):
    return Reference(reference.minigpt, weights(), adamw(20, 1e-2), KEY,
                     rate=GPT.dropout, classes=GPT.vocabulary, **more)


# Logits ------------------------------------------------------------------------------------------

@on_one_device
@pytest.mark.parametrize("key", [None, KEY])
def test_the_vits_logits(key):
    state, images = make_state(), IMAGES[0]["inputs"].astype(np.float32) / 255
    vit = jax.jit(lambda key: reference.vit(state.params, jnp.asarray(images), VIT.dropout, key))
    found = jax.jit(state.program.apply)(state.params, images, key)
    right = vit(key)
    np.testing.assert_allclose(found, right, atol=2e-5)
    if key is not None:
        assert np.abs(right - vit(None)).max() > 0.01


@on_one_device
@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("names", [(), ("segments",), ("segments", "positions")])
def test_minigpts_logits(names, key):
    state, batch = tiny_state(), DOCUMENTS[0]
    more, V = {name: batch[name] for name in names}, GPT.vocabulary
    model = jax.jit(lambda params: state.program.model(params)(batch["inputs"], key, **more))
    right = jax.jit(lambda params: reference.minigpt(
        params, batch["inputs"], GPT.dropout, key, **more))(state.params)
    found = model(state.params)
    np.testing.assert_allclose(found[..., :V], right[..., :V], atol=2e-5)
    assert (found[..., V:] < -1e29).all()
    plain = jax.jit(reference.minigpt)(weights(), batch["inputs"])
    assert (np.abs(right - plain).max() > 0.01) == bool(names or key is not None)


# Training ----------------------------------------------------------------------------------------

def test_adamw_written_out_is_that_of_optax():
    draw = np.random.default_rng(0).normal
    params = {name: jnp.asarray(draw(size=shape), jnp.float32) for name, shape in (
        ("w_in_DF", (4, 3)), ("b_qkv_SHK", (3, 2, 2)), ("scale_D", (4,)), ("position_TD", (2, 4)))}
    ours, theirs = recipe(20, 1e-2), adamw(20, 1e-2)
    sides = [(each, params, each.init(params)) for each in (ours, theirs)]
    for _ in range(20):
        gradients = jax.tree.map(lambda x: jnp.asarray(draw(size=x.shape), jnp.float32), params)
        for at, (each, here, state) in enumerate(sides):
            updates, state = each.update(gradients, state, here)
            sides[at] = each, optax.apply_updates(here, updates), state
    for name, x in sides[0][1].items():
        np.testing.assert_allclose(x, sides[1][1][name], atol=1e-6)
        assert np.abs(x - params[name]).max() > 0.05


@functools.cache
def vit_program():
    """AdamW, dropout and augmentation, all weights split over both axes of (4, 2)."""
    state = make_state("fully_sharded", (4, 2), recipe(20, 1e-2))
    return state, compile_step(state, place(IMAGES[0], state.program.mesh), KEY)


def vit_run():
    return run(*vit_program())


def vit_alone(**changes):
    state = vit_run().state
    settings = dict(params=jax.device_get(state.params), optimizer=adamw(20, 1e-2), key=KEY,
                    prepare=PREPARE, rate=VIT.dropout)
    return Reference(reference.vit, **(settings | changes)).run(params=False)


def test_adamw_fully_sharded_with_dropout_and_augmentation():
    verdict = proofs.assert_same_training(vit_run(), vit_alone(), IMAGES[:STEPS])
    assert repr(verdict).startswith("same training: 5 steps")


@pytest.mark.parametrize("changes", [
    dict(rate=0.11), dict(prepare=lambda x, key: PREPARE(x, None)), dict(key=jax.random.key(8)),
    dict(optimizer=adamw(20, 1.1e-2)), dict(optimizer=optax.adam(1e-2))],
    ids=["dropout", "no augmentation", "another key", "another rate", "another optimizer"])
def test_a_reference_that_trains_otherwise_does_not_agree(changes):
    with pytest.raises(proofs.ProofFailed):
        proofs.assert_same_training(vit_run(), vit_alone(**changes), IMAGES[:STEPS])


@functools.cache
def gpt_program(row, shape):
    """`language_recipe` with a norm that is always cut, from the weights of all states."""
    optimizer = optax.chain(clipped(CLIP), recipe(20, 1e-2))
    state = tiny_state(row, shape, optimizer, language_loss)
    return state, compile_step(state, place(DOCUMENTS[0], state.program.mesh), KEY)


def gpt_run(row, shape):
    return run(*gpt_program(row, shape))


@pytest.mark.parametrize("row, shape", [
    ("none", (1, 1)), ("tensor_parallel", (4, 2)), ("fully_sharded", (4, 2))])
def test_documents_weights_dropout_and_clipping(row, shape):
    verdict = proofs.assert_same_training(
        gpt_run(row, shape), gpt_alone(clip=CLIP).run(params=False), DOCUMENTS)
    assert repr(verdict).startswith("same training: 5 steps")


@pytest.mark.parametrize("dropped", ["segments", "positions", "weight"])
def test_documents_that_only_one_side_knows_of_are_caught(dropped):
    a, b = gpt_run("none", (1, 1)), gpt_alone(clip=CLIP).run(params=False)
    less = lambda f: lambda state, batch: f(state, {**batch, dropped: {
        "segments": np.zeros_like, "positions": lambda x: np.arange(T) + 0 * x,
        "weight": np.ones_like}[dropped](batch[dropped]), "labels": np.abs(batch["labels"])})
    blind = proofs.Run(less(b.step), b.state, less(b.gradients))
    with pytest.raises(proofs.ProofFailed):
        proofs.assert_same_training(a, blind, DOCUMENTS[:2])


def test_a_norm_that_is_cut_elsewhere_is_caught():
    other = gpt_alone(clip=0.9 * CLIP).run(params=False)
    norm = float(other.step(other.state, DOCUMENTS[0])[1]["gradient_norm"])
    assert norm > CLIP  # both are clipped, so that Adam's steps would be the same
    with pytest.raises(proofs.ProofFailed, match="gradient, leaf"):
        proofs.assert_same_training(gpt_run("none", (1, 1)), other, DOCUMENTS)


COUNTERS = 4 * 3  # steps of the state, of Adam and of the rate; the last norm is only written


def test_parameters_moments_and_counters_are_donated():
    (_, vit), (_, gpt) = vit_program(), gpt_program("tensor_parallel", (4, 2))
    held = describe(VIT, Plan(4, model=2, rules="fully_sharded"), B).numbers["stored"]
    proofs.assert_donated(vit, 4 * 3 * held + COUNTERS)
    held = describe(GPT, Plan(4, model=2, rules="tensor_parallel"), B).numbers["stored"]
    found = proofs.assert_donated(gpt, 4 * 3 * held + COUNTERS)
    assert repr(found).startswith("donated: 211 kB per device")
    state, _ = vit_program()
    with jax.set_mesh(state.program.mesh):
        kept = jax.jit(train_step.__wrapped__).lower(state, state.program.place(IMAGES[0]), KEY)
    with pytest.raises(proofs.ProofFailed, match="found 0 bytes aliased"):
        proofs.assert_donated(kept.compile(), COUNTERS)


# Evaluation --------------------------------------------------------------------------------------

@pytest.mark.parametrize("shape", [(1, 1), (4, 2)])
def test_evaluation_with_filling_is_the_reference_without(shape):
    row = "tensor_parallel" if shape == (4, 2) else "none"
    state = make_state(row, shape)
    alone = Reference(reference.vit, jax.device_get(state.params), None, KEY, PREPARE)
    images = {name: x[:12] for name, x in IMAGES[0].items()}
    filled = {name: np.concatenate([x, x[:4]]) for name, x in images.items()}
    filled["weight"] = np.float32([1] * 12 + [0] * 4)
    right = alone.loss(alone.params, images)
    assert_evaluates(evaluate(state, [filled]), right)

    state = tiny_state(row, shape)
    filled = documents(0, padded=4)
    texts = {name: x[:12] for name, x in filled.items()}
    assert_evaluates(evaluate(state, [filled]), gpt_alone().loss(weights(), texts))


def assert_evaluates(found, right):
    loss, accuracy = map(float, right)
    assert found["loss"] == pytest.approx(loss, rel=2e-6)
    assert found["accuracy"] == pytest.approx(accuracy, rel=1e-6)


EVEN = np.linspace(-3, 3, 75, dtype=np.float32)  # their mean is uncertain by 0.2
APART = np.float32(18 * [3] + 9 * [-3] + 48 * [1])  # their mean is 1, five times as much


@pytest.mark.parametrize("w, fault", [
    (EVEN, None), (APART * (np.arange(75) > 0), None), (APART, "a mean of 0, found 1"),
    (1.01 * EVEN, "up to 3, found 3.0"), (0.89 * EVEN, "up to 3, found 2.6"),
    (np.sign(EVEN) * 3, "a uniform distribution, found 1.7"),
    (EVEN ** 3 / 9, "a uniform distribution, found 0.6")])
def test_weights_that_start_otherwise_than_uniformly_up_to_their_bound_are_refused(w, fault):
    refused = pytest.raises(AssertionError, match=f"w_in_DF: expected {fault}")
    with refused if fault else contextlib.nullcontext():
        reference.assert_initial({"w_in_DF": w}, {"DF": 3})


def test_biases_start_at_0_scales_at_1_and_no_two_weights_alike():
    right = {"b_in_F": np.zeros(3), "scale_D": np.ones(3), "class_D": np.zeros(3), "w_in_DF": EVEN}
    reference.assert_initial(right, {"DF": 3, "F": 1})
    for name, x in (("b_in_F", np.ones(3)), ("scale_D", np.zeros(3)), ("class_D", np.ones(3)),
                    ("w_out_DF", EVEN)):
        with pytest.raises(AssertionError, match=f"{name}: expected (0|1|elements of its own)"):
            reference.assert_initial(right | {name: x}, {"DF": 3, "F": 1})


@pytest.mark.parametrize("chance, top_k, top_p, temperature, token", [
    (0.0, None, None, 1, 0), (0.19, None, None, 1, 0), (0.21, None, None, 1, 1),
    (0.69, None, None, 1, 1), (0.71, None, None, 1, 2), (1.0, None, None, 1, 2),
    (0.0, 3, None, 1, 1), (0.49, 3, None, 1, 1), (0.51, 3, None, 1, 2), (0.81, 3, None, 1, 0),
    (0.61, 2, None, 1, 1), (0.63, 2, None, 1, 2), (1.0, 2, None, 1, 2), (1.0, 1, None, 1, 1),
    (0.99, None, 0.4, 1, 1), (0.61, None, 0.6, 1, 1), (0.63, None, 0.6, 1, 2),
    (0.99, None, 0.79, 1, 2), (0.99, None, 0.81, 1, 2), (0.05, None, 0.81, 1, 0),
    (0.9, None, None, 0, 1), (0.1, None, None, 0.5, 0), (0.11, None, None, 0.5, 1)])
def test_a_token_is_drawn_from_its_share(chance, top_k, top_p, temperature, token):
    """Of probabilities 0.2, 0.5 and 0.3, worked out by hand."""
    logits_V = np.log([0.2, 0.5, 0.3]) + 7
    assert reference.sampled(logits_V, chance, temperature, top_k, top_p) == token
