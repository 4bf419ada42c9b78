"""Batches from a corpus: shards are opened as they are needed, ahead of time, from disk or bucket.

Letters of the shapes: R rows, B rows of a batch, T tokens of a row. Rows are cut within a shard.
The order of an epoch is a permutation of the shards, and of the rows of `window` shards at a time:
so few shards are open, and a batch still has rows from several.
"""
import functools
import os
import sys
import threading
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np
import tiktoken
from jaxtyping import Int

from meshbook.data import vocabulary
from meshbook.data.buckets import Place, unsealed
from meshbook.data.corpus import FORMAT, INDEX
from meshbook.data.order import Stream, epoch_order, process_share
from meshbook.data.token_files import SHARD, unpack
from meshbook.data.tokens import as_batch, cut
from meshbook.data.vocabulary import END, Identity, identity


@dataclass(frozen=True, eq=False)
class Split:
    """The shards of one stream of a corpus: entries of the index, where they are, the END token.

    sha256: that of the index; cache: a folder for what comes from a bucket, or None.
    """

    place: Place
    shards: tuple
    vocabulary: Identity
    end: int
    sha256: str
    cache: Place | None = None

    def __len__(self):
        return sum(each["ends"] for each in self.shards) - 1  # the last END opens none

    @property
    def tokens(self):
        """The number of tokens of all shards."""
        return sum(each["tokens"] for each in self.shards)

    def open(self, number: int):
        """The Tokens of a shard, verified: ValueError for other bytes than the index has."""
        entry = self.shards[number]
        name = entry["name"]
        if self.cache:
            copy = f"{entry['sha256'][:16]}-{name}"
            if copy not in self.cache.names():
                self.cache.write(copy, self.place.read(name).tobytes())
            return self.verified(self.cache, copy, entry)
        return self.verified(self.place, name, entry)

    def verified(self, place: Place, name: str, entry: dict[str, Any]):
        """The Tokens of a file, if it is the one of this entry."""
        try:
            found = unpack(f"{place.url}/{name}", place.read(name), self.vocabulary, SHARD)
        except FileNotFoundError:
            raise FileNotFoundError(f"{place.url} has no {name}: expected the shard of "
                                    f"{entry['tokens']:,} tokens that its index names") from None
        if found.sha256 != entry["sha256"]:
            raise ValueError(f"{place.url}/{name} is another shard: expected SHA-256 "
                             f"{entry['sha256']}, found {found.sha256}")
        return found

    def documents(self, encoding: tiktoken.Encoding):
        """Yield the texts of all documents in order, put together across shards."""
        rest = np.array([], int)
        for number in range(len(self.shards)):
            ids = np.concatenate([rest, self.open(number).ids])
            *ends, last = np.flatnonzero(ids == self.end)
            for begin, stop in zip(ends, [*ends[1:], last]):
                yield encoding.decode(ids[begin + 1:stop].tolist())
            rest = ids[last:]


@dataclass(frozen=True, eq=False)
class Corpus:
    """A whole corpus: its streams (validation may be None), and the vocabulary of all of them."""

    train: Split
    validation: Split | None
    encoding: tiktoken.Encoding
    source: str
    is_stand_in: bool = False


def read_corpus(folder: str | os.PathLike, cache: str | os.PathLike | None = None):
    """The Corpus in a folder or bucket; no shard is read yet.

    cache: a folder of this machine for the shards of a bucket, which are otherwise kept in memory
    while they are used. Raises FileNotFoundError where there is no index, because the corpus was
    never finished, and ValueError for an index that was changed.
    """
    place = Place(folder)
    try:
        content = bytes(place.read(INDEX))
    except FileNotFoundError:
        raise FileNotFoundError(f"{place.url} has no {INDEX}: expected a corpus, which has one "
                                f"when all of its shards are written") from None
    index = unsealed(f"{place.url}/{INDEX}", content, FORMAT)
    encoding = vocabulary.of_facts(index["vocabulary"])
    if identity(encoding) != (expected := Identity(**index["identity"])):
        raise ValueError(f"{place.url}/{INDEX} has another vocabulary than its shards: expected "
                         f"{expected}, found {identity(encoding)}")
    copies = Place(cache) if cache else None
    splits = {name: Split(place, tuple(shards), expected, index["end"], index["sha256"], copies)
              for name, shards in index["splits"].items()}
    train = splits["train"]
    source = f"a corpus of {len(train):,} documents, {train.tokens:,} tokens"
    return Corpus(train, splits.get("validation"), encoding, source)


class Ahead:
    """Shards of a split, opened by a thread before they are needed; few are kept.

    What fails in the thread is raised where the shard is needed.
    """

    def __init__(self, split: Split):
        self.split, self.opening, self.lock = split, {}, threading.Lock()
        self.pool = futures.ThreadPoolExecutor(1)

    def get(self, now: list[int], later: list[int]):
        """The Tokens of the shards needed now; those needed later are begun, others let go."""
        with self.lock:
            wanted = dict.fromkeys([*now, *later])
            self.opening = {n: self.opening.get(n) or self.pool.submit(self.split.open, n)
                            for n in wanted}
            waiting = [self.opening[number] for number in now]
        try:
            return [each.result() for each in waiting]
        except BaseException:
            self.opening = {}  # what failed is tried anew by the next call
            raise


