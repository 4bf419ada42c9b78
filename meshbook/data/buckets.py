"""Folders and buckets alike: files that are written whole or not at all, and read again on failure.

A place is a folder of this machine or a URL that fsspec knows, such as gs://bucket/folder or
memory://folder. What fails for a moment is tried again; what fails for good is one sentence.
"""
import hashlib
import json
import os
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem

from meshbook.data.token_files import UNFINISHED, whole_or_not_at_all

FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
TRIES = 4  # attempts
WAIT = 0.25  # seconds before the second, doubled for each one more


class Place:
    """A folder or a bucket's prefix, with the files below it by name.

    Every call that fails with an OSError is made again, TRIES times in all with WAIT seconds
    (doubling) in between; then OSError says what failed. A full disk and a missing file are final.
    """

    def __init__(self, url: str | os.PathLike):
        self.url = os.fspath(url).rstrip("/")
        self.files, self.root = fsspec.core.url_to_fs(self.url)
        self.is_local = isinstance(self.files, LocalFileSystem)

    def path(self, name: str):
        """Where a file of this name is, as fsspec says it."""
        return f"{self.root.rstrip('/')}/{name}"

    def read(self, name: str):
        """The bytes of a file, uint8 (N,): a memory map in a folder, in memory from a bucket."""
        path = self.path(name)
        if not self.is_local:
            content = again(f"{self.url}/{name} could not be read", whole, self.files, path)
            return np.frombuffer(content, np.uint8)
        return np.memmap(path, np.uint8, "r") if os.path.getsize(path) else np.empty(0, np.uint8)

    def write(self, name: str, content: bytes, flush: bool = True):
        """Write a file, which has its name only when all of it is there; flush: to the disk."""
        if self.is_local:
            with whole_or_not_at_all(pathlib.Path(self.path(name)), flush) as file:
                file.write(content)
            return
        # An object store shows an object when all of it has arrived: that is its own rename.
        again(f"{self.url}/{name} could not be written",
              self.files.pipe_file, self.path(name), content)

    def names(self, folder: str = ""):
        """The names of what is in a folder below, sorted; none where there is no such folder.

        What is still being written, or was when its writer was killed, has no name yet.
        """
        path = self.path(folder).rstrip("/")
        self.files.invalidate_cache()
        try:
            found = again(f"{self.url} could not be listed", self.files.ls, path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = (each.rstrip("/").rpartition("/")[2] for each in found)
        return sorted(name for name in names if not name.endswith(UNFINISHED))

    def remove(self, folder: str):
        """Remove a folder below with all that is in it, if it is there."""
        path = self.path(folder)
        if self.files.exists(path):
            again(f"{self.url}/{folder} could not be removed", self.files.rm, path, recursive=True)

    def sweep(self):
        """Remove what killed writers left in a folder; nobody else may write there meanwhile."""
        for path in pathlib.Path(self.root).glob(f".*{UNFINISHED}") if self.is_local else ():
            path.unlink(missing_ok=True)


def whole(files: Any, path: str):
    """The bytes of an object; OSError where fewer come than the store says that it has."""
    return exactly(files, path, 0, files.size(path))


def exactly(files: Any, path: str, start: int, stop: int):
    """The bytes of a range, or OSError where fewer come."""
    content = files.cat_file(path, start, stop)
    if len(content) != stop - start:
        raise OSError(f"expected {stop - start:,} bytes from byte {start:,}, found "
                      f"{len(content):,}")
    return content


def again(failure: str, function: Callable, *arguments: Any, **named: Any):
    """What a call returns, made TRIES times if it must; then OSError, beginning with failure."""
    for attempt in range(1, TRIES + 1):
        try:
            return function(*arguments, **named)
        except FINAL:
            raise
        except OSError as error:
            if attempt == TRIES:
                raise OSError(f"{failure}: {TRIES} attempts failed, the last with "
                              f"{type(error).__name__}: {error}") from error
            time.sleep(WAIT * 2**(attempt - 1))


def sealed(facts: Mapping[str, Any]):
    """The bytes of a JSON file whose last entry is the SHA-256 of the others."""
    text = json.dumps(facts, indent=1, ensure_ascii=False)
    return json.dumps({**facts, "sha256": sha256_of(text)}, indent=1, ensure_ascii=False).encode()


def unsealed(name: str, content: bytes, format: str):
    """The facts in such a file, its "sha256" among them; ValueError for one that was changed."""
    try:
        facts = json.loads(content)
        bare = {key: value for key, value in facts.items() if key != "sha256"}
        if sealed(bare) == content and facts["format"] == format:
            return facts
    except (ValueError, AttributeError, LookupError):
        pass
    raise ValueError(f"{name} is damaged, or of another kind: expected a {format!r} with its own "
                     f"SHA-256, found {content[:40]!r} in {len(content):,} bytes")


def sha256_of(text: str):
    """The SHA-256 of a text in UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()
