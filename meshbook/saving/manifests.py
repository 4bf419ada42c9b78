"""A manifest: the last file written into a folder, which says what the folder must hold.

It names every other file with its size and SHA-256, says whatever else its writer wants
to be known, and carries a SHA-256 of itself: no byte of the folder changes unnoticed. It is
written when all that it names is on the disk: a power cut cannot leave it without its files.
"""
import hashlib
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

NAME = "manifest.json"


class Damaged(ValueError):
    """A folder that is not what its manifest says; the message names every such file."""


def write_manifest(folder: str | os.PathLike, content: dict[str, Any],
                   files: dict[str, dict] | None = None):
    """Describe every file of a finished folder; the manifest appears whole or not at all.

    content: a dict that is kept beside the files. files: {name: size and SHA-256} where those who
    wrote them have measured and synchronised them. Each file and folder is on the disk before the
    manifest is, and the manifest before this returns. Raises TypeError as check_json() does.
    """
    folder = pathlib.Path(folder)
    check_json(content)
    paths = list(folder.rglob("*")) if files is None else []
    for path in [*paths, folder]:
        sync(path)
    if files is None:
        files = {path.relative_to(folder).as_posix(): measure(path)
                 for path in paths if path.is_file()}
    unfinished = folder / f"{NAME}.unfinished"
    unfinished.write_bytes(sealed(content | {"files": files}))
    sync(unfinished)
    os.replace(unfinished, folder / NAME)
    sync(folder)


def sync(path: str | os.PathLike):
    """Wait until a file's bytes, or a folder's entries, are on the disk.

    Where the system can be told so, it forgets its copy: the next read is one of the disk.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if hasattr(os, "posix_fadvise"):  # not on macOS
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def make_folder(path: pathlib.Path):
    """Make a folder, with those above it that are missing, so that a power cut leaves them."""
    new = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in new:
        sync(each.parent)


def check_json(value: Any):
    """TypeError for what JSON cannot hold or would not give back as it was."""
    try:
        same = json.loads(json.dumps(value, allow_nan=False)) == value
    except (TypeError, ValueError):
        same = False
    if not same:
        raise TypeError(f"expected what JSON gives back unchanged, found {value!r}")


def verify(folder: str | os.PathLike, later: str | None = None):
    """The content of the manifest, once every file was read; Damaged where one differs.

    later: how the names of files end of which only the size is looked at, because whoever reads
    them verifies what is read.
    """
    content = read_manifest(folder)
    faults = [fault(pathlib.Path(folder, name), expected, bool(later and name.endswith(later)))
              for name, expected in content.pop("files").items()]
    if any(faults):
        raise Damaged("; ".join(filter(None, faults)))
    return content


def read_manifest(folder: str | os.PathLike):
    """The content of the manifest, files included; Damaged if it is not as it was written."""
    path = pathlib.Path(folder, NAME)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Damaged(f"{path}: expected a manifest, found {what_is_there(error)}") from error
    try:
        content = json.loads(data)
        del content["sha256"]
        intact = sealed(content) == data
    except (ValueError, LookupError, TypeError):
        intact = False
    if not intact:
        raise Damaged(f"{path}: expected a manifest that its own SHA-256 confirms, "
                      f"found {len(data):,} bytes that it does not confirm")
    return content


def sealed(content: dict[str, Any]):
    """The bytes of a manifest: the content and its SHA-256, in the one way they are written."""
    encode = lambda x: json.dumps(x, indent=1, sort_keys=True, allow_nan=False).encode()
    return encode(content | {"sha256": hashlib.sha256(encode(content)).hexdigest()})


def measure(path: str | os.PathLike):
    """The size and the SHA-256 of a file."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def fault(path: str | os.PathLike, expected: Mapping[str, Any], size_only: bool = False):
    """What is wrong with a file, in words; None if nothing is."""
    words = "{bytes:,} bytes of SHA-256 {sha256}".format_map
    try:
        if size_only and os.path.getsize(path) == expected["bytes"]:
            return None
        found = measure(path)
    except OSError as error:
        return f"{path}: expected {words(expected)}, found {what_is_there(error)}"
    if found != expected:
        return f"{path}: expected {words(expected)}, found {words(found)}"
    return None


def what_is_there(error: OSError):
    """Nothing, or what keeps a file from being read."""
    return "none" if isinstance(error, FileNotFoundError) else f"one unreadable ({error.strerror})"
