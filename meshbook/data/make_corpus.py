"""A corpus from the command line: documents into shards, for `train.py --data FOLDER`.

    python -m meshbook.data.make_corpus corpus texts/*.jsonl --vocabulary learn:4096

Stopped, the same command goes on. Folders and files may be URLs that fsspec knows.
"""
from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Iterator, Sequence

import tiktoken

from meshbook.data import vocabulary
from meshbook.data.corpus import build_corpus
from meshbook.data.corpus_plan import plan
from meshbook.data.corpus_workers import Processes, check_workers
from meshbook.data.documents import documents_of, find_inputs
from meshbook.data.shards import read_corpus

SAMPLE = 50_000  # documents from which a vocabulary is learned


def documents_in(urls: Sequence[str], field: str) -> Iterator[str]:
    """All documents of these files, folders or patterns, in order."""
    for url in urls:
        for source in find_inputs(url):
            yield from documents_of(source, 0, source.length, field)


def encoding_named(name: str, urls: Sequence[str], field: str) -> tiktoken.Encoding:
    """The vocabulary of this name: "gpt2", "learn:SIZE" from the documents, or one of tiktoken's.

    GPT-2's is read from MESHBOOK_DATA, or data/; another one of tiktoken's, such as cl100k_base, is
    downloaded by tiktoken, which verifies it. Raises ValueError for another name.
    """
    kind, _, size = name.partition(":")
    if kind == "learn" and size.isdecimal():
        sample = itertools.islice(documents_in(urls, field), SAMPLE)
        return vocabulary.learn(sample, int(size), name)
    if name == "gpt2":
        return vocabulary.gpt2(os.environ.get("MESHBOOK_DATA", "data"))
    if name in tiktoken.list_encoding_names():
        return tiktoken.get_encoding(name)
    raise ValueError(f"expected a vocabulary: gpt2, learn:SIZE, or one of tiktoken's "
                     f"({', '.join(tiktoken.list_encoding_names())}); found {name!r}")


def main(arguments: Sequence[str]):
    """Make the corpus, and say what is in it."""
    parser = argparse.ArgumentParser("python -m meshbook.data.make_corpus",
                                     description=__doc__.partition("\n")[0])
    parser.add_argument("folder", help="of the corpus")
    parser.add_argument("inputs", nargs="+", help="JSON lines, Parquet or text, also folders")
    parser.add_argument("--vocabulary", default="gpt2", help="gpt2, learn:SIZE, cl100k_base, ...")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--shard-tokens", type=int, default=100_000_000, help="of a shard")
    parser.add_argument("--held-out", type=float, default=0.01, help="share for validation")
    parser.add_argument("--field", default="text", help="that has the text, in JSON and Parquet")
    given = parser.parse_args(arguments)
    encoding = encoding_named(given.vocabulary, given.inputs, given.field)
    wanted = plan(given.inputs, encoding, given.shard_tokens, held_out=given.held_out,
                  field=given.field)
    workers = Processes(min(given.workers, len(wanted.pieces)))
    check_workers(wanted, given.folder, encoding, workers)
    build_corpus(wanted, given.folder, encoding, workers)
    made = read_corpus(given.folder)
    for name in wanted.splits:
        split = getattr(made, name)
        print(f"{name}: {len(split):,} documents, {split.tokens:,} tokens in "
              f"{len(split.shards)} shards")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
