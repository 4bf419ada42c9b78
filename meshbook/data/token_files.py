"""Token files: documents as numbers, written once and then read as a memory map.

A file has a header of 512 bytes, the tokens as uint16 or, where the vocabulary has more than 65,536
of them, uint32, and the places where documents start as int64. The stream of N tokens is END, a
document, END, a document, ..., END: each END opens a document and closes the one before. A shard is
a part of such a stream in a file of its own: it may begin and end within a document. Integers are
little-endian.
"""
import collections
import contextlib
import errno
import hashlib
import itertools
import json
import os
import pathlib
import shutil
from collections.abc import Iterable
from concurrent import futures
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import tiktoken
from jaxtyping import Integer, UInt8

from meshbook.data.vocabulary import END, Identity, identity

FORMAT, SHARD, HEADER = "meshbook tokens 1", "meshbook shard 1", 512
PART = 1 << 23  # characters that are encoded in one go
UNFINISHED = ".unfinished"  # ends the name of a file that is being written


def shard_bytes(tokens: int, documents: int, vocabulary: int):
    """Bytes of a shard's file: header, tokens, and the places at which its documents begin."""
    width = 2 if vocabulary <= 2 ** 16 else 4
    return HEADER + -(-width * tokens // 8) * 8 + 8 * documents  # places begin at a multiple of 8


@dataclass(frozen=True, eq=False)
class Tokens:
    """Documents as tokens: document d, with the END that opens it, is ids[starts[d]:starts[d+1]].

    ids: uint16 or uint32 (N,), starts: int64 (documents + 1,), of a shard one for each END; both
    are views of the file; vocabulary: the Identity of the encoding that wrote them; sha256: of the
    whole file.
    """

    ids: np.ndarray
    starts: np.ndarray
    vocabulary: Identity
    sha256: str

    def __len__(self):
        return len(self.starts) - 1


def write_tokens(
    documents: Iterable[str], encoding: tiktoken.Encoding, path: str | os.PathLike,
    workers: int = os.cpu_count() or 1
):
    """Tokenise an iterable of texts into the file `path`, which then exists whole or not at all.

    `workers` threads encode; only some million characters are in memory at a time.
    Raises ValueError for a document that contains END and for no document at all, OSError (ENOSPC)
    when the disk is full.
    """
    vocabulary, path = identity(encoding), pathlib.Path(path)
    with whole_or_not_at_all(path) as file:
        file.write(bytes(HEADER))
        starts, count, digest = [], 0, hashlib.sha256()
        last = np.array([encoding.eot_token], dtype_of(vocabulary))
        for ids in itertools.chain(encode(documents, encoding, workers), [last]):
            starts.append(count + np.flatnonzero(ids == encoding.eot_token))
            count += len(ids)
            put(file, digest, ids)
        starts = np.concatenate(starts).astype("<i8")
        if len(starts) < 2:
            raise ValueError(f"{path} would be empty: expected documents, found none")
        put(file, digest, filling(count, vocabulary))
        put(file, digest, starts)
        file.seek(0)
        file.write(header(count, len(starts) - 1, vocabulary, digest))


def pack(ids_N: Integer[np.ndarray, "N"], end: int, vocabulary: Identity, format: str = FORMAT):
    """The bytes of a file of these tokens, each `end` of which opens a document.

    format: FORMAT for a whole stream, whose last token closes it, or SHARD for a part of one.
    """
    ids, starts = ids_N.astype(dtype_of(vocabulary)), np.flatnonzero(ids_N == end).astype("<i8")
    body, digest = [ids, filling(len(ids), vocabulary), starts], hashlib.sha256()
    for part in body:
        digest.update(part)
    head = header(len(ids), len(starts) - closing(format), vocabulary, digest, format)
    return b"".join([head, *body])


def dtype_of(vocabulary: Identity):
    """The integers in which tokens of this vocabulary are stored."""
    return np.dtype("<u2" if vocabulary.size <= 1 << 16 else "<u4")


def filling(count: int, vocabulary: Identity):
    """Zeros behind so many tokens: the places where documents start begin at a multiple of 8."""
    return np.zeros(-count * dtype_of(vocabulary).itemsize % 8, np.uint8)


def closing(format: str):
    """How many starts a file has besides those of its documents: 1 for END at its end, or 0."""
    return int(format == FORMAT)


def encode(documents: Iterable[str], encoding: tiktoken.Encoding, workers: int):
    """Yield the tokens of the documents, each with END before it, some million at a time.

    Threads serve: tiktoken lets go of Python's lock while it encodes.
    """
    with futures.ThreadPoolExecutor(workers) as pool:
        waiting = collections.deque()
        for some in grouped(documents):
            text = "".join(END + each for each in some)
            waiting.append(pool.submit(encode_part, text, encoding))
            if len(waiting) > workers:  # one for each thread, and no more text in memory
                yield waiting.popleft().result()
        for part in waiting:
            yield part.result()


def encode_part(text: str, encoding: tiktoken.Encoding):
    """The tokens of a text; END in it is the token that it names."""
    ids = encoding.encode_to_numpy(text, allowed_special={END})
    return ids.astype(dtype_of(identity(encoding)))


def grouped(documents: Iterable[str]):
    """Yield the documents in lists of about PART characters; ValueError if one contains END."""
    some, size = [], 0
    for number, text in enumerate(documents):
        if END in text:
            raise ValueError(f"document {number} contains {END}, which only separates documents")
        some.append(text)
        size += len(text)
        if size >= PART:
            yield some
            some, size = [], 0
    if some:
        yield some


def put(file: Any, digest: Any, array: Integer[np.ndarray, "N"]):
    """Append an array to a file and to its SHA-256."""
    file.write(array)
    digest.update(array)


def header(count: int, documents: int, vocabulary: Identity, digest: Any, format: str = FORMAT):
    """The first bytes of a file: what is in it, and the SHA-256 of the rest and of this."""
    facts = {"format": format, "tokens": count, "documents": documents,
             "vocabulary": asdict(vocabulary)}
    line, digest = json.dumps(facts).encode() + b"\n", digest.copy()
    digest.update(line)
    return (line + digest.hexdigest().encode()).ljust(HEADER - 1) + b"\n"


def read_header(path: str | os.PathLike, head: bytes, format: str = FORMAT):
    """(tokens, documents, Identity) of a header, or ValueError if it is the header of none."""
    try:
        facts = json.loads(head.split(b"\n")[0])
        if facts["format"] == format and len(head) == HEADER:
            vocabulary = Identity(**facts["vocabulary"])
            return int(facts["tokens"]), int(facts["documents"]), vocabulary
    except (ValueError, TypeError, LookupError):
        pass
    raise ValueError(f"{path} is not a token file of this book: expected a header of {HEADER} "
                     f"bytes with {format!r}, found {head[:32]!r}")


@contextlib.contextmanager
def whole_or_not_at_all(path: pathlib.Path, flush: bool = True):
    """A file to write, which takes its name only when all of it is on the disk.

    Without flush, when all of it is written: a power failure may then leave a damaged file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}{UNFINISHED}")
    try:
        with open(unfinished, "wb") as file:
            yield file
            file.flush()
            if flush:
                os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(path.parent).free
        raise OSError(error.errno, f"the disk is full: {path} needs more than the {free:,} bytes "
                      f"that are free; nothing half-written was kept") from error
    finally:
        unfinished.unlink(missing_ok=True)


def read_tokens(path: str | os.PathLike, encoding: tiktoken.Encoding):
    """The Tokens of a file, as memory maps, every byte of it verified.

    Raises FileNotFoundError, or ValueError for a file that is cut short, changed in any bit, of
    another format, or written with another vocabulary than this encoding's.
    """
    raw = np.memmap(path, np.uint8, "r") if os.path.getsize(path) else np.empty(0, np.uint8)
    return unpack(path, raw, identity(encoding))


def unpack(
    path: str | os.PathLike, raw: UInt8[np.ndarray, "N"], expected: Identity, format: str = FORMAT
):
    """The Tokens of the bytes of a file, every one verified; ValueError as for read_tokens."""
    head = raw[:HEADER].tobytes()
    count, documents, found = read_header(path, head, format)
    if found != expected:
        raise ValueError(f"{path} was written with another vocabulary: expected {expected}, "
                         f"found {found}")
    stop = HEADER + count * dtype_of(found).itemsize
    middle = stop + -stop % 8
    size, end = len(raw), middle + 8 * (documents + closing(format))
    if size != end:
        raise ValueError(f"{path} is not whole: expected {end:,} bytes, found {size:,}")
    sha256 = head.split()[-1].decode(errors="replace")
    if header(count, documents, found, hashlib.sha256(raw[HEADER:]), format) != head:
        raise ValueError(f"{path} is damaged: expected SHA-256 {sha256}, found that of other bytes")
    return Tokens(raw[HEADER:stop].view(dtype_of(found)), raw[middle:].view("<i8"), found, sha256)
