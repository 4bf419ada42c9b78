"""Batches from shards: each row once an epoch, the same for any processes, resumed midway."""
import itertools
import shutil
import time

import jax
import numpy as np
import pytest
from corpora import ENCODING, clear_memory, failing, small_plan, write_inputs
from saved_runs import at
from soak import make_state

from meshbook.data import buckets, shards, tokens
from meshbook.data.buckets import Place, sealed, unsealed
from meshbook.data.corpus import build_corpus
from meshbook.data.shards import Split, batches, read_corpus
from meshbook.data.token_files import shard_bytes
from meshbook.saving.checkpoints import Checkpoints
from meshbook.saving.identities import OtherRun

B, T = 6, 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    inputs = write_inputs(tmp_path_factory.mktemp("inputs"))
    folder = tmp_path_factory.mktemp("corpus") / "x"
    build_corpus(small_plan(inputs), folder, ENCODING)
    return folder


@pytest.fixture
def split(folder):
    return read_corpus(folder).train


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def all_rows(split):
    """The rows of every shard, cut by hand."""
    found = [split.open(n).ids for n in range(len(split.shards))]
    return [ids[at:at + T + 1].tolist() for ids in found for at in range(0, len(ids) - T, T)]


def rows_of(batch):
    return np.concatenate([batch["inputs"], batch["labels"][:, -1:]], axis=1).tolist()


