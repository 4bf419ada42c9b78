"""Writing: the same with a cache and without, alone and among others, on every mesh; by chance."""
import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from meshes import on_one_device
from tiny_gpt import CONFIG, tiny_state

from meshbook.models import MiniGPT, MiniGPTConfig, as_text, generate, stream
from meshbook.models.generation import draw, least_likely, window_start
from meshbook.sharding import Sharding, make_mesh

KEY, LENGTH, W = jax.random.key(3), 40, CONFIG.tokens
PROMPTS = [[1, 2, 3], [4], [*range(30, 41)], [*range(100, 130)], [7] * 16]


@functools.cache
def state(row="none", shape=(1, 1)):
    """A tiny model that is sure of something: its head is larger than at the start."""
    tiny = tiny_state(row, shape)
    louder = tiny.params["w_head_DV"] * 3
    return dataclasses.replace(tiny, params=tiny.params | {"w_head_DV": louder})


@functools.cache
def written(**choice):
    return generate(state(), PROMPTS, LENGTH, KEY, **choice)


@functools.cache
def forward():
    return jax.jit(state().program.apply)


drawn = jax.jit(draw, static_argnums=(4, 5))


def uncached(row, prompt, temperature=1.0, top_k=None, top_p=None):
    """The same text with a whole forward pass of the window for each token."""
    text = list(prompt)
    for number in range(LENGTH):
        seen = text[window_start(len(text), W):]
        tokens = np.int32([seen + [0] * (W - len(seen))])
        logits_1V = forward()(state().params, tokens)[:, len(seen) - 1]
        chances = jax.random.uniform(jax.random.fold_in(KEY, number), (len(PROMPTS),))
        choice = temperature, 1.0 if top_p is None else top_p, top_k, top_p is not None
        text.append(int(drawn(logits_1V, chances[row:row + 1], *choice)[0]))
    return text[len(prompt):]


@on_one_device
@pytest.mark.parametrize("choice", [
    dict(temperature=0), dict(), dict(temperature=0.7, top_k=5), dict(top_p=0.6)])
def test_cached_equals_uncached_token_for_token(choice):
    for row, prompt in enumerate(PROMPTS):
        assert written(**choice)[row] == uncached(row, prompt, **choice)


def test_a_row_does_not_know_of_the_others():
    assert generate(state(), PROMPTS[:1], LENGTH, KEY)[0] == written()[0]


def test_a_key_is_a_text():
    assert generate(state(), PROMPTS, LENGTH, KEY) == written()
    assert generate(state(), PROMPTS, LENGTH, jax.random.key(4)) != written()
    greedy = generate(state(), PROMPTS, LENGTH, jax.random.key(4), temperature=0)
    assert greedy == written(temperature=0) == written(top_k=1)


@pytest.mark.parametrize("row, shape", [
    ("tensor_parallel", (4, 2)), ("tensor_parallel", (2, 4)), ("data_parallel", (8, 1)),
    ("fully_sharded", (4, 2)),
])
def test_the_same_key_is_the_same_text_on_every_mesh(row, shape):
    assert generate(state(row, shape), PROMPTS, LENGTH, KEY) == written()
    assert generate(state(row, shape), PROMPTS, 9, KEY, top_k=5) == [
        text[:9] for text in written(top_k=5)]


def test_a_text_comes_in_pieces():
    pieces = list(stream(state(), PROMPTS, LENGTH, KEY, piece=7))
    assert [sum((piece[row] for piece in pieces), []) for row in range(5)] == written()
    short = stream(state(), PROMPTS[:2], 14, KEY, piece=5)
    assert [list(map(len, piece)) for piece in short] == [[5, 5], [5, 5], [4, 4]]
    first = next(stream(state(), PROMPTS, LENGTH, KEY))
    assert first == [text[:1] for text in written()]


def test_a_row_ends_before_its_stop_token():
    stop = written()[0][5]
    ended = generate(state(), PROMPTS, LENGTH, KEY, stop=stop)
    cut = [text[:text.index(stop)] if stop in text else text for text in written()]
    assert ended == cut and len(ended[0]) <= 5 and max(map(len, ended)) > 5


def test_nothing_more_is_computed_when_every_row_has_ended():
    stop = written()[0][0]
    assert generate(state(), PROMPTS[:1], 10**9, KEY, stop=stop) == [[]]


def test_the_window_slides_by_half_and_never_freezes():
    starts = [window_start(length, 16) for length in range(1, 50)]
    assert starts[:16] == [0] * 16 and starts[16:24] == [8] * 8 and starts[24] == 16
    assert all(0 < n - start <= 16 for n, start in enumerate(starts, 1))
    assert window_start(2, 1) == 1
    late = [text[-16:] for text in written()]
    assert all(len(set(text)) > 3 for text in late)
    begun = [prompt + text[:25] for prompt, text in zip(PROMPTS, written(temperature=0))]
    rest = generate(state(), begun, LENGTH - 25, KEY, temperature=0)
    assert rest == [text[25:] for text in written(temperature=0)]


def test_samples_follow_the_distribution():
    logits = np.random.default_rng(0).normal(size=20).astype(np.float32) * 1.5
    for temperature, top_k, top_p in (1, None, None), (0.5, None, None), (1, 6, None), (1, None, .7):
        p = np.exp(logits / temperature - (logits / temperature).max()).astype(np.float64)
        p, order = p / p.sum(), np.argsort(-logits)
        if top_k:
            p[order[top_k:]] = 0
        if top_p:
            before = np.cumsum(p[order]) - p[order]
            p[order[before >= top_p]] = 0
        assert chi_square(counts(logits, temperature, top_k, top_p), p / p.sum())
    skewed = np.exp(logits) / np.exp(logits).sum() * (1 + 0.05 * np.sign(np.arange(20) - 9.5))
    assert not chi_square(counts(logits, 1, None, None), skewed / skewed.sum())


