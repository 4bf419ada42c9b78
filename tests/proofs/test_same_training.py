"""Is it the same training? What the second proof accepts, what it refuses, and its messages."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from tiny_mlp import (
    B, BATCHES, D, GRADIENTS, SPECS, STEP, loss, mesh_of, plain, put, split, weights)

from meshbook import proofs
from meshbook.proofs import ProofFailed


@pytest.fixture(scope="module")
def mesh():
    return mesh_of()


def test_runs_that_agree_leave_their_states_alive(mesh):
    a, b = split(mesh), plain()
    verdict = proofs.assert_same_training(a, b, BATCHES)
    assert repr(verdict).startswith("same training: 20 steps, losses within ")
    assert verdict.loss_difference < 2e-6 and len(verdict.losses) == 20
    assert verdict.gradient_difference < 1e-5 and verdict.parameter_difference < 1e-5
    assert verdict.losses[-1][0] < verdict.losses[0][0]  # it trained
    np.testing.assert_array_equal(a.state["w_in"], weights()["w_in"])  # nothing was donated
    proofs.assert_same_training((a.step, a.state), (b.step, b.state), iter(BATCHES[:3]))


def test_a_step_may_return_the_loss_itself(mesh):
    bare = plain(step=lambda state, x: (state, loss(state, x)), gradients=None, params=None)
    proofs.assert_same_training(bare, bare, BATCHES[:2])


def scaled_loss(factor):
    def changed(state, x):
        state, metrics = STEP(state, x)
        return state, {"loss": metrics["loss"] * factor}

    return changed


@pytest.mark.parametrize("changes,message", [
    (dict(step=scaled_loss(1.001)),
     r"loss at step 0, device 0 \(cpu\): expected .* found .* 1.0e-03"),
    (dict(step=scaled_loss(jnp.nan)),
     "loss of run a at step 0.*expected a finite number, found nan"),
    (dict(gradients=lambda s, x: jax.tree.map(lambda g: g * 1.0001, GRADIENTS(s, x))),
     r"gradient, leaf w_(in|out): .* of the global norm apart"),
    (dict(gradients=lambda s, x: {"w_in": GRADIENTS(s, x)["w_in"]}),
     "gradients: expected the same leaves in both runs.*only in the second: w_out"),
    (dict(gradients=lambda s, x: jax.tree.map(lambda g: g.T, GRADIENTS(s, x))),
     r"gradients, leaf w_in: expected shape \(32, 64\), found \(64, 32\)"),
    (dict(gradients=lambda s, x: jax.tree.map(lambda g: g * jnp.inf, GRADIENTS(s, x))),
     "leaf w_in: expected finite numbers"),
    (dict(params=lambda s: jax.tree.map(lambda p: p * 1.01, s)),
     "parameter at the start, leaf w_in"),
])
def test_what_differs_is_named(changes, message):
    with pytest.raises(ProofFailed, match=message):
        proofs.assert_same_training(plain(**changes), plain(), BATCHES[:3])


def test_the_same_program_agrees_with_itself_to_the_last_bit():
    verdict = proofs.assert_same_training(plain(), plain(), BATCHES[:2], rtol=0, tolerance=0)
    assert verdict.loss_difference == verdict.gradient_difference == 0


def test_gradients_that_are_zero_in_both_runs_are_nothing_to_compare():
    """A norm of zero is refused, and one of exactly one is not."""
    scaled = lambda factor: plain(params=None, gradients=lambda s, x: {
        "w": jnp.zeros(4).at[2].set(factor)})
    with pytest.raises(ProofFailed, match="expected a norm above zero, found 0 in both runs"):
        proofs.assert_same_training(scaled(0.0), scaled(0.0), BATCHES[:1])
    for factor in 1.0, 1e-30:
        assert proofs.assert_same_training(scaled(factor), scaled(factor), BATCHES[:1])


def test_parameters_are_compared_after_the_last_step():
    def lazy(state, x):  # says the right loss, and learns a thousandth less of one weight
        after, metrics = STEP(jax.tree.map(jnp.copy, state), x)
        after["w_out"] = after["w_out"] + 1e-3 * (state["w_out"] - after["w_out"])
        return after, metrics

    with pytest.raises(ProofFailed, match="parameter after the last step, leaf w_out"):
        proofs.assert_same_training(plain(step=lazy), plain(), BATCHES[:1])


def test_a_gradient_that_is_zero_is_reported_and_its_parameter_is_not_compared():
    state = jax.tree.map(jnp.asarray, weights() | {"key_bias": np.zeros(D, np.float32)})

    def noisy(sign):  # what Adam makes of a rounding error
        def stepped(state, x):
            rest = {name: state[name] for name in SPECS}
            after, metrics = STEP(rest, x)
            return after | {"key_bias": state["key_bias"] + sign * 1e-3}, metrics
        return stepped

    def gradients(state, x):
        rounding = jnp.sum(jax.nn.softmax(state["w_in"], -1), -1) - 1  # 0, but for the last digit
        return GRADIENTS({name: state[name] for name in SPECS}, x) | {"key_bias": -rounding}

    runs = [plain(step=noisy(sign), state=state, gradients=gradients) for sign in (1, -1)]
    verdict = proofs.assert_same_training(*runs, BATCHES[:3])
    assert verdict.zero == ["key_bias"] and "not compared: key_bias" in repr(verdict)


def routed(size, factor=1.0, noise=0.0, **changes):
    """A router whose gradient is `size` of the norm, times a factor, with other rounding."""
    state = {"big": jnp.ones(D), "router": jnp.ones(4)}
    total = lambda w, x: jnp.mean((x @ w["big"]) ** 2) + 10 * size * jnp.sum(jnp.sin(w["router"]))

    def gradients(w, x):
        found = jax.grad(total)(w, x)
        return found | {"router": factor * found["router"] * (1 + noise)}

    step = jax.jit(lambda w, x: (jax.tree.map(lambda p, g: p - 0.1 * g, w, gradients(w, x)),
                                 total(w, x)))
    return plain(**(dict(step=step, state=state, gradients=jax.jit(gradients)) | changes))


@pytest.mark.parametrize("size", [1e-3, 1e-5, 1e-6, 1e-8])
def test_a_small_gradient_that_is_not_zero_is_compared(size):
    right = routed(size)
    for noise in 0.0, 3e-7:
        assert proofs.assert_same_training(right, routed(size, noise=noise), BATCHES[:2]).zero == []
    for factor in -1.0, 0.0, 1.01, 8.0:
        with pytest.raises(ProofFailed, match="gradient, leaf router"):
            proofs.assert_same_training(routed(size, factor), right, BATCHES[:2])


def test_a_leaf_whose_gradient_is_zero_in_every_digit_is_reported():
    gradients = lambda state, x: GRADIENTS(state, x) | {"unused": jnp.zeros(3)}
    run = plain(gradients=gradients, params=None)
    verdict = proofs.assert_same_training(run, run, BATCHES[:1])
    assert verdict.zero == ["unused"] and "not compared: unused" in repr(verdict)


@pytest.mark.parametrize("scale", [2.0**-20, 1.0, 2.0**10])
def test_in_any_unit_a_difference_of_large_numbers_is_held_to_its_rounding(scale):
    def gradients(sign, more=0.0):
        def of(state, x):
            rounding = jnp.sum(jax.nn.softmax(state["w_in"], -1), -1) - 1
            found = GRADIENTS(state, x) | {"difference": 1e-4 + more + sign * rounding}
            return jax.tree.map(lambda g: scale * g, found)
        return plain(gradients=of, params=None)

    verdict = proofs.assert_same_training(gradients(1), gradients(-1), BATCHES[:1])
    assert verdict.zero == [] and verdict.gradient_difference > 0
    with pytest.raises(ProofFailed, match="gradient, leaf difference"):
        proofs.assert_same_training(gradients(1, 5e-5), gradients(-1), BATCHES[:1])


@pytest.mark.parametrize("size", [1e-1, 1e-3, 1e-5])
def test_a_wider_tolerance_is_one_of_each_leaf(size):
    right, wide = routed(size), dict(rtol=1e-2, tolerance=1e-2)
    assert proofs.assert_same_training(
        right, routed(size, noise=3e-3), BATCHES[:2], **wide).zero == []
    for factor in 0.0, 1.5:
        with pytest.raises(ProofFailed, match="gradient, leaf router"):
            proofs.assert_same_training(routed(size, factor), right, BATCHES[:2], **wide)


def test_without_gradients_each_leafs_own_change_is_compared():
    right = routed(1e-6, gradients=None)
    proofs.assert_same_training(right, right, BATCHES[:5])
    with pytest.raises(ProofFailed, match="parameter after the last step, leaf router"):
        proofs.assert_same_training(routed(1e-6, 0.5, gradients=None), right, BATCHES[:5])


def test_another_start_is_said_before_anything_else():
    other = jax.tree.map(lambda x: jnp.asarray(x) * 1.001, weights())
    with pytest.raises(ProofFailed, match="parameter at the start, leaf w_in"):
        proofs.assert_same_training(plain(state=other), plain(), BATCHES[:2])


def in_bfloat16(devices, factor=1.0):
    half = lambda tree: jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)
    mesh = jax.make_mesh((devices,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    gradient = lambda w, x: jax.tree.map(
        lambda g: factor * g, jax.grad(lambda w: loss(half(w), half(x)).astype(jnp.float32))(w))
    step = jax.jit(lambda w, x: (jax.tree.map(lambda p, g: p - 0.1 * g, w, gradient(w, x)),
                                 loss(half(w), half(x)).astype(jnp.float32)))
    rows = lambda x: jax.device_put(x, NamedSharding(mesh, P("batch")))
    return plain(step=lambda w, x: step(w, rows(x)), state=put(weights(), mesh, P()),
                 gradients=lambda w, x: jax.jit(gradient)(w, rows(x)))


def test_a_program_in_bfloat16_is_compared_to_a_tolerance_of_its_own():
    near = in_bfloat16(8, 1 + 2**-9)  # half a rounding of that type
    with pytest.raises(ProofFailed, match="gradient, leaf"):
        proofs.assert_same_training(near, in_bfloat16(1), BATCHES[:3], rtol=1e-2)
    wide = dict(rtol=1e-2, tolerance=1e-2)
    verdict = proofs.assert_same_training(near, in_bfloat16(1), BATCHES[:3], **wide)
    assert "gradients" in repr(verdict) and "(1e-02)" in repr(verdict)
    with pytest.raises(ProofFailed, match=r"gradient, leaf w_(in|out): .*\(allowed 1e-02\)"):
        proofs.assert_same_training(in_bfloat16(8, 1.05), in_bfloat16(1), BATCHES[:3], **wide)


def test_a_loss_that_differs_between_devices_is_seen(mesh):
    def uneven(state, x):
        each = jax.shard_map(lambda x: jnp.mean(x**2), mesh=mesh, in_specs=P("batch"),
                             out_specs=P(), check_vma=False)
        return state, {"loss": jax.jit(each)(x)}

    even = lambda state, x: (state, {"loss": np.mean(np.square(x[: B // 4]))})
    with pytest.raises(ProofFailed, match=r"loss at step 0, device [1-7] \(cpu\)"):
        proofs.assert_same_training((uneven, {}), (even, {}), BATCHES[:1])


def test_nothing_to_compare_is_refused():
    with pytest.raises(ValueError, match="gradients from both runs or from neither"):
        proofs.assert_same_training(plain(), plain(gradients=None), BATCHES[:1])
    with pytest.raises(ValueError, match="at least one batch"):
        proofs.assert_same_training(plain(), plain(), [])
    with pytest.raises(ValueError, match=r"scalar loss from run a, found shape \(2,\)"):
        bare = plain(gradients=None, params=None)
        proofs.assert_same_training((lambda s, x: (s, jnp.zeros(2)), {}), bare, BATCHES[:1])


def test_a_comparison_of_losses_alone_says_so(mesh):
    """Parameters or gradients make it a proof."""
    bare = dict(gradients=None, params=None)
    for kept, line in ((), "losses only: 3 steps, losses within "), (
            ("params",), "same training: "), (("gradients",), "same training: "):
        less = {name: None for name in bare if name not in kept}
        verdict = proofs.assert_same_training(split(mesh, **less), plain(**less), BATCHES[:3])
        assert repr(verdict).startswith(line)


def complex_run(change=lambda g: g, metric=lambda loss: loss):
    """Complex weights by plain SGD; `change` makes another gradient, `metric` another metric."""
    loss = lambda w, x: jnp.mean(jnp.abs(x @ w - 1) ** 2)
    gradient = jax.jit(lambda w, x: change(jnp.conj(jax.grad(loss)(w, x))))

    def step(w, x):
        value = loss(w, x)
        return w - 0.1 * gradient(w, x), {"loss": value, "field": metric(jnp.sum(w))}

    w = jnp.full((D, 4), 1 + 2j, jnp.complex64)
    return proofs.Run(step, w, gradient, lambda w: w)


@pytest.mark.parametrize("changes, message", [
    (dict(change=lambda g: g.real + 3j * g.imag), r"gradient, leaf .* found \S+j$"),
    (dict(change=lambda g: g.real - 1j * g.imag), "gradient, leaf"),
    (dict(change=lambda g: 1.5 * g.real + 1j * g.imag), "gradient, leaf"),
    (dict(change=jnp.conj), "gradient, leaf"),
    (dict(metric=jnp.conj), r"field at step 0, .*\(allowed 1e-05\)"),
    (dict(metric=lambda x: x.real + jnp.nan * 1j), "field of run a .* expected a finite number"),
])
def test_imaginary_parts_are_compared(changes, message):
    proofs.assert_same_training(complex_run(), complex_run(), BATCHES[:2])
    with pytest.raises(ProofFailed, match=message):
        proofs.assert_same_training(complex_run(**changes), complex_run(), BATCHES[:2])


def test_a_random_key_among_the_parameters_is_compared_by_its_bits():
    def run(seed):
        stepped = lambda state, x: (state | dict(zip(("w_in", "w_out"), (
            STEP({name: jnp.copy(state[name]) for name in SPECS}, x)[0].values()))),
            {"loss": loss({name: state[name] for name in SPECS}, x)})
        state = jax.tree.map(jnp.asarray, weights()) | {"key": jax.random.key(seed)}
        return plain(step=stepped, state=state, gradients=None)

    proofs.assert_same_training(run(1), run(1), BATCHES[:2])
    with pytest.raises(ProofFailed, match="parameter at the start, leaf key"):
        proofs.assert_same_training(run(1), run(2), BATCHES[:2])


def test_a_comparison_of_nothing_is_no_proof():
    for nothing in dict(params=lambda state: {}), dict(gradients=lambda state, x: {}):
        with pytest.raises(ValueError, match="at least one leaf to compare, found none"):
            proofs.assert_same_training(plain(**nothing), plain(**nothing), BATCHES[:1])
    idle = plain(step=lambda state, x: (state, loss(state, x)))
    verdict = proofs.assert_same_training(idle, idle, BATCHES[:2])
    assert repr(verdict).endswith("; no step changed a parameter, which says nothing")