@pytest.mark.parametrize("window", [1, 3, 1000])
def test_every_row_comes_exactly_once_an_epoch(split, window):
    rows, expected = [], sorted(all_rows(split))
    for batch in batches(split, 1, T, 5, epochs=3, window=window):
        rows += rows_of(batch)
    assert len(rows) == 3 * len(expected)
    epochs = [rows[at:at + len(expected)] for at in range(0, len(rows), len(expected))]
    assert all(sorted(epoch) == expected for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != all_rows(split)


def test_batches_of_any_size_are_the_same_rows(split):
    """An epoch, and a window, may end within a batch."""
    joined = lambda size: [row for batch in batches(split, size, T, 3, epochs=3, window=2)
                           for row in rows_of(batch)]
    whole = joined(1)
    assert len(whole) % 7 and len(whole) // 3 % 7
    assert joined(7) == whole[:len(whole) // 7 * 7]
    large = len(whole) // 3 - 1
    assert joined(large) == whole[:len(whole) // large * large]


def test_a_window_mixes_its_shards_and_no_others(split):
    def of_one(n):
        return Split(split.place, split.shards[n:n + 1], split.vocabulary, split.end, "")

    home = {}  # a row of some common sentences may be in two shards
    for n in range(len(split.shards)):
        for row in all_rows(of_one(n)):
            home.setdefault(tuple(row), set()).add(n)
    stream = batches(split, 1, T, 0, epochs=1, window=3)
    seen = [home[tuple(rows_of(batch)[0])] for batch in stream]
    windows = shards.Rows(split, T, 0, 3).windows(0)
    assert sorted(sum(windows, [])) == list(range(len(split.shards)))
    for window in windows:
        size = sum((split.shards[n]["tokens"] - 1) // T for n in window)
        now, seen = seen[:size], seen[size:]
        assert all(each & set(window) for each in now)
        if min(split.shards[n]["tokens"] for n in window) == 3000:  # its first half has each
            assert set(window) <= set().union(*now[:size // 2])
    assert not seen and len(windows) > 3 and sum(windows, []) != list(range(len(split.shards)))


@pytest.mark.parametrize("documents", [False, True])
def test_resumed_in_the_middle_bit_for_bit(split, folder, documents):
    make = lambda: batches(read_corpus(folder).train, B, T, 1, documents=documents, window=2)
    uninterrupted, rows = make(), len(all_rows(split))
    for _ in range(rows // B + 5):  # into the second epoch
        next(uninterrupted)
    state, resumed = uninterrupted.get_state(), make()
    assert len(str(state)) < 100
    resumed.set_state(state)
    assert all(same(next(uninterrupted), next(resumed)) for _ in range(rows // B))
    assert make().identity == uninterrupted.identity


def test_the_same_global_batch_for_1_2_and_3_processes(split):
    one = lambda index, count: itertools.islice(
        batches(split, B, T, 1, documents=True, window=2, process_index=index,
                process_count=count), 90)
    whole = list(one(0, 1))
    for count in (1, 2, 3):
        for batch, *parts in zip(whole, *(one(i, count) for i in range(count)), strict=True):
            joined = {name: np.concatenate([part[name] for part in parts]) for name in batch}
            assert same(batch, joined)


def test_seed_and_window_decide_and_are_in_the_identity(split):
    first = lambda **how: next(batches(split, B, T, **{"seed": 0} | how))
    assert same(first(), first()) and not same(first(), first(seed=1))
    assert not same(first(window=1), first(window=3))
    found = [batches(split, B, T, 0, window=window).identity for window in (1, 3)]
    assert found[0] != found[1] and found[0]["sha256"] == split.sha256


def test_batches_are_those_of_token_files(split):
    """The same dict, documents apart by the same function, also where a shard begins within one."""
    mid = [n for n in range(len(split.shards)) if split.open(n).ids[0] != ENCODING.eot_token]
    assert mid
    for batch in itertools.islice(batches(split, B, T, 0, documents=True), 20):
        assert list(batch) == ["inputs", "labels", "segments", "positions"]
        assert {array.dtype for array in batch.values()} == {np.dtype(np.int32)}
        apart = tokens.apart(batch["inputs"], ENCODING.eot_token)
        assert same(batch, {name: batch[name] for name in ("inputs", "labels")} | apart)
        assert np.array_equal(batch["inputs"][:, 1:], batch["labels"][:, :-1])


def test_a_checkpoint_keeps_the_place_and_names_the_corpus(split, folder, tmp_path):
    state, key = at(make_state(mesh=None), 1), jax.random.key(0)
    make = lambda **how: batches(read_corpus(folder).train, B, T, 0, **how)
    stream, resumed = make(), make()
    with Checkpoints(tmp_path) as run:
        run.resume(state, stream, key)
        for _ in range(9):
            next(stream)
        run.save(state, stream.get_state(), key)
    with Checkpoints(tmp_path) as run:
        run.resume(state, resumed, key)
        assert same(next(resumed), next(stream))
    with Checkpoints(tmp_path) as run, pytest.raises(OtherRun, match="window: expected 2, found 4"):
        run.resume(state, make(window=2), key)


@pytest.mark.parametrize("sizes, said", [
    ((0, T), "B=0 rows of T=32 tokens with a window of 4 do not fit"),
    ((10**6, T), "at most [0-9],[0-9]+ rows, those of 1[0-9] shards"),
    ((B, 0), "at most 0 rows"), ((B, 5000), "at most 0 rows")])
def test_sizes_that_do_not_fit(split, sizes, said):
    with pytest.raises(ValueError, match=said):
        batches(split, *sizes, 0)
    with pytest.raises(ValueError, match="its plan holds no documents out"):
        batches(None, B, T, 0)
    with pytest.raises(ValueError, match="with a window of 0 do not fit"):
        batches(split, B, T, 0, window=0)
    with pytest.raises(ValueError, match="expected a multiple of 4"):
        batches(split, B, T, 0, process_index=0, process_count=4)


def test_shards_are_opened_once_and_ahead_and_let_go(split, monkeypatch):
    opened, open_it = [], Split.open
    monkeypatch.setattr(Split, "open", lambda self, n: opened.append(n) or open_it(self, n))
    stream, rows = batches(split, 1, T, 0, window=2), shards.Rows(split, T, 0, 2)
    next(stream)
    order = [n for window in rows.windows(0) for n in window]
    for _ in range(200):
        if len(opened) == 4:
            break
        time.sleep(0.01)
    assert opened == order[:4]
    for _ in range(len(rows)):
        next(stream)
    assert opened[:len(order)] == order and len(opened) <= len(order) + 4


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


@pytest.mark.parametrize("how, said", [
    ("bit", "is damaged: expected SHA-256"), ("short", "is not whole: expected"),
    ("gone", "has no train-.*: expected the shard of 3,000 tokens that its index names"),
    ("swapped", "is another shard: expected SHA-256")])
def test_a_damaged_shard_is_refused_when_its_turn_comes(copy, how, said):
    paths = [copy / f"train-{n:06}.tokens" for n in range(4)]
    for path, other in zip(paths, paths[1:] + paths[:1]):
        content = bytearray(path.read_bytes())
        if how == "bit":
            content[1000] ^= 1
        path.unlink()
        if how != "gone":
            path.write_bytes(content[:-1] if how == "short" else content)
    if how == "swapped":
        paths[0].rename(copy / "aside")
        paths[1].rename(paths[0])
        (copy / "aside").rename(paths[1])
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        for _ in batches(read_corpus(copy).train, B, T, 0, epochs=1):
            pass


def test_an_index_that_is_missing_or_changed(copy):
    place = Place(copy)
    index = unsealed("x", bytes(place.read("index.json")), "meshbook corpus 1")
    content = bytearray(place.read("index.json"))
    content[len(content) // 2] ^= 1
    place.write("index.json", bytes(content))
    with pytest.raises(ValueError, match="index.json is damaged, or of another kind"):
        read_corpus(copy)
    del index["sha256"]
    index["identity"]["size"] = 5
    place.write("index.json", sealed(index))
    with pytest.raises(ValueError, match="index.json has another vocabulary than its shards"):
        read_corpus(copy)
    (copy / "index.json").unlink()
    with pytest.raises(FileNotFoundError, match="has no index.json: expected a corpus"):
        read_corpus(copy)


def test_from_a_bucket_that_fails_the_same_batches_come(folder, monkeypatch):
    monkeypatch.setattr(buckets, "WAIT", 0)
    clear_memory()
    for path in folder.iterdir():
        Place("memory://b/x").write(path.name, path.read_bytes())
    local = batches(read_corpus(folder).train, B, T, 0, window=2, epochs=2)
    with failing(seed=3, share=0.2) as failures:
        remote = batches(read_corpus("memory://b/x").train, B, T, 0, window=2, epochs=2)
        assert all(same(*pair) for pair in zip(local, remote, strict=True))
    assert len(failures) > 3
    with failing(seed=3, share=1.0), pytest.raises(OSError, match="could not be read: 4 attempts"):
        read_corpus("memory://b/x")


def test_the_bytes_of_a_shard_are_known_before(folder, split):
    for entry in split.shards:
        assert (folder / entry["name"]).stat().st_size == shard_bytes(
            entry["tokens"], entry["ends"], read_corpus(folder).encoding.n_vocab)
    wide, narrow = (shard_bytes(1_000, 7, 2 ** 16 + more) for more in (1, 0))
    assert wide - narrow == 2_000
