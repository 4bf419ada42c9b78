"""`training.run`: the gradients that it reads from a program, and what it shows under Adam."""
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from meshes import on_one_device
from tiny_gpt import mesh_of

from meshbook import proofs, training
from meshbook.training import language_recipe, loss_and_metrics, recipe

D, C, B, KEY = 16, 8, 32, jax.random.key(7)
FIRST, SECOND = ("w_first_DD", "w_second_DD")


class Net(nnx.Module):
    """Three weights, two of them of one shape."""

    def __init__(self):
        draw = np.random.default_rng(0).normal
        make = lambda *shape: nnx.Param(jnp.asarray(draw(size=shape), jnp.float32) / 4)
        self.w_first_DD, self.w_second_DD, self.w_head_DC = make(D, D), make(D, D), make(D, C)

    def __call__(self, x_BD, key=None):
        h_BD = jnp.tanh(x_BD @ self.w_first_DD[...]) @ self.w_second_DD[...]
        return jnp.tanh(h_BD) @ self.w_head_DC[...]


def batch(seed):
    x = np.random.default_rng(seed).normal(size=(B, D)).astype(np.float32)
    return {"inputs": x, "labels": x[:, :C].argmax(-1).astype(np.int32)}


BATCHES = [batch(seed) for seed in range(5)]
OPTIMIZERS = {
    "SGD": optax.sgd(0.1, momentum=0.0), "momentum": optax.sgd(0.1, momentum=0.9),
    "Adam": optax.adam(1e-3), "b1=0.5": optax.adam(1e-3, b1=0.5), "recipe": recipe(20, 1e-3),
    "language_recipe": language_recipe(20, 1e-3)}


def state_of(name, shape=(1, 1), before=None, loss=loss_and_metrics):
    """A state on a mesh; before: what happens to gradients ahead of the optimizer."""
    optimizer = OPTIMIZERS[name]
    return training.create_state(
        Net, optax.chain(before, optimizer) if before else optimizer, mesh_of(shape), loss=loss)


@functools.cache
def alone(name):
    return training.run(state_of(name), KEY)


def split(*arguments, **more):
    return training.run(state_of(*arguments[:1], (8, 1), *arguments[1:], **more), KEY)


# Its gradients are those of the step ---------------------------------------------------------------

def assert_gradients(run, state, batch, share=1.0):
    loss = lambda params: loss_and_metrics(params, state.program, batch)[0]
    right = jax.grad(loss)(jax.tree.map(jnp.asarray, state.params))
    found = run.gradients(jax.tree.map(jnp.copy, state), batch)
    assert found.keys() == right.keys()
    norm = float(optax.tree.norm(right))
    for name in right:
        np.testing.assert_allclose(found[name], share * right[name], atol=3e-6 * norm)
    return norm


@on_one_device
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_gradients_are_those_of_the_loss_at_the_start_and_later(name):
    run = alone(name)
    assert (run.params is None) == (name not in ("SGD", "momentum"))
    state = run.state
    for batch in BATCHES[:3]:
        norm = assert_gradients(run, state, batch)
        assert norm < 1  # nothing is clipped here
        state, metrics = run.step(jax.tree.map(jnp.copy, state), batch)
        assert metrics["gradient_norm"] == pytest.approx(norm, rel=1e-5)
        assert set(metrics) == {"loss", "accuracy", "gradient_norm"}


def test_a_run_can_start_from_a_trained_state():
    state, _ = training.fit(state_of("Adam", (8, 1)), BATCHES, KEY)
    here = jax.tree.map(lambda x, like: jax.device_put(np.asarray(x), like.sharding),
                        dataclasses.replace(state, program=(one := state_of("Adam")).program), one)
    a, b = training.run(state, KEY), training.run(here, KEY)
    with jax.set_mesh(here.program.mesh):
        assert_gradients(b, here, BATCHES[0])
    proofs.assert_same_training(a, b, BATCHES)


@on_one_device
def test_gradients_that_are_clipped_have_the_norm_from_before():
    ten = lambda *arguments: jax.tree.map(lambda x: 10 * x, loss_and_metrics(*arguments))
    run = training.run(state_of("language_recipe", loss=ten), KEY)
    _, metrics = run.step(jax.tree.map(jnp.copy, run.state), BATCHES[0])
    norm = float(metrics["gradient_norm"])
    assert norm > 2
    assert_gradients(run, run.state, BATCHES[0], share=10 / norm)


def test_one_program_can_be_handed_over_and_is_the_one_that_runs():
    state, seen = state_of("Adam"), []
    program = training.compile_step(state, BATCHES[0], KEY)
    run = training.run(state, KEY, lambda *arguments: seen.append(1) or program(*arguments))
    proofs.assert_same_training(run, alone("Adam"), BATCHES[:2])
    assert len(seen) == 3  # the gradients, and two steps


