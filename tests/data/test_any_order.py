"""Orders of images, token rows and shards: each a permutation, no two alike, resumed anywhere.

Sizes, batches and numbers of processes are odd ones, too. Every record is known by its number.
"""
import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from meshbook.data import images, shards, tokens
from meshbook.data.augmentation import augment
from meshbook.data.order import epoch_order
from meshbook.data.vocabulary import Identity
from meshbook.training.loop import value_and_gradients
from meshbook.training.state import TrainState, abstract_state

SEEDS = st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=3, unique=True)
END, T = 0, 3


def numbered_images(count, _):
    """Images of one pixel, each of which is its own number."""
    numbers = np.arange(count)
    pixels = (numbers[:, None] >> [0, 8, 16]).astype(np.uint8)
    return images.Images(pixels[:, None, None], numbers.astype(np.int32))


def numbered_tokens(count, over):
    """A stream of so many rows of T tokens, and some over; a token is its own number."""
    ids = np.arange(count * T + 1 + over % T)
    return tokens.Tokens(ids, np.array([0]), Identity("none", 1 << 17, ""), "")


@dataclasses.dataclass(frozen=True, eq=False)
class Numbered(shards.Split):
    """Shards whose tokens are counted on from one to the next."""

    def open(self, number):
        first = sum(each["tokens"] for each in self.shards[:number])
        ids = np.arange(first, first + self.shards[number]["tokens"])
        return tokens.Tokens(ids, np.array([]), self.vocabulary, "")


def numbered_shards(count, over):
    """Shards of so many rows together, of unequal sizes: some have no row at all."""
    draw = np.random.default_rng(over)
    cuts = np.sort(draw.integers(0, count + 1, 4 + over % 5))
    sizes = np.diff([0, *cuts, count]) * T + 1 + draw.integers(0, T, len(cuts) + 1)
    entries = tuple({"tokens": int(each), "ends": 0, "name": "", "sha256": ""} for each in sizes)
    return Numbered(None, entries, Identity("none", 1 << 17, ""), END, "")


def numbers_of(batch):
    """The number of each record of a batch, which its labels bear out."""
    inputs, labels = batch["inputs"], batch["labels"]
    if inputs.ndim == 2:
        assert np.array_equal(labels, inputs + 1)
        assert np.array_equal(inputs - inputs[:, :1], np.tile(np.arange(T), (len(inputs), 1)))
        return inputs[:, 0].tolist()
    assert np.array_equal(inputs[:, 0, 0].astype(int) @ [1, 1 << 8, 1 << 16], labels)
    return labels.tolist()


def rows_of(kind, data):
    """The numbers of all records."""
    if kind == "images":
        return list(range(len(data)))
    sizes = ([len(data.ids)] if kind == "tokens" else [each["tokens"] for each in data.shards])
    starts = itertools.accumulate(sizes, initial=0)
    return [first + at for first, size in zip(starts, sizes) for at in range(0, size - T, T)]


KINDS = {
    "images": (numbered_images, images.batches),
    "tokens": (numbered_tokens, lambda data, B, seed, **more: tokens.batches(
        data, B, T, seed, **more)),
    "shards": (numbered_shards, lambda data, B, seed, **more: shards.batches(
        data, B, T, seed, **more)),
    "one shard at a time": (numbered_shards, lambda data, B, seed, **more: shards.batches(
        data, B, T, seed, window=1, **more))}


@pytest.mark.parametrize("kind", KINDS)
@examples(20)
@given(st.integers(30, 90), st.integers(0, 99), st.integers(1, 7), SEEDS)
def test_any_two_epochs_of_any_seeds_are_different_orders_of_all_records(
        kind, count, over, B, seeds):
    make, batches = KINDS[kind]
    data = make(count, over)
    rows, found = rows_of(kind, data), []
    for seed in seeds:
        stream = batches(data, B, seed, epochs=3)
        numbers = [number for batch in stream for number in numbers_of(batch)]
        left = len(rows) % B if kind == "images" else 0  # images left over are dropped
        size = len(rows) - left
        assert len(numbers) == 3 * size // B * B
        epochs = [numbers[at:at + size] for at in range(0, len(numbers), size)]
        full = [each for each in epochs if len(each) == size]
        for each in epochs:
            assert len(set(each)) == len(each) and set(each) <= set(rows)
        assert left or all(sorted(each) == rows for each in full)
        found += full
    assert len(found) >= 2 * len(seeds)
    assert all(one != other for one, other in itertools.combinations([*found, rows], 2))


