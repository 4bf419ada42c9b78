"""The decoder writes with a cache what whole forward passes write, on every mesh."""
import dataclasses
import functools
import math

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from meshes import on_one_device
from moved import moved

from meshbook.models import generate
from meshbook.models.balanced_loss import loads_of
from meshbook.models.decoder import Decoder, DecoderConfig
from meshbook.models.expert_layers import ExpertSizes
from meshbook.models.generation import prefill, window_start
from meshbook.sharding import Sharding, make_mesh
from meshbook.training import create_state

SMALL = DecoderConfig(vocabulary=250, tokens=16, embed=32, hidden=64, heads=4, layers=2)
CONFIGS = {
    "plain": SMALL,
    "groups": dataclasses.replace(SMALL, groups=2, bias=True),
    "latent": dataclasses.replace(SMALL, latent=8, rotary=8, layers=4, period=2, bias=True),
    "latent without positions": dataclasses.replace(SMALL, latent=8, gated=False),
    "experts": dataclasses.replace(SMALL, experts=ExpertSizes(4, 2, shared=16, capacity=1.0)),
    "latent experts": dataclasses.replace(
        SMALL, latent=8, rotary=8, layers=4, period=2, bias=True,
        experts=ExpertSizes(4, 2, capacity=1.25, router="sigmoid", biased=True)),
    "dropless experts": dataclasses.replace(SMALL, experts=ExpertSizes(4, 2, block=4)),
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
    return by_whole_passes(state(name), PROMPTS, LENGTH)


def by_whole_passes(state, prompts, length, window=W):
    """The likeliest texts, without a cache and with nothing before them in their rows."""
    texts = [list(prompt) for prompt in prompts]
    for _ in range(length):
        seen = [text[window_start(len(text), window):] for text in texts]
        tokens_BT = np.int32([each + [0] * (window - len(each)) for each in seen])
        with jax.set_mesh(state.program.mesh):
            logits_BTV = FORWARD(state.program, state.params, tokens_BT)
        for row, (text, each) in enumerate(zip(texts, seen)):
            text.append(int(logits_BTV[row, len(each) - 1].argmax()))
    return [text[len(prompt):] for text, prompt in zip(texts, prompts)]


FORWARD = jax.jit(lambda program, params, tokens_BT: program.apply(params, tokens_BT),
                  static_argnums=0)


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


AXES, ROWS = ("batch", "expert", "model"), ("batch", "expert")
SIZES = [  # capacities that drop a little and most; both kinds of router; one active expert
    ExpertSizes(8, 2, capacity=1.0), ExpertSizes(4, 3, shared=8, capacity=0.5),
    ExpertSizes(6, 2, capacity=1.25, router="sigmoid"), ExpertSizes(5, 1, capacity=0.7)]


def skewed(sizes, shape=(1, 1, 1)):
    """States of one program: routers that send most tokens to few experts, by seed."""
    rules = Sharding.none()
    if math.prod(shape) > 1:
        rules = Sharding.tensor_parallel().also(E="expert", B=ROWS)
    config = dataclasses.replace(SMALL, experts=sizes)
    made = create_state(lambda: Decoder(config, rules, rngs=nnx.Rngs(0)), optax.identity(),
                        make_mesh(shape, AXES), rows=ROWS)
    for seed in range(3):
        random = np.random.default_rng(seed)

        def noisy(path, x, random=random):
            new = np.asarray(x) + np.float32(0.3 * random.normal(size=x.shape))
            return jax.device_put(4 * new if "router" in path[-1].key else new, x.sharding)

        params = jax.tree_util.tree_map_with_path(noisy, made.params)
        params |= {"token_VD": made.params["token_VD"]}
        prompts = [random.integers(0, 250, size).tolist()
                   for size in random.permutation([1, 2, 5, 9, W - 1, W, W + 1, 3 * W])[:4]]
        yield dataclasses.replace(made, params=params), prompts


def drops(state, tokens):
    """Whether a pass over this text drops anything in the text."""
    row = np.int32([tokens[window_start(len(tokens), W):]])
    batch = {"inputs": row, "labels": row}
    with jax.set_mesh(state.program.mesh):
        found = loads_of(state, batch)
    return bool(found.after_E.sum() < found.before_E.sum())


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{sizes.count}-{sizes.capacity}")
def test_with_a_capacity_a_text_depends_on_nothing_but_itself(sizes):
    """Alone, beside others of any length, with the cache and without it: the same text."""
    dropped = []
    for made, prompts in skewed(sizes):
        expected = by_whole_passes(made, prompts, 2 * W)
        assert generate(made, prompts, 2 * W, KEY, temperature=0) == expected
        alone = [generate(made, [prompt], 2 * W, KEY, temperature=0)[0] for prompt in prompts]
        assert alone == expected
        dropped += [drops(made, [*prompt, *text]) for prompt, text in zip(prompts, expected)]
    assert any(dropped)


@pytest.mark.parametrize("shape", [(1, 4, 1), (2, 2, 2)])
def test_and_it_is_the_same_where_experts_are_split(shape):
    one, split = (list(skewed(SIZES[0], on)) for on in ((1, 1, 1), shape))
    for (made, prompts), (other, _) in zip(one, split, strict=True):
        assert generate(made, prompts, W, KEY, temperature=0) == generate(
            other, prompts, W, KEY, temperature=0)


def test_padding_takes_no_slot_and_a_single_token_needs_one_slot_of_an_expert():
    """Whatever the pads are and choose: the state after them is that of the text alone."""
    (made, _), *_ = skewed(SIZES[0])
    model = made.program.model(made.params)
    text, first = np.arange(1, 6, dtype=np.int32), jax.numpy.array([0, 7])
    rows = np.full((2, 12), 3, np.int32)
    rows[0, :5] = text
    rows[1, 7:] = text
    with jax.set_mesh(made.program.mesh):
        x_BTD, cache = model.extend(rows, model.empty_cache(2), 0, first)
        lone, own = model.extend(text[None], model.empty_cache(1), 0, first[:1])
        np.testing.assert_allclose(x_BTD[1, 7:], lone[0], atol=1e-5)
        (_, chosen), (_, own_chosen) = cache[-1], own[-1]
        np.testing.assert_array_equal(chosen[:, 1, 7:12], own_chosen[:, 0, :5])
        assert (chosen[:, 1, :7] == SIZES[0].count).all()
        step = jax.make_jaxpr(lambda cache: model.extend(rows[:, :1], cache, 12, first))(cache)
    E, D = SIZES[0].count, SMALL.embed
    assert f"f32[{E},2,{D}]" in str(step) or f"f32[{2 * E},{D}]" in str(step)