class Rows:
    """The rows of T tokens of a split, in the order of a seed: global row numbers to arrays.

    ahead: opens the shards; R_S: rows of each shard; window: shards whose rows are mixed.
    """

    def __init__(self, split: Split, T: int, seed: int | np.integer, window: int):
        self.ahead, self.T, self.seed, self.window = Ahead(split), T, seed, window
        self.R_S = np.array([max(0, each["tokens"] - 1) // T for each in split.shards])
        self.order = functools.lru_cache(maxsize=3)(self.order_of)

    def __len__(self):
        return int(self.R_S.sum())

    def order_of(self, epoch: int):
        """(shards of each window of an epoch, number of rows up to the end of each)."""
        order = epoch_order(len(self.R_S), self.seed, epoch).tolist()
        windows = [order[at:at + self.window] for at in range(0, len(order), self.window)]
        return windows, np.cumsum([self.R_S[shards].sum() for shards in windows])

    def windows(self, epoch: int):
        """The shards of an epoch in its order, `window` at a time."""
        return self.order(epoch)[0]

    def places(self, epoch: int, number: int):
        """(shard of the window, row) of every row of a window, int (R, 2), in the epoch's order."""
        return places(tuple(self.R_S[self.windows(epoch)[number]].tolist()), self.seed, epoch,
                      number)

    def take(self, first: int, last: int, share: slice):
        """Rows of T + 1 tokens: a share of those from `first` to `last`, counted over epochs."""
        numbers, found = np.arange(first, last)[share], []
        epochs, within = np.divmod(numbers, len(self))
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            at, (windows, ends) = within[epochs == epoch], self.order(epoch)
            of_window = np.searchsorted(ends, at, side="right")
            for number in np.unique(of_window).tolist():
                begin = ends[number] - self.R_S[windows[number]].sum()
                found.append(self.gather(epoch, number, at[of_window == number] - begin))
        return np.concatenate(found)

    def gather(self, epoch: int, number: int, at_R: Int[np.ndarray, "R"]):
        """The rows at these places of a window, int32 (R, T + 1)."""
        windows = self.windows(epoch)
        following = windows[number + 1] if number + 1 < len(windows) else self.windows(epoch + 1)[0]
        opened = self.ahead.get(windows[number], following)
        shard_R, row_R = self.places(epoch, number)[at_R].T
        out = np.empty((len(at_R), self.T + 1), np.int32)
        for shard in np.unique(shard_R):
            out[shard_R == shard] = cut(opened[shard].ids, self.T)[row_R[shard_R == shard]]
        return out


@functools.lru_cache(maxsize=4)
def places(counts: tuple, seed: int | np.integer, epoch: int, window: int):
    """(shard, row) of all rows of shards with so many rows, shuffled: int32 (R, 2)."""
    shard_R = np.repeat(np.arange(len(counts)), counts)
    row_R = np.concatenate([np.arange(count) for count in counts])
    order = np.random.default_rng((seed, epoch, window)).permutation(len(row_R))
    return np.stack([shard_R, row_R], axis=1)[order].astype(np.int32)


def batches(
    split: Split | None, B: int, T: int, seed: int | np.integer, documents: bool = False,
    epochs: int | None = None, process_index: int | None = None,
    process_count: int | None = None, window: int = 4
):
    """Shuffled training batches of a corpus, as those of `tokens.batches`: a Stream of dicts.

    Global batch k depends on the corpus, seed, window and k alone, and this process has its
    contiguous share. Each row of each shard comes once an epoch. Shards are opened and verified
    when their window comes, the next window's ahead of time. Raises ValueError for sizes that do
    not fit, for damaged shards, and for the validation of a corpus that held no documents out.
    """
    if split is None:
        raise ValueError("no documents for this: expected a split of a corpus, found None, because "
                         "its plan holds no documents out (held_out=0)")
    rows = Rows(split, T, seed, window) if T > 0 and window > 0 else ()
    if not 0 < B <= len(rows):
        raise ValueError(f"batches of B={B} rows of T={T} tokens with a window of {window} do not "
                         f"fit: expected at least 1 of each and at most {len(rows):,} rows, those "
                         f"of {len(split.shards)} shards")
    share = process_share(B, process_index, process_count)
    end = split.end if documents else None
    make = lambda number: as_batch(rows.take(number * B, (number + 1) * B, share), end)
    count = sys.maxsize if epochs is None else epochs * len(rows) // B
    dataset = grain.MapDataset.range(count).map(make).to_iter_dataset(
        grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    return Stream(iter(dataset), split, B=B, T=T, seed=seed, documents=documents, window=window)