@examples(20)
@given(st.integers(2, 4), st.integers(20, 40), st.integers(1, 4), SEEDS)
def test_any_two_windows_of_any_epochs_and_seeds_mix_their_rows_in_different_orders(
        windows, R, window, seeds):
    """Shards of R rows each; places in a window, whichever shards it has."""
    entries = tuple({"tokens": R * T + 1, "ends": 0} for _ in range(windows * window))
    split, found = Numbered(None, entries, Identity("none", 1 << 17, ""), END, ""), []
    for seed in seeds:
        stream = shards.batches(split, R * window, T, seed, epochs=2, window=window)
        for at, batch in enumerate(stream):
            mine = sorted(numbers := numbers_of(batch))
            found.append([mine.index(number) for number in numbers])
            touched = {number // (R * T + 1) for number in mine}
            assert len(touched) == window and len(set(mine)) == R * window
        assert at == 2 * windows - 1
    assert all(sorted(each) == list(range(R * window)) for each in found)
    assert all(one != other for one, other in itertools.combinations(found, 2))


@examples(30)
@given(st.integers(12, 60), SEEDS, st.integers(2, 5))
def test_an_order_is_a_permutation_that_seed_and_epoch_decide(length, seeds, epochs):
    orders = {(seed, epoch): epoch_order(length, seed, epoch).tolist()
              for seed in seeds for epoch in range(epochs)}
    assert all(sorted(each) == list(range(length)) for each in orders.values())
    assert len({tuple(each) for each in orders.values()}) == len(orders)
    epoch_order.cache_clear()
    (seed, epoch), order = orders.popitem()
    assert epoch_order(length, seed, epoch).tolist() == order


@pytest.mark.parametrize("kind", KINDS)
@examples(15)
@given(st.integers(20, 60), st.integers(0, 99), st.sampled_from([(1, 6), (2, 4), (3, 6), (6, 2)]),
       st.integers(1, 3), st.integers(0, 2**32 - 1), st.integers(0, 40), st.booleans())
def test_a_position_continues_exactly_on_any_other_number_of_processes(
        kind, count, over, processes, of_each, seed, done, is_new):
    """What all processes have together, before and after, is what one process has."""
    make, batches = KINDS[kind]
    data, (before, after) = make(count, over), processes
    B = of_each * math.lcm(before, after)
    on = lambda ways: [batches(data, B, seed, process_index=at, process_count=ways)
                       for at in range(ways)]
    joined = lambda streams: np.concatenate([numbers_of(next(each)) for each in streams]).tolist()
    (whole,), old, new = on(1), on(before), on(after)
    done = done % (2 * count // B + 2)
    assert all(joined([whole]) == joined(old) for _ in range(done))
    states = [each.get_state() for each in old]
    assert all(each == states[0] for each in states)
    expected = [joined([whole]) for _ in range(count // B + 2)]
    for each in new:
        for _ in range(0 if is_new else 2):  # a stream that has gone elsewhere before
            next(each)
        each.set_state(states[0])
    assert [joined(new) for _ in expected] == expected == [joined(old) for _ in expected]


@pytest.mark.parametrize("kind", ["images", "tokens"])
@examples(40)
@given(st.integers(1, 40), st.integers(0, 2), st.integers(1, 7), st.integers(1, 4))
def test_evaluation_counts_each_record_once_for_any_length_batch_and_processes(
        kind, count, over, of_each, processes):
    make = {"images": lambda data, *more: images.evaluation_batches(data, *more),
            "tokens": lambda data, B, *more: tokens.evaluation_batches(
                data, B, T, False, *more)}[kind]
    data, B = KINDS[kind][0](count, over), of_each * processes
    shares = [list(make(data, B, at, processes)) for at in range(processes)]
    assert {len(share) for share in shares} == {-(-count // B)}
    seen = []
    for parts in zip(*shares, strict=True):
        for part in parts:
            numbers, weight = numbers_of(part), part["weight"]
            assert weight.dtype == np.float32 and len(numbers) == len(weight) == of_each
            weight = weight if kind == "images" else weight[:, 0]
            assert kind == "images" or np.array_equal(part["weight"], np.tile(weight, (T, 1)).T)
            seen += [(number, each) for number, each in zip(numbers, weight.tolist())]
    assert [number for number, each in seen if each] == rows_of(kind, data)
    assert all(each in (0, 1) for _, each in seen)
    assert all(each == 1 for _, each in seen[:count]) and len(seen) == -(-count // B) * B


@functools.cache
def program():
    """That of a model without parameters, whose loss says which key it is given."""
    made = abstract_state(nnx.Module, optax.identity()).program
    return dataclasses.replace(made, loss=lambda params, program, batch, key: (0.0, key))


def key_of_a_step(seed, number):
    """The key that the loss of a training step is given."""
    state = TrainState(jnp.int32(number), {}, {}, program())
    return value_and_gradients(state, {}, jax.random.key(seed))[0][1]


@jax.jit
def cropped(pixels, key):
    return augment(pixels, key, True, (0.05, 0.5), (0.5, 2.0))


@examples(8)
@given(st.lists(st.integers(0, 2**31 - 1), min_size=2, max_size=3, unique=True),
       st.integers(2, 6), st.sampled_from([2, 5]))
def test_augmentation_of_any_seed_and_step_is_another_for_every_image(seeds, steps, B):
    """Seed and number of a step decide: no two images of any two steps are cropped alike."""
    pixels = np.random.default_rng(0).integers(0, 256, (1, 64, 64, 3)).astype(np.uint8)
    crop = lambda key: cropped(np.repeat(pixels, B, 0), key)
    places = list(itertools.product(seeds, range(steps)))
    found = np.concatenate([crop(key_of_a_step(*place)) for place in places])
    assert len({image.tobytes() for image in found}) == len(found) == len(places) * B
    np.testing.assert_array_equal(crop(key_of_a_step(*places[-1])), found[-B:])
