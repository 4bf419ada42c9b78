"""The plan of a corpus: all that decides its bytes, known before the first document is read."""
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import tiktoken

from meshbook.data.buckets import Place, sealed, unsealed
from meshbook.data.documents import Input, find_inputs
from meshbook.data.vocabulary import END, Identity, identity

FORMAT, NAME = "meshbook corpus plan 1", "plan.json"


@dataclass(frozen=True)
class Piece:
    """A part of an input: where it begins and ends, in bytes or in row groups."""

    source: Input
    begin: int
    end: int


@dataclass(frozen=True)
class Plan:
    """Which documents become which shards. Nothing about workers, machines or moments is in it.

    inputs: in the order of their documents; end: the number of the token END; shard_tokens: tokens
    of a shard; piece_bytes: about what a worker takes at a time; held_out: the share of documents
    for validation; field: where JSON lines and Parquet have the text.
    """

    inputs: tuple
    vocabulary: Identity
    end: int
    shard_tokens: int
    piece_bytes: int
    held_out: float
    field: str

    @property
    def pieces(self):
        """All pieces of all inputs, in the order of their documents."""
        steps = [max(1, each.length * self.piece_bytes // each.size) for each in self.inputs]
        return [Piece(each, begin, min(begin + step, each.length))
                for each, step in zip(self.inputs, steps, strict=True)
                for begin in range(0, each.length, step)]

    @property
    def splits(self):
        """The names of the streams that documents are distributed over."""
        return ("train", "validation") if self.held_out else ("train",)

    @property
    def facts(self):
        """The plan as JSON has it: files by their names, wherever they are."""
        inputs = [asdict(each) | {"url": each.url.rpartition("/")[2]} for each in self.inputs]
        return {"format": FORMAT, **asdict(self), "inputs": inputs}


def plan(
    urls: Sequence[str | os.PathLike], encoding: tiktoken.Encoding,
    shard_tokens: int = 100_000_000, piece_bytes: int = 1 << 26, held_out: float = 0.01,
    field: str = "text"
):
    """The Plan for files, folders or patterns of documents, local or in buckets.

    Raises FileNotFoundError where there are none, ValueError for a file that is empty, of an
    unknown kind or named twice, for a vocabulary without END, and for sizes that make no sense.
    """
    inputs = [each for url in urls for each in find_inputs(url)]
    names = [each.url for each in inputs]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"expected each input once, found {', '.join(sorted(twice))} twice")
    if END not in encoding.special_tokens_set:
        raise ValueError(f"the vocabulary {identity(encoding)} has no {END}, which opens documents")
    if min(shard_tokens, piece_bytes) < 1 or not 0 <= held_out < 1:
        raise ValueError(f"expected shard_tokens and piece_bytes of at least 1 and held_out from 0 "
                         f"to below 1, found {shard_tokens}, {piece_bytes} and {held_out}")
    return Plan(tuple(inputs), identity(encoding), encoding.eot_token, shard_tokens, piece_bytes,
                held_out, field)


def claim(place: Place, plan: Plan):
    """Write the plan into an empty folder, or see that the folder is of this plan.

    Raises ValueError for a folder of another plan, saying what differs, or with other files: so no
    shard of an earlier corpus is ever taken for one of this.
    """
    others = [name for name in place.names() if name != NAME]
    try:
        found = unsealed(f"{place.url}/{NAME}", bytes(place.read(NAME)), FORMAT)
    except (FileNotFoundError, ValueError) as problem:
        if others:
            raise ValueError(f"{place.url} is not of this plan: expected an empty folder or one "
                             f"with the same {NAME}, found {others[0]} and "
                             + ("none" if isinstance(problem, FileNotFoundError) else
                                str(problem))) from None
        return place.write(NAME, sealed(plan.facts))
    expected = unsealed(NAME, sealed(plan.facts), FORMAT)
    if found != expected:
        raise ValueError(f"{place.url} is of another plan: {differing(expected, found)}; expected "
                         f"an empty folder, or the same inputs and settings")


def differing(expected: dict[str, Any], found: dict[str, Any]):
    """The first setting in which two plans differ, in words."""
    for name in expected.keys() - {"inputs", "sha256"}:
        if expected[name] != found.get(name):
            return f"its {name} is {found.get(name)}, here it is {expected[name]}"
    ours, theirs = ({each["url"]: each for each in facts["inputs"]} for facts in (expected, found))
    for name in [*ours, *theirs]:
        if ours.get(name) != theirs.get(name):
            how = ("is missing there" if name not in theirs else
                   "is missing here" if name not in ours else "has other content")
            return f"its input {name} {how}"
    return "its inputs are in another order"
