"""What fills a step's memory by kind: against the arrays of a state, formulas and live bytes."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from meshbook.costs.memory import step_memory
from meshbook.costs.plans import Plan
from meshbook.costs.step import describe
from meshbook.hlo import memory_kinds
from meshbook.hlo.liveness import live_bytes
from meshbook.hlo.memory_kinds import KINDS, kinds_over_time
from meshbook.models import ViT, ViTConfig
from meshbook.planning import topologies
from meshbook.planning.programs import recorded_program
from meshbook.sharding import Sharding, make_mesh, place
from meshbook.training import create_state, train_step

SOURCE = ViTConfig()
USUAL, SAVING, SHARDED = (f"v2-8 (8, 1) 512{special}" for special in (
    "", " checkpoint=True", " row=fully_sharded"))
RECORDED = (USUAL, SAVING, SHARDED, "v5e-8 (8, 1) 1024", "v5e-8 (8, 1) 256 model=MiniGPT")


@functools.cache
def recorded(name):
    return kinds_over_time(recorded_program(name)[0])


@functools.cache
def here(rules):
    """(a state on eight devices, its step's program)."""
    config = ViTConfig(patch=8, embed=32, hidden=128, heads=4, layers=1)
    make = lambda: ViT(config, getattr(Sharding, rules)(), rngs=nnx.Rngs(0))
    state = create_state(make, optax.adam(1e-3), make_mesh((8, 1)))
    batch = {"inputs": np.zeros((128, 32, 32, 3), np.float32), "labels": np.zeros(128, np.int32)}
    with jax.set_mesh(state.program.mesh):
        return state, train_step.lower(
            state, place(batch, state.program.mesh), jax.random.key(0)).compile()


def on_one_device(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("name", RECORDED)
def test_on_a_tpu_the_kinds_add_up_to_what_is_live_at_every_instruction(name):
    found, live = recorded(name), live_bytes(recorded_program(name)[0])
    assert tuple(found.kinds) == KINDS and found.total == live.bytes
    assert min(min(sizes) for sizes in found.kinds.values()) == 0
    assert sum(found.at_peak().values()) == live.peak


@pytest.mark.parametrize("rules", ["tensor_parallel", "fully_sharded"])
def test_on_a_cpu_the_arguments_are_the_state_and_the_kinds_add_up(rules):
    state, program = here(rules)
    found = kinds_over_time(program)
    assert found.total == live_bytes(program).bytes
    for at in (0, -1):  # the new state takes the old one's place
        assert found.kinds["parameters"][at] == on_one_device(state.params)
        assert found.kinds["moments"][at] == on_one_device(state.opt_state)
    whole = sum(x.nbytes for x in jax.tree.leaves(state.params))
    gathered = max(found.kinds["gathered weights"])
    assert gathered > 0.8 * whole if rules == "fully_sharded" else gathered == 0
    after = found.kinds["weight gradients"][found.turn:]
    assert not any(found.kinds["weight gradients"][:found.turn]) and max(after) >= 0.9 * whole


def test_at_the_turn_the_activations_of_the_formula_wait():
    found = recorded(USUAL)
    formula = step_memory(describe(SOURCE, Plan(8, rules="tensor_parallel"), 512))
    waiting = found.kinds["activations"]
    assert waiting[found.turn] == pytest.approx(formula.activations, rel=0.02)
    assert waiting[found.turn] == max(waiting) and waiting[0] == waiting[-1] == 0
    assert sum(found.at_peak().values()) == pytest.approx(
        topologies.recorded()[USUAL].live, rel=1e-3)


def test_when_the_last_activation_is_gone_all_gradients_are_there():
    found = recorded(USUAL)
    gone = max(at for at, size in enumerate(found.kinds["activations"]) if size) + 1
    parameters = found.kinds["parameters"][0]
    assert found.kinds["weight gradients"][gone] == pytest.approx(parameters, rel=0.02)


def teeth(sizes):
    """How often a curve rises from its lower to its upper third."""
    low, high = max(sizes) / 3, 2 * max(sizes) / 3
    states = (0 if size < low else 1 for size in sizes if not low <= size <= high)
    return [state for state, _ in itertools.groupby(states)].count(1)


def test_checkpointed_blocks_leave_a_tooth_each():
    usual, saving = recorded(USUAL), recorded(SAVING)
    activations = saving.kinds["activations"]
    assert teeth(activations[saving.turn:]) == SOURCE.layers
    assert teeth(usual.kinds["activations"][usual.turn:]) == 1
    assert max(activations) < max(usual.kinds["activations"]) / 4
    assert max(activations[:saving.turn]) < max(activations) / 2


def test_weights_are_gathered_in_bfloat16_and_wait():
    usual, sharded = recorded(USUAL), recorded(SHARDED)
    whole = usual.kinds["parameters"][0]
    assert not any(usual.kinds["gathered weights"])
    assert max(sharded.kinds["gathered weights"]) == pytest.approx(whole / 2, rel=0.02)
    assert sharded.kinds["gathered weights"][sharded.turn] > 0.45 * whole
    assert sharded.kinds["parameters"][0] < whole / 4


def test_the_loss_in_a_loop_and_the_moments_of_minigpt_are_found():
    found = recorded("v5e-8 (8, 1) 256 model=MiniGPT")
    assert found.kinds["moments"][0] == pytest.approx(2 * found.kinds["parameters"][0], rel=1e-3)
    assert max(found.kinds["logits and loss"]) + max(found.kinds["other"]) > 3e7


def test_paths_of_a_readers_own_step_are_enough():
    """Four layers, parameters and optimizer as two arguments: no TrainState, no scopes."""
    def loss(params, x):
        for w in params:
            x = jnp.sin(x @ w)
        return (x ** 2).mean()

    adam, params, x = optax.adam(1e-3), [jnp.ones((64, 64))] * 4, jnp.ones((512, 64))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, x):
        updates, opt_state = adam.update(jax.grad(loss)(params, x), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    program = step.lower(params, adam.init(params), x).compile()
    found = kinds_over_time(program)
    assert found.kinds["parameters"][0] == 4 * params[0].nbytes
    assert found.kinds["moments"][0] == 8 * params[0].nbytes + 4
    assert 2 * x.nbytes < max(found.kinds["activations"]) <= 8 * x.nbytes
    assert max(found.kinds["weight gradients"]) == params[0].nbytes  # each is used up at once
    assert found.total == live_bytes(program).bytes


FIRST = """HloModule step, is_scheduled=true, input_output_alias={ {}: (0, {}, may-alias) }

ENTRY %main (w: f32[64,64], x: f32[512,64]) -> f32[64,64] {
  %w = f32[64,64]{1,0} parameter(0), metadata={op_name="params[0]"}
  %x = f32[512,64]{1,0} parameter(1), metadata={op_name="x"}
  %y = f32[512,64]{1,0} dot(%x, %w), metadata={op_name="jit(step)/jvp(f)/dot"}
  %z = f32[512,64]{1,0} sine(%y), metadata={op_name="jit(step)/jvp(f)/sin"}
  %dw = f32[64,64]{1,0} dot(%z, %x), metadata={op_name="jit(step)/transpose(jvp(f))/dot"}
  ROOT %new = f32[64,64]{1,0} subtract(%w, %dw), metadata={op_name="jit(step)/sub"}
}
"""


def test_what_the_first_operation_of_the_backward_pass_writes_may_be_a_weights_gradient():
    found, live = kinds_over_time(FIRST), live_bytes(FIRST)
    places = {name: at for at, name in enumerate(live.schedule)}
    assert found.turn == places["dw"] and found.total == live.bytes
    size = 64 * 64 * 4
    assert {name: found.kinds["weight gradients"][at] for name, at in places.items()} == {
        "w": 0, "x": 0, "y": 0, "z": 0, "dw": size, "new": size}
    assert found.kinds["parameters"] == 6 * [size] and not any(found.kinds["activation gradients"])
    assert found.kinds["activations"][places["z"]] == 512 * 64 * 4


def test_operations_that_write_less_than_a_kilobyte_are_not_busy():
    found = recorded(USUAL)
    assert 0 < len(found.busy) < len(found.total) and list(found.busy) == sorted(set(found.busy))
    assert max(found.total[at] for at in found.busy) == max(found.total)


def test_a_program_that_is_no_training_step_is_refused():
    forward = jax.jit(jnp.matmul).lower(jnp.ones((8, 8)), jnp.ones((8, 8))).compile()
    with pytest.raises(ValueError, match="operations of a backward pass; found none"):
        kinds_over_time(forward)
    with pytest.raises(ValueError, match="with a schedule"):
        kinds_over_time(forward.as_text().replace("is_scheduled=true, ", ""))


def test_the_backward_pass_begins_where_most_of_what_there_is_has_its_names():
    forward, back = ("jit(f)/jvp(layers)/dot",), ("jit(f)/transpose(jvp(layers))/dot",)
    assert memory_kinds._turn([forward, forward, back, back]) == 2
    assert memory_kinds._turn([forward, forward + back, back]) == 2  # half of it is not most
    assert memory_kinds._turn([forward, forward + back + back, back]) == 1
    with pytest.raises(ValueError, match="expected the program of a training step"):
        memory_kinds._turn([forward, forward + back])