def test_an_optimizer_that_keeps_no_gradients_is_refused():
    for optimizer in optax.sgd(0.1), optax.identity():
        state = training.create_state(Net, optimizer)
        with pytest.raises(ValueError, match=r"keeps its gradients, such as optax.sgd\(rate"):
            training.run(state, KEY)


# What Adam hides, they do not -----------------------------------------------------------------------

def change(**leaves):
    """Gradients of which some leaves are replaced: name=f(all gradients)."""
    def update(gradients, params=None):
        here = {name: f for name, f in leaves.items() if name in gradients}
        return gradients | {name: f(gradients) for name, f in here.items()}

    return optax.stateless(update)


FAULTS = {
    "four times too large": optax.scale(4.0), "half as large": optax.scale(0.5),
    "one dropped": change(w_first_DD=lambda g: 0 * g[FIRST]),
    "one doubled": change(w_second_DD=lambda g: 2 * g[SECOND]),
    "two swapped": change(w_first_DD=lambda g: g[SECOND], w_second_DD=lambda g: g[FIRST]),
    "the signs only": change(w_head_DC=lambda g: jnp.sign(g["w_head_DC"])),
}


@pytest.mark.parametrize("name", ["Adam", "recipe"])
def test_right_runs_agree(name):
    verdict = proofs.assert_same_training(split(name), alone(name), BATCHES)
    assert repr(verdict).startswith("same training: 5 steps, losses within ")
    assert ", accuracy, gradient_norm " in repr(verdict) and ", gradients " in repr(verdict)


@pytest.mark.parametrize("name", ["Adam", "recipe"])
@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_gradients_on_one_mesh_are_caught(name, fault):
    with pytest.raises(proofs.ProofFailed, match="gradient, leaf w_.* of the global norm apart"):
        proofs.assert_same_training(split(name, FAULTS[fault]), alone(name), BATCHES)


def test_losses_alone_do_not_see_four_times_too_large_ones():
    a, b = (proofs.Run(lambda *each, run=run: (lambda state, metrics: (state, metrics["loss"]))(
        *run.step(*each)), run.state) for run in (
        split("Adam", FAULTS["four times too large"]), alone("Adam")))
    verdict = proofs.assert_same_training(a, b, BATCHES)
    assert repr(verdict).startswith("losses only: 5 steps") and "same" not in repr(verdict)


def test_gradients_scaled_within_the_loss_are_caught():
    def four_times(*arguments):
        loss, metrics = loss_and_metrics(*arguments)
        return 4 * loss - jax.lax.stop_gradient(3 * loss), metrics

    with pytest.raises(proofs.ProofFailed, match="gradient, leaf"):
        proofs.assert_same_training(split("Adam", loss=four_times), alone("Adam"), BATCHES)


def test_gradients_that_go_wrong_later_are_caught_by_their_norm():
    later = optax.scale_by_schedule(lambda step: jnp.where(step < 2, 1.0, 4.0))
    with pytest.raises(proofs.ProofFailed, match="^gradient_norm at step 2"):
        proofs.assert_same_training(split("Adam", later), alone("Adam"), BATCHES)


def test_clipping_hides_a_factor_from_the_moments_and_not_from_the_norm():
    ten = lambda *arguments: jax.tree.map(lambda x: 10 * x, loss_and_metrics(*arguments))
    right = training.run(state_of("language_recipe", loss=ten), KEY)
    wrong = split("language_recipe", FAULTS["four times too large"], loss=ten)
    with pytest.raises(proofs.ProofFailed, match="^gradient_norm at step 0"):
        proofs.assert_same_training(wrong, right, BATCHES)
    proofs.assert_same_training(split("language_recipe", loss=ten), right, BATCHES)


@pytest.mark.parametrize("changed, message", [
    (lambda metrics: metrics | {"accuracy": 8 * metrics["accuracy"]}, "^accuracy at step 0"),
    (lambda metrics: {"loss": metrics["loss"]},
     "metrics at step 0: expected accuracy, gradient_norm, loss, found gradient_norm, loss"),
    (lambda metrics: metrics | {"extra": metrics["loss"]}, "metrics at step 0: .*found .*extra"),
])
def test_every_metric_is_compared(changed, message):
    def loss(*arguments):
        value, metrics = loss_and_metrics(*arguments)
        return value, changed(metrics)

    with pytest.raises(proofs.ProofFailed, match=message):
        proofs.assert_same_training(split("Adam", loss=loss), alone("Adam"), BATCHES)
