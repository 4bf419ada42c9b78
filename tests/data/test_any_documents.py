"""Packed rows of any documents, cut anywhere, against one plain loop over the stream.

Documents may be empty or of one token, longer than a row, or begin and end in other shards.
"""
import itertools
from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from meshbook.data import shards, tokens
from meshbook.data.vocabulary import Identity

END = 7
WORDS = Identity("none", 1 << 17, "")
LENGTHS = st.lists(st.sampled_from([0, 0, 1, 1, 2, 3, 5, 12]), min_size=1, max_size=25)


def stream_of(lengths):
    """END before each document and behind the last; a word is 100 and its place in the stream."""
    ids = list(range(100, 101 + sum(lengths) + len(lengths)))
    for at in itertools.accumulate((1 + length for length in lengths), initial=0):
        ids[at] = END
    return np.array(ids)


def by_hand(ids, T):
    """All rows as dicts of lists, by one loop over the tokens of a stream."""
    rows = []
    for at in range(0, len(ids) - T, T):
        row = {"inputs": [], "labels": [], "segments": [], "positions": []}
        for place in range(at, at + T):
            if place == at:
                segment, position = 1, 0
            elif ids[place] == END:
                segment, position = segment + 1, 0
            else:
                position += 1
            row["inputs"].append(int(ids[place]))
            row["labels"].append(int(ids[place + 1]))
            row["segments"].append(segment)
            row["positions"].append(position)
        rows.append(row)
    return rows


def rows_in(batches):
    return [{name: array[at].tolist() for name, array in batch.items()}
            for batch in batches for at in range(len(batch["inputs"]))]


def in_order(rows):
    return sorted(rows, key=lambda row: str(row.values()))


@examples(100)
@given(LENGTHS, st.integers(1, 9), st.integers(1, 5), st.integers(0, 99))
def test_rows_of_any_documents_are_those_of_a_plain_loop(lengths, T, B, seed):
    ids = stream_of(lengths)
    expected = by_hand(ids, min(T, len(ids) - 1))
    T, B = min(T, len(ids) - 1), min(B, len(expected))
    given = tokens.Tokens(ids, np.flatnonzero(ids == END), WORDS, "")
    once = rows_in(tokens.batches(given, 1, T, seed, documents=True, epochs=1))
    assert in_order(once) == in_order(expected)
    evaluated = rows_in(tokens.evaluation_batches(given, B, T, documents=True))
    weights = [row.pop("weight") for row in evaluated]
    assert evaluated[:len(expected)] == expected
    assert weights == [[float(at < len(expected))] * T for at in range(len(evaluated))]
    plain = rows_in(tokens.batches(given, B, T, seed, epochs=B))
    several = rows_in(tokens.batches(given, B, T, seed, documents=True, epochs=B))
    assert len(several) == B * len(expected)
    assert plain == [{name: row[name] for name in ("inputs", "labels")} for row in several]


@examples(100)
@given(LENGTHS, st.integers(1, 9))
def test_a_label_is_of_its_inputs_document_or_the_end_that_closes_it(lengths, T):
    """The END of the next document is a target as well, and is seen from its own segment alone."""
    ids = stream_of(lengths)
    T = min(T, len(ids) - 1)
    given = tokens.Tokens(ids, np.flatnonzero(ids == END), WORDS, "")
    owner, targets = np.cumsum(ids == END).tolist(), []
    for batch in tokens.evaluation_batches(given, 1, T, documents=True):
        at, segments = len(targets), batch["segments"][0].tolist()
        for i, label in enumerate(batch["labels"][0].tolist()):
            assert label == END or owner[at + i] == owner[at + i + 1]
            assert [each == segments[i] for each in segments] == [
                each == owner[at + i] for each in owner[at:at + T]]
            targets.append(label)
    assert targets == ids[1:len(targets) + 1].tolist()  # each token but the first, once
    assert len(ids) - 1 - len(targets) < T


@dataclass(frozen=True, eq=False)
class InMemory(shards.Split):
    """A split whose shards are cut from a stream."""

    parts: tuple = ()

    def open(self, number):
        return tokens.Tokens(self.parts[number], np.array([]), WORDS, "")


@examples(60)
@given(LENGTHS, st.integers(1, 9), st.integers(2, 40), st.integers(1, 4), st.integers(0, 99))
def test_rows_of_shards_that_cut_documents_are_those_of_a_plain_loop(
        lengths, T, shard_tokens, window, seed):
    ids = stream_of(lengths)
    parts = tuple(ids[at:at + shard_tokens] for at in range(0, len(ids), shard_tokens))
    expected = [row for part in parts for row in by_hand(part, T)]
    entries = tuple({"tokens": len(part), "ends": 0} for part in parts)
    split = InMemory(None, entries, WORDS, END, "", parts=parts)
    if not expected:
        return
    found = rows_in(shards.batches(split, 1, T, seed, True, 1, window=window))
    assert in_order(found) == in_order(expected)
