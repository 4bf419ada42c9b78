"""Corpora from any files, pieces and workers: the tokens are those of one plain loop.

Texts are of any characters, with line ends of either kind, blank lines, no end to the last one, and
parts of the separator spelled out in them.
"""
import hashlib
import json
import random

import numpy as np
from corpora import ENCODING
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from meshbook.data.corpus import build_corpus
from meshbook.data.corpus_plan import plan
from meshbook.data.documents import documents_of, find_inputs
from meshbook.data.shards import read_corpus
from meshbook.data.vocabulary import END

TEXTS = st.text(max_size=12).filter(lambda text: "\0" not in text) | st.sampled_from([
    "", "<|endof", "text|>", "<|endoftext|", "a\r\nb\n\n", "\u2028\x85", '{"text": "no"}',
    "naïve 👩‍🚀", "\ufeffx", "word " * 40])
BLANKS = st.sampled_from(["", "", " ", "\n", "\r\n", "\u00a0", "\t \n"])


@st.composite
def lines(draw):
    """("jsonl", bytes, its texts): non-ASCII escaped or not, line ends of either kind."""
    texts = draw(st.lists(TEXTS, max_size=8))
    content = ""
    for text in texts:
        facts = {"text": text, "more": END} if draw(st.booleans()) else {"a": [1], "text": text}
        content += json.dumps(facts, ensure_ascii=draw(st.booleans()))
        content += draw(st.sampled_from(["\n", "\r\n", "\n\n", " \r\n \n"]))
    return "jsonl", (content.rstrip() if draw(st.booleans()) else content).encode(), texts


@st.composite
def texts(draw):
    """("txt", bytes, its texts): what stands between separators, without space around it."""
    parts = [draw(BLANKS) + text + draw(BLANKS) for text in draw(st.lists(TEXTS, max_size=8))]
    content = END.join(parts) + draw(st.sampled_from(["", END, END + "\n"]))
    found = [part.strip() for part in content.removeprefix("\ufeff").split(END)]
    return "txt", content.encode(), [text for text in found if text]


class Workers:
    """Work in any order, some of it twice, and one worker dies after so many items."""

    def __init__(self, seed, dies_after=10**9):
        self.chance, self.left = random.Random(seed), dies_after

    def run(self, job, items):
        items = list(items)
        turns = self.chance.sample([*range(len(items))] * 2, len(items) * 2)
        found = {}
        for turn in turns:
            if self.left == 0:
                raise RuntimeError("killed")
            self.left -= 1
            found[turn] = job(items[turn])
        yield from (found[at] for at in range(len(items)))


def stream(documents):
    """The tokens of documents, by one plain loop."""
    ids = []
    for text in documents:
        ids += [ENCODING.eot_token, *ENCODING.encode_ordinary(text)]
    return [*ids, ENCODING.eot_token]


def held_out(text, share):
    """Whether the first eight bytes of its SHA-256 are below a share of all there are."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) < share * 16**16


@examples(60)
@given(lines() | texts(), st.lists(st.integers(0, 400), max_size=9))
def test_any_cuts_of_any_file_have_each_document_once_and_in_order(tmp_path_factory, file, cuts):
    (kind, content, expected), folder = file, tmp_path_factory.mktemp("any")
    (folder / f"x.{kind}").write_bytes(content)
    if not content:
        return
    (source,) = find_inputs(folder)
    edges = sorted({0, source.length, *(cut % source.length for cut in cuts)})
    found = [text for piece in zip(edges, edges[1:])
             for text in documents_of(source, *piece, "text")]
    assert found == expected


@examples(25)
@given(st.lists(lines() | texts(), min_size=1, max_size=3), st.integers(2, 50),
       st.integers(9, 300), st.sampled_from([0.0, 0.3]), st.integers(0, 20))
def test_shards_of_any_corpus_are_one_plain_stream(
        tmp_path_factory, files, shard_tokens, piece_bytes, share, seed):
    folder, expected = tmp_path_factory.mktemp("any"), {"train": [], "validation": []}
    for at, (kind, content, documents) in enumerate(file for file in files if file[1]):
        (folder / f"{at}.{kind}").write_bytes(content)
        for text in documents:
            expected["validation" if held_out(text, share) else "train"].append(text)
    if not expected["train"] or share and not expected["validation"]:
        return
    made = plan([folder], ENCODING, shard_tokens, piece_bytes, share)
    for dies_after in (seed, 2 * seed):
        try:
            build_corpus(made, folder / "out", ENCODING, Workers(seed, dies_after))
        except RuntimeError as error:
            assert str(error) == "killed"
    build_corpus(made, folder / "out", ENCODING, Workers(seed))
    found = read_corpus(folder / "out")
    for name in made.splits:
        split, ids = getattr(found, name), stream(expected[name])
        parts = [split.open(at).ids.tolist() for at in range(len(split.shards))]
        assert parts == [ids[at:at + shard_tokens] for at in range(0, len(ids), shard_tokens)]
        assert len(split) == len(expected[name]) and split.tokens == len(ids)
        assert list(split.documents(ENCODING)) == expected[name]
        starts = [split.open(at).starts.tolist() for at in range(len(parts))]
        assert starts == [np.flatnonzero(np.equal(part, ENCODING.eot_token)).tolist()
                          for part in parts]
