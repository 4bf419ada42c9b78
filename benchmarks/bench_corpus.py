"""Tokens a second: documents into shards, and shards into batches.

The same documents (those of MESHBOOK_DATA, or else the grammar's) become tokens in turn: in a loop
over tiktoken, as JAXformer does on one machine, and by this book. JAXformer's way and this book's
have two processes each, whose start is part of the time; so are reading JSON and every SHA-256 of
this book's. What the processors do for it is counted in seconds of all processes together, which
other work on the machine changes less than the clock on the wall. How much a process gets at a time
is tried in the same rounds: documents in JAXformer's way, bytes of a piece in this book's. The
loader is measured on one core, from files that are in the page cache.
"""
import json
import multiprocessing
import os
import pathlib
import shutil
import statistics
import tempfile
import time
from functools import partial

GROUPS, PIECES = (1, 256), (1 << 14, 1 << 18)  # beside those of 16 documents, of 4 MiB
ROUNDS, CHARACTERS, B, T, SECONDS = 3, 80_000_000, 256, 256, 2.0


def run():
    """Tokens per second and per second of a processor, of each way in turn; the loader's."""
    from meshbook.data import stories
    from meshbook.data.corpus_workers import InProcess, Processes

    data = stories.load()
    texts = texts_of(data)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "documents.jsonl")
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        ways = {
            "tiktoken in a loop": lambda: in_a_loop(texts, data.encoding),
            "JAXformer's way, 2 processes": lambda: as_jaxformer(texts, data.encoding, folder),
            "a corpus, in one process": lambda: corpus(path, data.encoding, InProcess()),
            "a corpus, 2 processes": lambda: corpus(path, data.encoding, Processes(2)),
        }
        at_a_time = {f"JAXformer's way, groups of {group}": partial(
            as_jaxformer, texts, data.encoding, folder, group) for group in GROUPS}
        at_a_time |= {f"a corpus, pieces of {piece >> 10} KiB": partial(
            corpus, path, data.encoding, Processes(2), piece) for piece in PIECES}
        rounds = [{name: timed(way) for name, way in (*ways.items(), *at_a_time.items())}
                  for _ in range(ROUNDS)]
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        loading = {f"batches{how}": loader(folder, bool(how)) for how in ("", ", documents apart")}
    median = lambda name, which: statistics.median(each[name][which] for each in rounds)
    rows = [{"name": name, "value": median(name, 0), "unit": "tokens/s"} for name in ways]
    rows += [{"name": f"{name}: work", "value": median(name, 1), "unit": "tokens/CPU second"}
             for name in ways]
    rows += [{"name": name, "value": median(name, 0), "unit": "tokens/s"} for name in at_a_time]
    rows += [{"name": name, "value": value, "unit": "tokens/s"} for name, value in loading.items()]
    rows[0]["note"] = f"{data.source}, {len(texts):,} documents, {data.encoding.name}"
    rows[-2]["note"] = f"one core, batch {B}, T {T}; asked for: 20,000,000"
    loop, source, _, ours = ways
    return rows + [
        {"name": f"work, ratio to {name}", "value": median(ours, 1) / median(other, 1),
         "unit": "times", "note": "rounds {:.2f} to {:.2f}".format(*extremes(rounds, ours, other))}
        for name, other in (("tiktoken in a loop", loop), ("JAXformer's way", source))]


def texts_of(data):
    """The training documents as texts, again and again until there are CHARACTERS of them."""
    train = data.train
    some = [data.encoding.decode(train.ids[a + 1:b].tolist())
            for a, b in zip(train.starts[:-1], train.starts[1:])]
    times = -(-CHARACTERS // sum(map(len, some)))
    return some * times


def extremes(rounds, ours, theirs):
    """The smallest and the largest ratio of a round."""
    ratios = [each[ours][1] / each[theirs][1] for each in rounds]
    return min(ratios), max(ratios)


def timed(way):
    """Tokens per second, and per CPU second, of a function that returns how many it made."""
    begin, worked = time.perf_counter(), sum(os.times()[:4])
    tokens = way()
    return tokens / (time.perf_counter() - begin), tokens / (sum(os.times()[:4]) - worked)


def in_a_loop(texts, encoding):
    """One document after the other, each as a list, then as an array."""
    import numpy as np

    parts = [np.array([encoding.eot_token, *encoding.encode_ordinary(text)]) for text in texts]
    return len(np.concatenate(parts))


def as_jaxformer(texts, encoding, folder, group=16, shard_size=10_000_000):
    """A pool's imap over documents, `group` at a time, into a buffer that is saved when full."""
    import numpy as np

    shard, count, total = np.empty(shard_size, np.uint32), 0, 0
    context = multiprocessing.get_context("spawn")
    with context.Pool(2, _begin, (encoding,)) as pool:
        for tokens in pool.imap(_tokenise, texts, chunksize=group):
            total += len(tokens)
            while count + len(tokens) >= shard_size:
                room = shard_size - count
                shard[count:] = tokens[:room]
                np.save(pathlib.Path(folder, f"{total}"), shard)
                tokens, count = tokens[room:], 0
            shard[count:count + len(tokens)] = tokens
            count += len(tokens)
    np.save(pathlib.Path(folder, "last"), shard[:count])
    return total


def _begin(encoding):
    global _encoding
    _encoding = encoding


def _tokenise(text):
    import numpy as np

    tokens = np.array([_encoding.eot_token, *_encoding.encode_ordinary(text)])
    assert (0 <= tokens).all() and (tokens < 2**32).all()
    return tokens.astype(np.uint32)


def corpus(path, encoding, workers, piece_bytes=1 << 22):
    """A corpus of this book, whole: pieces, shards, index."""
    from meshbook.data.corpus import build_corpus
    from meshbook.data.corpus_plan import plan

    made = plan([path], encoding, shard_tokens=10_000_000, piece_bytes=piece_bytes,
                held_out=0.01)
    folder = path.parent / "corpus"
    shutil.rmtree(folder, ignore_errors=True)
    index = build_corpus(made, folder, encoding, workers)
    return sum(each["tokens"] for split in index["splits"].values() for each in split)


def loader(folder, documents):
    """Tokens per second of batches from the shards in the folder."""
    from meshbook.data.shards import batches, read_corpus

    stream = batches(read_corpus(pathlib.Path(folder, "corpus")).train, B, T, 0, documents)
    count, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < SECONDS:
        next(stream)
        count += B * T
    return count / (time.perf_counter() - begin)
