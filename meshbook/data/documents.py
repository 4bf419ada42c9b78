"""Documents of a corpus: JSON lines, Parquet, or texts with END between them, piece by piece.

A piece is a range of bytes, or of the row groups of a Parquet file. A document belongs to the piece
in which it begins, so pieces need not be cut where documents end: whatever the cuts, each document
is in one piece, and the pieces in order have the documents in order.
"""
import codecs
import hashlib
import json
import os
import warnings
from dataclasses import dataclass
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from meshbook.data.buckets import again, exactly
from meshbook.data.vocabulary import END

KINDS = {".jsonl": "lines", ".ndjson": "lines", ".txt": "text", ".parquet": "parquet"}
SEPARATORS = {"lines": b"\n", "text": END.encode()}
BLOCK = 1 << 20  # bytes that are read at once behind a piece, for the end of its last document


@dataclass(frozen=True)
class Input:
    """A file of documents: url, kind, length in bytes or row groups, size in bytes, identity.

    identity: the SHA-256 of a file of this machine; in a bucket what the store says of the object.
    """

    url: str
    kind: str
    length: int
    size: int
    identity: str


def find_inputs(url: str | os.PathLike):
    """The Inputs of a file, a folder or a pattern such as ``in/*.jsonl``, sorted by name.

    Raises FileNotFoundError where there is none, ValueError for a file of an unknown kind or
    without content.
    """
    files, path = fsspec.core.url_to_fs(os.fspath(url))
    if "*" in path:
        paths = files.glob(path)
    else:
        paths = files.find(path) if files.isdir(path) else [path] * files.exists(path)
    if not paths:
        raise FileNotFoundError(f"no documents in {url}: expected files {', '.join(KINDS)}, "
                                f"found none")
    return [examine(files, each) for each in sorted(paths)]


def examine(files: Any, path: str):
    """The Input of one file."""
    url, kind = files.unstrip_protocol(path), KINDS.get(os.path.splitext(path)[1])
    if kind is None:
        raise ValueError(f"{url} is of an unknown kind: expected {', '.join(KINDS)}")
    size = again(f"{url} could not be read", files.size, path)
    length, size = (size, size) if kind != "parquet" or not size else row_groups(url)
    if not length:
        raise ValueError(f"{url} is empty: expected documents, found none in {size:,} bytes")
    return Input(url, kind, length, size, identity_of(files, path))


def identity_of(files: Any, path: str):
    """What changes with a file's content."""
    if not isinstance(files, LocalFileSystem):
        return files.ukey(path)
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def documents_of(source: Input, begin: int, end: int, field: str):
    """Yield the documents that begin in a piece; field: where JSON and Parquet have the text.

    Raises ValueError for a line that is not a JSON object with that text, for bytes that are not
    UTF-8 and for NUL bytes, and for a document that contains END, OSError where the file cannot be
    read.
    """
    if source.kind == "parquet":
        found = rows(source, begin, end, field)
    else:
        found = texts(source, begin, end, field)
    for where, text in found:
        if END in text:
            raise ValueError(f"{place_of(source, where)} contains {END}, which only separates "
                             f"documents")
        yield text


def texts(source: Input, begin: int, end: int, field: str):
    """Yield (byte, text) of the documents of a range of bytes."""
    separator = SEPARATORS[source.kind]
    at, content = records(source, begin, end, separator)
    for record in content.split(separator):
        if record.strip():
            text = text_in(source, at, record, field)
            if text or source.kind == "lines":  # a text of space that only Unicode knows is none
                yield at, text
        at += len(record) + len(separator)


def text_in(source: Input, at: int, record: bytes, field: str):
    """The text of one record, which begins at this byte of its file.

    A byte-order mark before the first record is dropped, with a warning.
    """
    if at == 0 and record.startswith(codecs.BOM_UTF8):
        warnings.warn(f"{source.url} begins with a byte-order mark, which is left out of its first "
                      "document", stacklevel=2)
        record = record.removeprefix(codecs.BOM_UTF8)
    try:
        if b"\0" in record:
            raise UnicodeDecodeError("utf-8", record, record.index(b"\0"), record.index(b"\0") + 1,
                                     "NUL, as UTF-16 and UTF-32 have it,")
        if source.kind == "text":
            return record.decode().strip()
        found = json.loads(record)
        text = found.get(field) if isinstance(found, dict) else None
        if isinstance(text, str):
            return text
        problem = f"a JSON object without a text {field!r}"
    except UnicodeDecodeError as error:
        problem = f"bytes that are not UTF-8 ({error.reason} at its byte {error.start})"
    except ValueError as error:
        problem = f"no JSON ({error})"
    raise ValueError(f"{place_of(source, at)} is {problem}; expected a document")


def place_of(source: Input, at: int):
    """A record of a file by its number, from the byte or the row where it begins."""
    if source.kind == "parquet":
        return f"{source.url}, row {at}"
    files, path = fsspec.core.url_to_fs(source.url)
    before = again(f"{source.url} could not be read", files.cat_file, path, 0, at)
    name = {"lines": "line", "text": "document"}[source.kind]
    return f"{source.url}, {name} {before.count(SEPARATORS[source.kind]) + 1}"


def records(source: Input, begin: int, end: int, separator: bytes):
    """(byte of the first, bytes) of the records that begin in a range of bytes, the last whole."""
    files, path = fsspec.core.url_to_fs(source.url)
    read = lambda start, stop: again(
        f"{source.url} could not be read", exactly, files, path, start, min(stop, source.length))
    # A record begins behind a separator; the one of the first may lie before the range.
    start = max(0, begin - len(separator))
    content = read(start, end)
    first = content.find(separator) + len(separator) if begin else 0
    if begin and first < len(separator) or first == len(content):
        return end, b""
    content = content[first:]
    while end < source.length and not content.endswith(separator):
        size, more = len(content), read(end, end + BLOCK)
        end, content = end + len(more), content + more
        cut = content.find(separator, max(0, size - len(separator) + 1))
        if cut >= 0:
            content = content[:cut]
            break
    return start + first, content.removesuffix(separator)


def rows(source: Input, begin: int, end: int, field: str):
    """Yield (row, text) of a range of row groups of a Parquet file."""
    import pyarrow.parquet as parquet

    with fsspec.open(source.url) as opened:
        file = parquet.ParquetFile(opened)
        sizes = [file.metadata.row_group(i).num_rows for i in range(end)]
        for group in range(begin, end):
            column = again(f"{source.url} could not be read", column_of, file, group, field,
                           source.url)
            for number, text in enumerate(column, sum(sizes[:group])):
                if not isinstance(text, str):
                    raise ValueError(f"{source.url}, row {number} has no text: expected a string "
                                     f"in the column {field!r}, found {text!r}")
                yield number, text


def column_of(file: Any, group: int, field: str, url: str):
    """The texts of a row group's column."""
    if field not in file.schema_arrow.names:
        raise ValueError(f"{url} has no column {field!r}: found "
                         f"{', '.join(file.schema_arrow.names)}")
    return file.read_row_group(group, [field]).column(0).to_pylist()


def row_groups(url: str):
    """(row groups, their bytes unpacked) of a Parquet file; ValueError for one that is none."""
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        with fsspec.open(url) as opened:
            file = parquet.ParquetFile(opened).metadata
            groups = [file.row_group(i).total_byte_size for i in range(file.num_row_groups)]
            return len(groups) if file.num_rows else 0, sum(groups)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{url} is no Parquet file, or damaged: {error}") from None
