"""A corpus: each document exactly once, the same bytes from any workers, after any kill."""
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from corpora import ENCODING, TEXTS, hashes, small_plan, write_inputs
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from meshbook.data import corpus, token_files, vocabulary
from meshbook.data.buckets import Place
from meshbook.data.corpus import build_corpus, split_of
from meshbook.data.corpus_plan import plan
from meshbook.data.corpus_workers import Processes
from meshbook.data.shards import read_corpus
from meshbook.data.vocabulary import END

SHARE = 0.05
OF = {split: [text for text in TEXTS if split_of(text, SHARE) == split]
      for split in ("train", "validation")}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory):
    """A corpus that was made in one go, in one process."""
    folder = tmp_path_factory.mktemp("whole") / "corpus"
    build_corpus(small_plan(inputs), folder, ENCODING)
    return folder


def documents(folder):
    found = read_corpus(folder)
    return {split: list(getattr(found, split).documents(found.encoding))
            for split in ("train", "validation")}


def test_every_document_exactly_once_and_in_order(whole):
    assert documents(whole) == OF
    found = read_corpus(whole)
    assert (len(found.train), len(found.validation)) == tuple(map(len, OF.values()))
    assert len(OF["train"]) + len(OF["validation"]) == len(TEXTS) and len(OF["validation"]) > 5


def test_shards_have_equal_length_and_are_one_stream(whole):
    found = read_corpus(whole)
    for split, texts in OF.items():
        shards = [getattr(found, split).open(n) for n in range(len(getattr(found, split).shards))]
        stream = np.concatenate([each.ids for each in shards])
        expected = ENCODING.encode("".join(END + text for text in texts) + END,
                                   allowed_special={END})
        assert stream.tolist() == expected
        assert {len(each.ids) for each in shards[:-1]} <= {3000} and len(shards[-1].ids) <= 3000
        for each in shards:
            assert each.starts.tolist() == np.flatnonzero(each.ids == ENCODING.eot_token).tolist()
    assert sum(each.ids[0] != ENCODING.eot_token for each in shards) or len(shards) == 1


def test_a_shard_reads_the_pieces_that_have_some_of_its_tokens_and_no_others(
        inputs, tmp_path, monkeypatch):
    made, place, seen, read = small_plan(inputs), Place(tmp_path), [], Place.read
    job = corpus.MakePiece(made, str(tmp_path), ENCODING)
    counts = [job(number)["train"][0] for number in range(len(made.pieces))]
    begins = [0, *itertools.accumulate(counts)]
    monkeypatch.setattr(Place, "read", lambda self, name: seen.append(name) or read(self, name))
    stream = corpus.cut(place, "train", 0, begins[-1] + 1, begins, made)
    assert min(counts) > 2 and len(stream) == begins[-1] + 1 and stream[-1] == made.end
    edges = sorted({edge + more for edge in begins[:4] for more in (-1, 0, 1)} - {-1})
    for begin, end in itertools.combinations(edges, 2):
        seen.clear()
        ids = corpus.cut(place, "train", begin, end, begins, made)
        assert ids.tolist() == stream[begin:end].tolist()
        assert seen == [corpus.piece_name("train", number) for number in range(len(counts))
                        if max(begin, begins[number]) < min(end, begins[number + 1])]


def test_the_index_says_what_is_there_and_pieces_are_gone(whole):
    index = json.loads((whole / "index.json").read_text())
    names = [each["name"] for split in index["splits"].values() for each in split]
    assert {path.name for path in whole.iterdir()} == {*names, "index.json", "plan.json"}
    assert len(index["splits"]["train"]) > 5
    assert str(whole.parent) not in (whole / "plan.json").read_text()


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_same_bytes_from_any_number_of_workers(inputs, whole, tmp_path, count):
    build_corpus(small_plan(inputs), tmp_path / "x", ENCODING, Processes(count))
    assert hashes(tmp_path / "x") == hashes(whole)


@pytest.mark.parametrize("piece_bytes", [700, 10**9])
def test_the_same_shards_from_pieces_of_any_size(inputs, whole, tmp_path, piece_bytes):
    build_corpus(small_plan(inputs, piece_bytes=piece_bytes), tmp_path / "x", ENCODING)
    shards = lambda folder: {name: value for name, value in hashes(folder).items()
                             if name.endswith(".tokens")}
    assert shards(tmp_path / "x") == shards(whole)


@given(st.lists(st.text(max_size=30), min_size=1, max_size=20), st.integers(10, 60),
       st.integers(50, 400))
