"""A corpus: documents become tokens, and tokens shards of equal length, on any number of workers.

First each piece of the inputs becomes a token file of its own; which tokens are in it depends on
the piece alone. Then the lengths of all pieces say where each shard begins in the one stream of
tokens, and each shard is cut from the pieces that it overlaps. A file has its name only when it is
whole, and one that is there and intact is not made again. So it does not matter which worker makes
which file, how often one is killed, or when.
"""
import hashlib
import itertools
import os
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import tiktoken

from meshbook.data import vocabulary
from meshbook.data.buckets import Place, sealed, unsealed
from meshbook.data.corpus_plan import Piece, Plan, claim
from meshbook.data.corpus_workers import InProcess
from meshbook.data.documents import documents_of
from meshbook.data.token_files import SHARD, encode, pack, unpack

FORMAT, INDEX, PIECES = "meshbook corpus 1", "index.json", "pieces"


def split_of(text: str, held_out: float):
    """Where a document belongs: a share of all texts is for validation, chosen by their SHA-256.

    A document that occurs twice is on the same side both times.
    """
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return "validation" if number < held_out * 2**64 else "train"


def tokenise(piece: Piece, plan: Plan, encoding: tiktoken.Encoding):
    """A piece of the inputs as {split: the bytes of a token file}: a function, and nothing else."""
    texts = {split: [] for split in plan.splits}
    for text in documents_of(piece.source, piece.begin, piece.end, plan.field):
        texts[split_of(text, plan.held_out)].append(text)
    streams = {split: [*encode(found, encoding, 1), np.array([plan.end])]
               for split, found in texts.items()}
    return {split: pack(np.concatenate(parts), plan.end, plan.vocabulary)
            for split, parts in streams.items()}


def piece_name(split: str, number: int):
    """The name of a piece's token file."""
    return f"{PIECES}/{split}-{number:06}.tokens"


def shard_name(split: str, number: int):
    """The name of a shard."""
    return f"{split}-{number:06}.tokens"


@dataclass(frozen=True)
class MakePiece:
    """A job: tokenise a piece by its number, unless that is done; {split: (tokens, documents)}."""

    plan: Plan
    folder: str
    encoding: tiktoken.Encoding

    def __call__(self, number: int):
        place, names = Place(self.folder), {s: piece_name(s, number) for s in self.plan.splits}
        try:
            made = {split: place.read(name) for split, name in names.items()}
            return self.counts(names, made)
        except (FileNotFoundError, ValueError):
            made = tokenise(self.plan.pieces[number], self.plan, self.encoding)
        for split, content in made.items():
            place.write(names[split], content, flush=False)  # verified before it is used
        return self.counts(names, {s: np.frombuffer(c, np.uint8) for s, c in made.items()})

    def counts(self, names: dict[str, str], made: dict[str, np.ndarray]):
        """How many tokens and documents are in the files of a piece, the closing END apart."""
        read = {s: unpack(names[s], raw, self.plan.vocabulary) for s, raw in made.items()}
        return {split: (len(found.ids) - 1, len(found)) for split, found in read.items()}


@dataclass(frozen=True)
class MakeShard:
    """A job: cut a shard (split, number) out of the pieces; its entry in the index.

    begins: {split: where each piece begins in the stream, and where the last ends}.
    """

    plan: Plan
    folder: str
    begins: dict

    def __call__(self, shard: Any):
        (split, number), place = shard, Place(self.folder)
        name, size = shard_name(split, number), self.plan.shard_tokens
        begin, end = number * size, min((number + 1) * size, self.begins[split][-1] + 1)
        if found := intact(place, {"name": name, "tokens": end - begin}, self.plan):
            return found
        ids = cut(place, split, begin, end, self.begins[split], self.plan)
        place.write(name, pack(ids, self.plan.end, self.plan.vocabulary, SHARD))
        return intact(place, {"name": name, "tokens": end - begin}, self.plan)


