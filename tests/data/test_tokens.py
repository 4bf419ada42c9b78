"""Token files and their batches: nothing lost, nothing twice, nothing damaged goes unnoticed."""
import errno
import itertools
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from meshbook.data import grammar, token_files, tokens, vocabulary
from meshbook.data.vocabulary import END

TEXTS = list(grammar.stories(0, 300))
ENCODING = vocabulary.learn(TEXTS, 400)
EOT = ENCODING.eot_token


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    where = tmp_path_factory.mktemp("tokens") / "stories.tokens"
    tokens.write_tokens(TEXTS, ENCODING, where)
    return where


@pytest.fixture(scope="module")
def stream(path):
    return tokens.read_tokens(path, ENCODING)


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


# Files

def test_every_document_comes_back(stream):
    assert len(stream) == len(TEXTS)
    for text, start, stop in zip(
            TEXTS, stream.starts[:-1], stream.starts[1:], strict=True):
        assert ENCODING.decode(stream.ids[start:stop].tolist()) == END + text
    assert stream.ids[-1] == EOT and stream.starts[-1] == len(stream.ids) - 1


def test_a_file_is_a_memory_map_of_16_bits(stream):
    assert isinstance(stream.ids, np.memmap) and stream.ids.dtype == np.uint16
    assert not stream.ids.flags.writeable
    assert stream.vocabulary == vocabulary.identity(ENCODING)


@given(st.lists(st.text(), min_size=1).filter(lambda texts: not any(END in t for t in texts)))
@examples(50)
def test_any_documents_come_back(tmp_path_factory, texts):
    where = tmp_path_factory.mktemp("any") / "any.tokens"
    tokens.write_tokens(texts, ENCODING, where)
    read = tokens.read_tokens(where, ENCODING)
    found = [ENCODING.decode(read.ids[a + 1:b].tolist())
             for a, b in zip(read.starts, read.starts[1:])]
    assert found == texts


def test_the_same_bytes_from_any_number_of_workers_and_any_parts(tmp_path, path, monkeypatch):
    monkeypatch.setattr(token_files, "PART", 10_000)
    for workers in (1, 2):
        tokens.write_tokens(iter(TEXTS), ENCODING, tmp_path / "again", workers=workers)
        assert (tmp_path / "again").read_bytes() == path.read_bytes()


def test_documents_are_read_as_they_are_needed(tmp_path, monkeypatch):
    """Whatever the number of documents, only some of them are in memory."""
    monkeypatch.setattr(token_files, "PART", 10_000)
    alive = {"now": 0, "most": 0}

    class Text(str):
        def __del__(self):
            alive["now"] -= 1

    def documents():
        for text in itertools.chain(*[TEXTS] * 5):
            alive["now"] += 1
            alive["most"] = max(alive.values())
            yield Text(text)

    tokens.write_tokens(documents(), ENCODING, tmp_path / "streamed")
    assert alive["most"] < 100


