"""Vocabularies of byte pairs: GPT-2's own, or one that is learned; both are tiktoken encodings.

A token is a run of bytes, so every text can be written in every vocabulary, and comes back whole
(Sennrich et al. 2016; from bytes upwards, Radford et al. 2019).
"""
import base64
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tiktoken

END = "<|endoftext|>"  # stands between documents; the last token of both vocabularies

# Pieces in which bytes may be joined: short forms, letters, digits, other signs, each with at most
# one space before it, and the rest of the spaces. GPT-2's own, in tiktoken's faster spelling.
PIECES = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"

GPT2_HOME = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
GPT2_FILES = {  # name, and the SHA-256 that tiktoken asks for
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}


def gpt2(folder: str | os.PathLike):
    """GPT-2's 50,257 tokens, from the files that tiktoken keeps in `folder`/tiktoken-cache.

    Nothing is downloaded. Raises FileNotFoundError for a missing file and ValueError for one
    of another SHA-256.
    """
    encoder = [checked(folder, file) for file in GPT2_FILES][-1]
    ranks = {as_bytes(token): rank for token, rank in json.loads(encoder).items() if token != END}
    return encoding_of("gpt2", ranks)


def gpt2_path(folder: str | os.PathLike, file: str):
    """Where tiktoken keeps this file: under the SHA-1 of its address."""
    name = hashlib.sha1((GPT2_HOME + file).encode()).hexdigest()
    return pathlib.Path(folder).expanduser() / "tiktoken-cache" / name


def checked(folder: str | os.PathLike, file: str):
    """The bytes of one file of GPT-2's vocabulary, or one clear sentence."""
    path, expected = gpt2_path(folder, file), GPT2_FILES[file]
    if not path.is_file():
        raise FileNotFoundError(
            f"no file {path}: expected GPT-2's {file} there; `make data` downloads it, without "
            f"MESHBOOK_DATA the stand-in is used, which has a vocabulary of its own")
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != expected:
        raise ValueError(f"{path} is not GPT-2's {file}, or damaged: expected SHA-256 {expected}, "
                         f"found {found} in {len(content):,} bytes")
    return content


@functools.cache
def alphabet():
    """{sign: byte}: the 256 visible signs by which GPT-2's files write bytes.

    A byte that is a visible sign of Latin-1 is written as itself, the others as the signs from
    256 upwards, in order.
    """
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {chr(b): b for b in seen} | {chr(256 + i): b for i, b in enumerate(hidden)}


def as_bytes(token: str):
    """The bytes of a token that is written in GPT-2's visible signs."""
    return bytes(alphabet()[sign] for sign in token)


def learn(texts: Iterable[str], size: int, name: str = "learned"):
    """A vocabulary of at most `size` tokens, learned from an iterable of texts.

    Token b is byte b for b < 256; then, one after the other, the pair of tokens that occurs most
    often is joined to a new one; the last is END. The same texts give the same tokens, in whatever
    order they come. Raises ValueError if there is no room for the bytes.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    if size < 257:
        raise ValueError(f"a vocabulary of bytes needs 257 tokens or more, found {size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    signs = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=size - 1, initial_alphabet=signs, show_progress=False))
    ranks = {bytes([byte]): byte for byte in range(256)}
    for pair in json.loads(tokenizer.to_str())["model"]["merges"]:
        ranks.setdefault(as_bytes("".join(pair)), len(ranks))
    return encoding_of(name, ranks)


def encoding_of(name: str, ranks: dict[bytes, int]):
    """The tiktoken encoding of these tokens {bytes: number}, with END as the last."""
    return tiktoken.Encoding(
        name, pat_str=PIECES, mergeable_ranks=ranks, special_tokens={END: len(ranks)},
        explicit_n_vocab=len(ranks) + 1)


@dataclass(frozen=True)
class Identity:
    """What tells one vocabulary from another: name, size V, SHA-256 of its tokens in order."""

    name: str
    size: int
    sha256: str

    def __str__(self):
        return f"{self.name!r} of {self.size:,} tokens, SHA-256 {self.sha256[:12]}"


def as_facts(encoding: tiktoken.Encoding):
    """A tiktoken encoding as JSON has it: ranks are the lines of a .tiktoken file, in one text."""
    ranks = sorted(encoding._mergeable_ranks.items(), key=lambda pair: pair[1])
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks]
    return {"name": encoding.name, "pattern": encoding._pat_str,
            "special": encoding._special_tokens, "ranks": "\n".join(lines)}


def of_facts(facts: dict[str, Any]):
    """The inverse of as_facts."""
    lines = (line.split() for line in facts["ranks"].splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    return tiktoken.Encoding(facts["name"], pat_str=facts["pattern"], mergeable_ranks=ranks,
                             special_tokens=facts["special"])


def token_bytes(encoding: tiktoken.Encoding):
    """The bytes of every token, in the order of their numbers."""
    return [encoding.decode_single_token_bytes(number) for number in range(encoding.n_vocab)]


@functools.lru_cache(maxsize=8)
def identity(encoding: tiktoken.Encoding):
    """The Identity of a tiktoken encoding."""
    digest = hashlib.sha256()
    for token in token_bytes(encoding):
        digest.update(len(token).to_bytes(4, "little") + token)
    return Identity(encoding.name, encoding.n_vocab, digest.hexdigest())


def merges(encoding: tiktoken.Encoding, piece: str):
    """How a piece of text becomes tokens: rows of (its parts as bytes, number of the new token).

    The first row is single bytes, with None. Each further row joins the neighbours that make one
    token: of all tokens that neighbours could make, the one with the smallest number, because it
    was learned first. The last row has the tokens of `encode_ordinary`. Raises ValueError for a
    text of several pieces that this would join.
    """
    parts, made, rows = [bytes([byte]) for byte in piece.encode()], None, []
    while made is not None or not rows:
        rows.append((parts, made))
        could = [number_of(encoding, a + b) for a, b in zip(parts, parts[1:])]
        made = min((number for number in could if number is not None), default=None)
        if made is not None:
            parts = put_together(parts, encoding.decode_single_token_bytes(made))
    if encoding.decode_tokens_bytes(encoding.encode_ordinary(piece)) != parts:
        raise ValueError(f"expected one piece of text, such as ' word'; found {piece!r}, which is "
                         f"split before any bytes are joined")
    return rows


def number_of(encoding: tiktoken.Encoding, part: bytes):
    """The number of the token of these bytes, or None where there is none."""
    try:
        return encoding.encode_single_token(part)
    except KeyError:
        return None


def put_together(parts: list[bytes], token: bytes):
    """The parts, with any two neighbours that make this token put together."""
    out = []
    for part in parts:
        if out and out[-1] + part == token:
            out[-1] = token
        else:
            out.append(part)
    return out


def byte_lengths(encoding: tiktoken.Encoding):
    """int64 (V,): the bytes of text that each token stands for; END stands for none."""
    lengths = np.array([len(token) for token in token_bytes(encoding)])
    lengths[encoding.eot_token] = 0
    return lengths