def cut(
    place: Place, split: str, begin: int, end: int, begins: list[int], plan: Plan
):
    """The tokens from `begin` to `end` of the stream, out of the pieces that have some of them."""
    parts = []
    for number, (first, last) in enumerate(itertools.pairwise(begins)):
        if first < end and begin < last:
            name = piece_name(split, number)
            ids = unpack(f"{place.url}/{name}", place.read(name), plan.vocabulary).ids
            parts.append(ids[max(0, begin - first):min(end, last) - first])
    if end == begins[-1] + 1:  # the END of a piece closes it; in the stream only the last one does
        parts.append([plan.end])
    return np.concatenate(parts)


def intact(place: Place, entry: dict[str, Any], plan: Plan):
    """The index's entry of a shard with this name and tokens, or None where it is not intact."""
    try:
        found = unpack(entry["name"], place.read(entry["name"]), plan.vocabulary, SHARD)
    except (FileNotFoundError, ValueError):
        return None
    if len(found.ids) == entry["tokens"] and entry.get("sha256") in (None, found.sha256):
        return {"name": entry["name"], "tokens": len(found.ids), "ends": len(found.starts),
                "sha256": found.sha256}


@dataclass(frozen=True)
class IsIntact:
    """A job: whether the shard of an entry of the index is there and intact."""

    plan: Plan
    folder: str

    def __call__(self, entry: dict[str, Any]):
        return intact(Place(self.folder), entry, self.plan) == entry


def build_corpus(
    plan: Plan, folder: str | os.PathLike, encoding: tiktoken.Encoding, workers: Any = InProcess()
):
    """Make the corpus of a plan in a folder or bucket; returns the index, written last.

    workers: who does the work, such as corpus_workers.Processes(4). Whatever ends it, the same call
    goes on; where the corpus is whole, it is verified, and what is damaged made again. Pieces are
    removed at the end. Only one call at a time may write to a folder. Raises ValueError for a
    folder of another plan, for documents that are none, and where a split would be empty, OSError
    where reading or writing fails.
    """
    place, folder = Place(folder), os.fspath(folder)
    claim(place, plan)
    index = finished(place, plan)
    if index and all(workers.run(IsIntact(plan, folder), entries(index))):
        place.remove(PIECES)
        return index
    counts = list(workers.run(MakePiece(plan, folder, encoding), range(len(plan.pieces))))
    begins = {split: [0, *itertools.accumulate(each[split][0] for each in counts)]
              for split in plan.splits}
    for split, starts in begins.items():
        if not starts[-1]:
            raise ValueError(f"no document is for {split}: expected at least one, found "
                             f"{sum(n for each in counts for _, n in each.values())} documents "
                             f"in all and held_out={plan.held_out}")
    shards = [(split, number) for split, starts in begins.items()
              for number in range(-(-(starts[-1] + 1) // plan.shard_tokens))]
    made = list(workers.run(MakeShard(plan, folder, begins), shards))
    place.write(INDEX, sealed(index_of(plan, encoding, shards, made)))
    place.remove(PIECES)
    place.sweep()
    return finished(place, plan)


def index_of(
    plan: Plan, encoding: tiktoken.Encoding, shards: list, made: list[dict[str, Any]]
):
    """What index.json says: the shards of each split in order, and the vocabulary itself."""
    splits = {split: [entry for (owner, _), entry in zip(shards, made, strict=True)
                      if owner == split] for split in plan.splits}
    return {"format": FORMAT, "plan": sealed_hash(plan), "end": plan.end,
            "identity": asdict(plan.vocabulary), "splits": splits,
            "vocabulary": vocabulary.as_facts(encoding)}


def sealed_hash(plan: Plan):
    """The SHA-256 that stands in plan.json."""
    return unsealed("the plan", sealed(plan.facts), plan.facts["format"])["sha256"]


def entries(index: dict[str, Any]):
    """The entries of all shards of an index."""
    return [entry for split in index["splits"].values() for entry in split]


def finished(place: Place, plan: Plan):
    """The index of a folder if it is there, intact, and of this plan; or None."""
    try:
        index = unsealed(f"{place.url}/{INDEX}", bytes(place.read(INDEX)), FORMAT)
    except (FileNotFoundError, ValueError):
        return None
    return index if index["plan"] == sealed_hash(plan) else None