def test_a_document_with_the_separator_in_it_is_refused(tmp_path):
    with pytest.raises(ValueError, match="document 1 contains"):
        tokens.write_tokens(["fine", f"not {END} fine"], ENCODING, tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_no_documents_are_refused(tmp_path):
    with pytest.raises(ValueError, match="expected documents, found none"):
        tokens.write_tokens([], ENCODING, tmp_path / "x")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size, dtype", [(65_535, np.uint16), (65_536, np.uint32)])
def test_a_vocabulary_beyond_16_bits_is_stored_in_32(tmp_path, size, dtype):
    """The last token of a vocabulary is END: with 65,536 others it is number 65,536."""
    ranks = {bytes([i]) if i < 256 else b"%d" % i: i for i in range(size)}
    large = vocabulary.encoding_of("large", ranks)
    tokens.write_tokens(["a", "60000", "65535", "xyz"], large, tmp_path / "x")
    read = tokens.read_tokens(tmp_path / "x", large)
    assert read.ids.dtype == dtype and read.ids[0] == size and len(read) == 4
    assert large.decode(read.ids.tolist()) == f"{END}a{END}60000{END}65535{END}xyz{END}"
    packed = token_files.pack(np.asarray(read.ids), size, read.vocabulary)
    assert packed == (tmp_path / "x").read_bytes()


def test_another_vocabulary_is_refused(path):
    with pytest.raises(ValueError, match="another vocabulary: expected 'learned' of 300 tokens"):
        tokens.read_tokens(path, vocabulary.learn(TEXTS, 300))


def test_any_flipped_bit_is_noticed(tmp_path, path):
    content, where = path.read_bytes(), tmp_path / "flipped"
    places = np.random.default_rng(0).integers(len(content), size=200).tolist()
    for place in [*range(token_files.HEADER), *places, len(content) - 1]:
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        where.write_bytes(flipped)
        with pytest.raises(ValueError, match="flipped"):  # the message names the file
            tokens.read_tokens(where, ENCODING)


def test_every_truncation_is_noticed(tmp_path, path):
    content, where = path.read_bytes(), tmp_path / "cut"
    for size in [0, 1, 100, 511, 512, 513, 5000, len(content) // 2, len(content) - 1]:
        where.write_bytes(content[:size])
        with pytest.raises(ValueError, match="not whole|not a token file"):
            tokens.read_tokens(where, ENCODING)
    where.write_bytes(content + b"\0")
    with pytest.raises(ValueError, match="is not whole: expected .* bytes, found"):
        tokens.read_tokens(where, ENCODING)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]\n" * 200, b"\x93NUMPY" * 300, b"\0" * 9999])
def test_a_foreign_file_is_refused(tmp_path, content):
    (tmp_path / "foreign").write_bytes(content)
    with pytest.raises(ValueError, match="not a token file of this book"):
        tokens.read_tokens(tmp_path / "foreign", ENCODING)


def test_a_missing_file_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError):
        tokens.read_tokens(tmp_path / "none", ENCODING)


def test_a_full_disk_leaves_nothing_and_the_earlier_file_as_it_was(tmp_path, path, monkeypatch):
    where = tmp_path / "kept"
    where.write_bytes(path.read_bytes())

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="the disk is full: .* nothing half-written was kept"):
        tokens.write_tokens(TEXTS[:10], ENCODING, where)
    assert [each.name for each in tmp_path.iterdir()] == ["kept"]
    assert where.read_bytes() == path.read_bytes()


def test_an_error_in_the_documents_leaves_nothing(tmp_path):
    def documents():
        yield "one"
        raise RuntimeError("the source broke")

    for workers in (1, 2):
        with pytest.raises(RuntimeError, match="the source broke"):
            tokens.write_tokens(documents(), ENCODING, tmp_path / "x", workers=workers)
    assert not list(tmp_path.iterdir())


# Batches

B, T = 8, 48


def test_every_token_is_a_target_exactly_once_an_epoch(stream):
    numbered = np.arange(len(stream.ids), dtype=np.uint16)  # each token is its own place
    marked = tokens.Tokens(numbered, stream.starts, stream.vocabulary, "")
    rows = (len(numbered) - 1) // T
    left = (len(numbered) - 1) % T
    made = tokens.batches(marked, 1, T, 5, epochs=2)
    labels = np.concatenate([batch["labels"] for batch in made])
    for epoch in np.split(labels, 2):
        assert sorted(epoch.ravel()) == list(range(1, rows * T + 1))
    assert left < T and not np.array_equal(*np.split(labels, 2))


def test_labels_are_the_inputs_one_later(stream):
    for batch in itertools.islice(tokens.batches(stream, B, T, 0), 20):
        assert batch["inputs"].shape == batch["labels"].shape == (B, T)
        assert batch["inputs"].dtype == batch["labels"].dtype == np.int32
        assert np.array_equal(batch["inputs"][:, 1:], batch["labels"][:, :-1])


