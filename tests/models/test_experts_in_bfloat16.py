"""A decoder with experts in bfloat16: what a mesh rounds, and what sums in float32 mend."""
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from expert_decoders import AXES, BATCHES, CONFIGS, KEY, ROWS, RULES, SMALL, TOKENS, step
from flax import nnx

from meshbook import proofs
from meshbook.models.balanced_loss import balanced_loss
from meshbook.models.decoder import Decoder
from meshbook.sharding import Sharding, make_mesh
from meshbook.training import compile_step, create_state, run

EXACT = {"xla_allow_excess_precision": False}  # every bfloat16 is rounded where the program says
NARROW = {name: dataclasses.replace(CONFIGS[name], dtype=jnp.bfloat16, dropout=0.0)
          for name in ("capacity", "dropless", "biased")}
NARROW["latent"] = dataclasses.replace(NARROW["biased"], latent=8, rotary=8)


def narrow_logits(name, shape, wide, tokens_BT, options=EXACT):
    """Logits (B, T, V) in bfloat16 on a mesh, sums rounded before or after they are added up."""
    rules = RULES if shape != (1, 1, 1) else Sharding.none()
    rules = dataclasses.replace(rules, float32_sums=wide)
    state = create_state(lambda: Decoder(NARROW[name], rules, rngs=nnx.Rngs(0)), optax.sgd(0.1),
                         make_mesh(shape, AXES), rows=ROWS)
    with jax.set_mesh(state.program.mesh):
        placed = state.program.place({"inputs": tokens_BT})["inputs"]
        run = jax.jit(state.program.apply, compiler_options=options)
        return np.asarray(run(state.params, placed).astype(jnp.float32))[..., :250]


@pytest.mark.parametrize("name", NARROW)
def test_in_bfloat16_a_mesh_moves_a_logit_by_its_rounding_alone(name):
    """With sums in float32 and roundings where they are written: no choice of an expert flips."""
    tokens = TOKENS[0][:, :-1]
    one, *others = (narrow_logits(name, shape, True, tokens)
                    for shape in ((1, 1, 1), (1, 8, 1), (2, 2, 2)))
    for other in others:
        apart = np.abs(other - one)
        assert apart.max() < 0.05 and (apart.max(-1) > 0).mean() < 0.05


def test_in_bfloat16_parts_that_are_rounded_before_their_sum_flip_choices():
    """Why the rules have float32_sums: without it a token changes its experts, and its logits."""
    tokens = TOKENS[0][:, :-1]
    one, in_model = (narrow_logits("capacity", shape, False, tokens)
                     for shape in ((1, 1, 1), (2, 2, 2)))
    assert np.abs(in_model - one).max() > 0.3


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 8, 1), (2, 2, 2)])
def test_in_bfloat16_later_tokens_change_nothing_before_them(shape, wide):
    tokens, cut = TOKENS[0][:, :-1], 7
    changed = tokens.copy()
    changed[:, cut:] = 3  # all to the same experts
    before, after = (narrow_logits("capacity", shape, wide, each, None)
                     for each in (tokens, changed))
    np.testing.assert_array_equal(before[:, :cut], after[:, :cut])
    assert (before[:, cut:] != after[:, cut:]).any()


def test_sums_in_float32_have_the_gradients_of_one_device():
    rules = dataclasses.replace(RULES, float32_sums=True)
    state = create_state(lambda: Decoder(SMALL, rules, rngs=nnx.Rngs(0)),
                         optax.sgd(0.1, momentum=0.0), make_mesh((2, 2, 2), AXES),
                         loss=balanced_loss, rows=ROWS)
    program = compile_step(state, state.program.place(BATCHES[0]), KEY)
    alone, single = step("capacity")
    unbalanced = dataclasses.replace(alone, program=dataclasses.replace(
        alone.program, optimizer=state.program.optimizer))
    single = compile_step(unbalanced, alone.program.place(BATCHES[0]), KEY)
    found = proofs.assert_same_training(run(state, KEY, program), run(unbalanced, KEY, single),
                                        BATCHES)
    assert found.gradient_difference < 1e-6


def test_a_decoder_in_bfloat16_with_sums_in_float32_trains():
    """Its gradient can be compiled and run: products of bfloat16 are float32 and back."""
    rules = dataclasses.replace(RULES, float32_sums=True)
    config = dataclasses.replace(SMALL, dtype=jnp.bfloat16)
    state = create_state(lambda: Decoder(config, rules, rngs=nnx.Rngs(0)), optax.sgd(0.1),
                         make_mesh((2, 2, 2), AXES), loss=balanced_loss, rows=ROWS)
    _, metrics = compile_step(state, state.program.place(BATCHES[0]), KEY)(
        state, state.program.place(BATCHES[0]), KEY)
    assert np.isfinite(metrics["loss"])


def test_sums_of_split_tokens_are_not_made_in_float32():
    rules = dataclasses.replace(Sharding.sequence_parallel(), float32_sums=True)
    config = dataclasses.replace(SMALL, experts=None)
    with pytest.raises(ValueError, match="expected tensor parallelism for sums in float32"):
        state = create_state(lambda: Decoder(config, rules, rngs=nnx.Rngs(0)), optax.sgd(0.1),
                             make_mesh((4, 2)))
        with jax.set_mesh(state.program.mesh):
            jax.jit(state.program.apply)(state.params, TOKENS[0][:, :-1])