@examples(20)
def test_any_documents_in_any_shards_come_back(tmp_path_factory, texts, shard_tokens, piece_bytes):
    texts = [text for text in texts if END not in text] or ["x"]
    folder = tmp_path_factory.mktemp("any")
    (folder / "x.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    made = plan([folder / "x.jsonl"], ENCODING, shard_tokens, piece_bytes, held_out=0)
    build_corpus(made, folder / "out", ENCODING)
    found = read_corpus(folder / "out")
    assert list(found.train.documents(found.encoding)) == texts and found.validation is None


class Killer(threading.Thread):
    """Kills workers of this process at random moments, until it is told to stop."""

    def __init__(self, seed, most):
        super().__init__(daemon=True)
        self.chance, self.most, self.killed, self.stop = random.Random(seed), most, 0, False

    def run(self):
        while self.killed < self.most and not self.stop:
            time.sleep(self.chance.uniform(0.05, 0.6))
            if workers := multiprocessing.active_children():
                os.kill(self.chance.choice(workers).pid, signal.SIGKILL)
                self.killed += 1


@pytest.mark.parametrize("seed", [0, 1])
def test_workers_killed_at_random_moments(inputs, whole, tmp_path, seed):
    """Each kill ends the call with a sentence; the same call goes on, to the same bytes.

    A kill that comes when all results are there ends nothing: then it is tried again.
    """
    failures = []
    for trial in range(10):
        killer, folder = Killer(seed + 10 * trial, most=4), tmp_path / str(trial)
        killer.start()
        for _ in range(12):
            try:
                build_corpus(small_plan(inputs), folder, ENCODING, Processes(2))
                break
            except RuntimeError as error:
                failures.append(str(error))
        killer.stop = True
        killer.join()
        assert hashes(folder) == hashes(whole)
        if failures:
            break
    assert failures and documents(folder) == OF
    assert all("a worker ended before its work, killed or out of memory" in each
               for each in failures)


SCRIPT = """
import sys
sys.path[:0] = {path!r}
from corpora import ENCODING, small_plan
from meshbook.data import corpus
from meshbook.data.buckets import Place
import time
write = Place.write
def slowly(self, name, content):
    time.sleep(0.02)
    write(self, name, content)
    print(name, flush=True)
Place.write = slowly
corpus.build_corpus(small_plan({inputs!r}), {folder!r}, ENCODING)
"""


def test_the_whole_process_killed_after_any_file(inputs, whole, tmp_path):
    """Killed again and again, each time a few files later, until it finishes."""
    script = SCRIPT.format(path=sys.path, inputs=str(inputs), folder=str(tmp_path / "x"))
    chance, kills = random.Random(0), 0
    while not (tmp_path / "x" / "index.json").exists() and kills < 10:
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
        for _ in range(chance.randrange(5, 15)):
            if not process.stdout.readline():
                break
        process.kill()
        process.wait()
        process.stdout.close()
        kills += 1
    assert kills > 2
    build_corpus(small_plan(inputs), tmp_path / "x", ENCODING)
    assert hashes(tmp_path / "x") == hashes(whole)


def test_what_is_intact_is_not_made_again(inputs, whole, tmp_path, monkeypatch):
    shutil.copytree(whole, tmp_path / "x")
    monkeypatch.setattr(Place, "write", lambda *_: pytest.fail("written"))
    assert build_corpus(small_plan(inputs), tmp_path / "x", ENCODING)["splits"]["train"]


def damaged(path, how):
    content = bytearray(path.read_bytes())
    if how == "bit":
        content[len(content) // 2] ^= 4
    path.write_bytes({"bit": content, "short": content[:-8], "empty": b""}[how])


@pytest.mark.parametrize("how", ["bit", "short", "empty", "gone"])
def test_a_damaged_shard_is_refused_and_made_again(inputs, whole, tmp_path, how):
    shutil.copytree(whole, tmp_path / "x")
    path = tmp_path / "x" / "train-000002.tokens"
    path.unlink() if how == "gone" else damaged(path, how)
    found = read_corpus(tmp_path / "x")
    with pytest.raises((ValueError, FileNotFoundError), match="train-000002.tokens"):
        found.train.open(2)
    build_corpus(small_plan(inputs), tmp_path / "x", ENCODING, Processes(2))
    assert hashes(tmp_path / "x") == hashes(whole)


@pytest.mark.parametrize("how", ["bit", "short", "empty"])
def test_a_damaged_piece_is_made_again(inputs, whole, tmp_path, monkeypatch, how):
    """What a power failure may leave: a piece with its name, and without its bytes."""
    job = corpus.MakePiece(small_plan(inputs), str(tmp_path / "x"), ENCODING)
    corpus.claim(Place(tmp_path / "x"), small_plan(inputs))
    counts = [job(0), job(1)]
    damaged(tmp_path / "x" / corpus.piece_name("train", 1), how)
    assert [job(0), job(1)] == counts
    build_corpus(small_plan(inputs), tmp_path / "x", ENCODING)
    assert hashes(tmp_path / "x") == hashes(whole)


def test_a_vocabulary_of_more_than_16_bits(inputs, tmp_path):
    tokens = vocabulary.token_bytes(ENCODING)[:-1]
    ranks = dict.fromkeys([*tokens, *(b" no%d" % i for i in range(70_000 - len(tokens)))])
    large = vocabulary.encoding_of("large", {token: i for i, token in enumerate(ranks)})
    build_corpus(small_plan(inputs, encoding=large), tmp_path / "x", large)
    found = read_corpus(tmp_path / "x")
    assert found.train.open(0).ids.dtype == np.uint32 and found.train.open(0).ids.max() == 70_000
    assert documents(tmp_path / "x") == OF
    assert vocabulary.identity(found.encoding) == vocabulary.identity(large)


def test_parquet_gives_the_shards_of_json_lines(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow.parquet as parquet

    parquet.write_table(pa.table({"text": TEXTS}), tmp_path / "x.parquet", row_group_size=23)
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    found = []
    for kind in ("parquet", "jsonl"):
        made = small_plan(tmp_path / f"x.{kind}")
        assert len(made.pieces) > 5
        found.append(build_corpus(made, tmp_path / kind, ENCODING)["splits"])
    assert found[0] == found[1]


def test_the_format_of_a_shard_is_not_that_of_a_token_file(whole):
    with pytest.raises(ValueError, match="expected a header of 512 bytes with 'meshbook tokens 1'"):
        token_files.read_tokens(whole / "train-000000.tokens", ENCODING)
