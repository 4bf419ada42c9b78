"""The decoder writes with a cache what whole forward passes write, on every mesh."""
import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from meshes import on_one_device
from moved import moved

from meshbook.models import generate
from meshbook.models.decoder import Decoder, DecoderConfig
from meshbook.models.generation import prefill, window_start
from meshbook.sharding import Sharding, make_mesh
from meshbook.training import create_state

SMALL = DecoderConfig(vocabulary=250, tokens=16, embed=32, hidden=64, heads=4, layers=2)
CONFIGS = {
    "plain": SMALL,
    "groups": dataclasses.replace(SMALL, groups=2, bias=True),
    "latent": dataclasses.replace(SMALL, latent=8, rotary=8, layers=4, period=2, bias=True),
    "latent without positions": dataclasses.replace(SMALL, latent=8, gated=False),
}
KEY, LENGTH, W = jax.random.key(3), 20, SMALL.tokens
PROMPTS = [[1, 2, 3], [4], [*range(30, 41)], [*range(100, 130)]]  # the last is longer than W


@functools.cache
def state(name, preset="none", shape=(1, 1), **choice):
    """A state whose biases count, and whose layers say more than the token that they are given."""
    rules = getattr(Sharding, preset)(**choice)
    made = create_state(lambda: Decoder(CONFIGS[name], rules, rngs=nnx.Rngs(0)), optax.identity(),
                        make_mesh(shape))
    return dataclasses.replace(
        made, params=moved(made.params, 0.3) | {"token_VD": made.params["token_VD"]})


@functools.cache
def likeliest(name):
    """Each prompt's text, every token by a whole forward pass of what the window shows."""
    forward, params = jax.jit(state(name).program.apply), state(name).params
    texts = [list(prompt) for prompt in PROMPTS]
    for _ in range(LENGTH):
        seen = [text[window_start(len(text), W):] for text in texts]
        tokens_BT = np.int32([each + [0] * (W - len(each)) for each in seen])
        with jax.set_mesh(state(name).program.mesh):
            logits_BTV = forward(params, tokens_BT)
        for row, (text, each) in enumerate(zip(texts, seen)):
            text.append(int(logits_BTV[row, len(each) - 1].argmax()))
    return [text[len(prompt):] for text, prompt in zip(texts, PROMPTS)]


@on_one_device
@pytest.mark.parametrize("name", CONFIGS)
def test_cached_equals_whole_forward_passes(name):
    written = generate(state(name), PROMPTS, LENGTH, KEY, temperature=0)
    assert written == likeliest(name)
    assert all(len(set(text)) > 3 for text in written)  # not one token for ever


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("preset, shape", [("tensor_parallel", (4, 2)), ("fully_sharded", (4, 2))])
def test_it_is_the_same_on_every_mesh(name, preset, shape):
    assert generate(state(name, preset, shape), PROMPTS, LENGTH, KEY,
                    temperature=0) == likeliest(name)


@pytest.mark.parametrize("preset, choice", [("zero2", {}), ("fully_sharded", {"regather": True})])
def test_it_is_the_same_where_gradients_would_be_summed_by_hand(preset, choice):
    made = state("groups", preset, (4, 2), **choice)
    assert generate(made, PROMPTS, LENGTH, KEY, temperature=0) == likeliest("groups")


def test_a_sequence_that_is_split_cannot_be_continued():
    with pytest.raises(ValueError, match="make this model with Sharding.tensor_parallel()"):
        generate(state("plain", "sequence_parallel", (4, 2)), PROMPTS, 1, KEY)


def test_a_key_is_a_text_on_every_mesh():
    one, other = (generate(each, PROMPTS, LENGTH, KEY, top_p=0.9)
                  for each in (state("groups"), state("groups", "data_parallel", (8, 1))))
    assert one == other != likeliest("groups")


@pytest.mark.parametrize("name, split", [("groups", True), ("latent", False)])
def test_keys_and_values_are_split_over_heads_and_a_latent_over_nothing_but_rows(name, split):
    program, params = state(name, "tensor_parallel", (4, 2)).program, state(
        name, "tensor_parallel", (4, 2)).params
    placed = program.place({"tokens": np.zeros((8, W), np.int32), "first": np.zeros(8, np.int32)})
    with jax.set_mesh(program.mesh):
        cache, _ = prefill(program, params, **placed, column=W)
    for leaf in jax.tree.leaves(cache):
        held = leaf.addressable_shards[0].data.size
        assert leaf.size == held * (8 if split else 4)