def test_an_epoch_may_end_within_a_batch(stream):
    """Three epochs in batches are the rows of three permutations, one after the other."""
    rows = len(tokens.cut(stream.ids, T))
    assert rows % B
    joined = lambda size: np.concatenate(
        [batch["inputs"] for batch in tokens.batches(stream, size, T, 3, epochs=3)])
    whole = joined(1)
    assert len(whole) == 3 * rows
    assert np.array_equal(joined(B), whole[:3 * rows // B * B])


def test_batches_depend_on_the_seed_and_the_number_alone(stream):
    one, two, other = (tokens.batches(stream, B, T, seed) for seed in (1, 1, 2))
    for _ in range(30):
        batch = next(one)
        assert same(batch, next(two)) and not same(batch, next(other))


@pytest.mark.parametrize("documents", [False, True])
def test_a_resumed_iterator_goes_on(stream, documents):
    make = lambda: tokens.batches(stream, B, T, 1, documents=documents)
    uninterrupted = make()
    for _ in range(70):
        next(uninterrupted)
    state = uninterrupted.get_state()
    assert len(str(state)) < 100
    resumed = make()
    resumed.set_state(state)
    assert all(same(next(uninterrupted), next(resumed)) for _ in range(30))


@pytest.mark.parametrize("make", [tokens.batches, tokens.evaluation_batches])
def test_the_same_global_batch_for_1_2_and_4_processes(stream, make):
    seed = (1,) if make is tokens.batches else ()
    one = lambda index, count: make(stream, B, T, *seed, documents=True,
                                    process_index=index, process_count=count)
    whole = list(itertools.islice(one(0, 1), 90))
    for count in (1, 2, 4):
        shares = [itertools.islice(one(index, count), 90) for index in range(count)]
        for batch, *parts in zip(whole, *shares, strict=True):
            joined = {name: np.concatenate([part[name] for part in parts]) for name in batch}
            assert same(batch, joined)


def test_evaluation_sees_every_row_once(stream):
    rows = tokens.cut(stream.ids, T)
    found = list(tokens.evaluation_batches(stream, B, T))
    weight = np.concatenate([batch["weight"] for batch in found])
    labels = np.concatenate([batch["labels"] for batch in found])[weight == 1].reshape(-1, T)
    assert np.array_equal(labels, rows[:, 1:])
    assert {len(batch["weight"]) for batch in found} == {B} and len(rows) % B


def test_documents_are_kept_apart(stream):
    """Segments and positions against a loop over one token after the other."""
    for batch in itertools.islice(tokens.batches(stream, B, T, 0, documents=True), 10):
        for inputs, segments, positions in zip(
                batch["inputs"], batch["segments"], batch["positions"]):
            segment, position = 1, -1
            for i, token in enumerate(inputs):
                opens = token == EOT and i > 0
                segment, position = segment + opens, 0 if opens else position + 1
                assert (segments[i], positions[i]) == (segment, position)


def test_no_target_crosses_into_another_document(stream):
    """A label is in the document of its input; what a model sees of it begins there too."""
    of_token = np.searchsorted(stream.starts, np.arange(len(stream.ids)), side="right") - 1
    rows, places = tokens.cut(stream.ids, T), tokens.cut(np.arange(len(stream.ids)), T)
    segments_RT = tokens.apart(rows[:, :-1].astype(np.int32), EOT)["segments"]
    target_RT = of_token[places[:, 1:]] - (rows[:, 1:] == EOT)  # END closes the one before
    assert np.array_equal(of_token[places[:, :-1]], target_RT)
    for segments, owner in zip(segments_RT, of_token[places[:, :-1]]):
        assert np.array_equal(segments - segments[0], owner - owner[0])


@pytest.mark.parametrize("sizes, said", [
    ((8, 0), "T=0 tokens do not fit"), ((8, 10**9), "one less than there are tokens"),
    ((0, 48), "B=0 does not fit"), ((10**6, 48), "B=1000000 does not fit: expected 1 to")])
def test_sizes_that_do_not_fit_are_refused(stream, sizes, said):
    with pytest.raises(ValueError, match=said):
        tokens.batches(stream, *sizes, 0)


def test_a_batch_that_does_not_divide_is_refused(stream):
    with pytest.raises(ValueError, match="expected a multiple of 3"):
        tokens.batches(stream, 8, 48, 0, process_index=0, process_count=3)


def test_twenty_million_tokens_a_second(stream):
    """The bar of `make bench`, here with room for a busy machine: on the clock of this process."""
    import time

    loader = tokens.batches(stream, 64, 256, 0)
    next(loader)
    begin = time.process_time()
    for _ in range(50):
        next(loader)
    assert 50 * 64 * 256 / (time.process_time() - begin) > 20e6