@pytest.mark.parametrize("top_p", (1e-6, 0.3, 0.9, 0.999, 1.0))
def test_the_fewest_tokens_that_have_a_chance_together_are_those_that_sorting_finds(top_p):
    p_BV = jax.nn.softmax(3 * jax.random.normal(jax.random.key(2), (8, 1000)))
    kept_BV = np.asarray(p_BV >= least_likely(p_BV, top_p))
    for p_V, kept_V in zip(np.asarray(p_BV, np.float64), kept_BV):
        down_V = np.sort(p_V)[::-1]
        needed = 1 + np.searchsorted(np.cumsum(down_V), top_p - 1e-6)
        assert needed <= kept_V.sum() <= 1 + np.searchsorted(np.cumsum(down_V), top_p + 1e-6)
        assert p_V[kept_V].min() == down_V[kept_V.sum() - 1]


def counts(logits, temperature, top_k, top_p, n=100_000):
    """How often each token is drawn in n rows."""
    rows = jnp.broadcast_to(logits, (n, len(logits)))
    chances = jax.random.uniform(jax.random.key(11), (n,))
    drawn = draw(rows, chances, temperature, top_p or 1.0, top_k, top_p is not None)
    return np.bincount(drawn, minlength=len(logits))


def chi_square(found, p):
    """Whether counts fit chances, at one in a thousand; nothing is drawn that has none."""
    if found[p == 0].any():
        return False
    found, wanted = found[p > 0], p[p > 0] * found.sum()
    freedom = len(found) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3
    return ((found - wanted) ** 2 / wanted).sum() < limit  # Wilson and Hilferty 1931


def test_chances_at_the_ends_draw_tokens_that_exist():
    logits = jnp.float32([[-1e30, 0, 1, -1e30, 2, -1e30]] * 3)
    chances = jnp.float32([0, 0.5, np.nextafter(np.float32(1), np.float32(0))])
    drawn = draw(logits, chances, 1.0, 1.0).tolist()
    assert drawn[0] == 1 and drawn[2] == 4
    assert draw(logits, chances, 1.0, 1.0, 6).tolist()[0] == 4  # likeliest first


def test_only_tokens_of_the_vocabulary_are_written():
    used = collections.Counter(token for text in written(temperature=50.0) for token in text)
    assert max(used) < CONFIG.vocabulary and len(used) > 50


def test_a_character_is_held_back_until_all_its_bytes_are_there():
    class Bytes:
        def decode_bytes(self, tokens):
            return bytes(tokens)

    e = "é".encode()
    pieces = [[[97]], [[e[0]]], [[e[1], 98]], [[e[0]]]]
    assert list(as_text(pieces, Bytes())) == ["a", "", "éb", "", "\ufffd"]


@pytest.mark.parametrize("change, words", [
    (dict(prompts=[]), "prompts is empty"),
    (dict(prompts=[[1], []]), "prompt 1 is empty; it needs at least one token"),
    (dict(prompts=[[1], [2, 250]]), "prompt 1 has token 250; the vocabulary goes from 0 to 249"),
    (dict(prompts=[[-1]]), "prompt 0 has token -1"),
    (dict(length=-1), "length is a number from 0; found -1"),
    (dict(temperature=-0.5), "temperature is a number from 0; found -0.5"),
    (dict(temperature=float("nan")), "temperature is a number from 0; found nan"),
    (dict(top_k=0), "top_k is from 1 to 250, or None; found 0"),
    (dict(top_k=251), "top_k is from 1 to 250, or None; found 251"),
    (dict(top_p=0.0), "top_p is above 0 and at most 1, or None; found 0.0"),
    (dict(piece=0), "piece is a number from 1; found 0"),
])
def test_wishes_that_cannot_be_met(change, words):
    wish = dict(prompts=[[1]], length=1, key=KEY) | change
    with pytest.raises(ValueError, match=words):
        list(stream(state(), **wish))


def test_no_length_is_no_text():
    assert generate(state(), PROMPTS, 0, KEY) == [[]] * 5


@pytest.mark.parametrize("cut", [1, 3])
def test_tokens_read_in_two_pieces_are_those_read_at_once(cut):
    config = MiniGPTConfig(50, tokens=8, embed=16, hidden=32, heads=4, layers=2)
    tokens_BT = np.arange(12).reshape(2, 6) % 50
    first_B = jnp.zeros(2, jnp.int32)
    with jax.set_mesh(make_mesh((1, 1))):
        model = MiniGPT(config, Sharding.none(), rngs=nnx.Rngs(0))
        empty = model.empty_cache(2)
        whole, cache = model.extend(tokens_BT, empty, 0, first_B)
        one, half = model.extend(tokens_BT[:, :cut], empty, 0, first_B)
        two, full = model.extend(tokens_BT[:, cut:], half, cut, first_B)
        plain = model.hidden(tokens_BT)
    np.testing.assert_allclose(np.concatenate([one, two], 1), whole, atol=1e-5)
    np.testing.assert_allclose(whole, plain, atol=1e-5)
    for ours, theirs in zip(*map(jax.tree.leaves, (full, cache))):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
        assert not np.asarray(ours)[:, :, 6:].any()  # columns that nothing stands in
