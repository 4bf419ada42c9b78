"""Downloads: a file from a list of mirrors, resumed, verified, there (or unpacked) whole or not.

Everything unfinished lies in one hidden folder beside the target. It is removed when the
disk is full or no mirror has the right bytes; it stays when the network fails or the reader
stops, so that the next run goes on where this one ended.
"""
import contextlib
import errno
import logging
import os
import pathlib
import shutil
import sys
import tarfile
import time
from collections.abc import Callable, Iterable
from typing import Any

CHUNK = 1 << 16  # bytes read at a time
TIMEOUT = (10, 30)  # seconds to connect, seconds without a byte


class DownloadError(RuntimeError):
    """No mirror gave the file; the message has a line for every mirror."""


def fetch_tar(
    mirrors: Iterable[str], sha256: str, needed: int, folder: str | os.PathLike, unpacked: str,
    tries: int = 4, wait: float = 1.0
):
    """Download a tar file and put its folder `unpacked` into `folder`; returns its path.

    mirrors are addresses of the same file, tried in order, each up to `tries` times with
    `wait` seconds (doubling) in between; `needed` is the room for all of it, in bytes.
    Raises DownloadError if no mirror has the file with this SHA-256, OSError (ENOSPC) if
    the disk is full or becomes full.
    """
    target = pathlib.Path(folder).expanduser() / unpacked
    with unfinished(target, needed) as work:
        archive = fetch(mirrors, sha256, work, tries, wait)
        unpack(archive, work / "new")
        if target.exists():
            os.replace(target, work / "old")
        os.replace(work / "new" / unpacked, target)
    return target


def fetch_file(
    mirrors: Iterable[str], sha256: str, needed: int, path: str | os.PathLike,
    tries: int = 4, wait: float = 1.0
):
    """Download one file to `path`, whole or not at all; the rest is as for `fetch_tar`."""
    path = pathlib.Path(path).expanduser()
    with unfinished(path, needed) as work:
        os.replace(fetch(mirrors, sha256, work, tries, wait), path)
    return path


@contextlib.contextmanager
def unfinished(target: pathlib.Path, needed: int):
    """The hidden folder beside the target, for what is not finished, if there is room for it."""
    work = target.with_name(f".{target.name}.unfinished")
    work.mkdir(parents=True, exist_ok=True)
    with removed_unless_resumable(work), clear_when_full(target.parent, needed):
        if shutil.disk_usage(target.parent).free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        yield work


@contextlib.contextmanager
def removed_unless_resumable(work: pathlib.Path):
    """Remove the folder, except when the network or the reader cut a download short."""
    try:
        yield
    except (DownloadError, KeyboardInterrupt):
        if not part_of(work).exists():
            shutil.rmtree(work)
        raise
    except BaseException:
        shutil.rmtree(work)
        raise
    shutil.rmtree(work)


@contextlib.contextmanager
def clear_when_full(folder: pathlib.Path, needed: int):
    """Say in one sentence that the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(folder).free
        raise OSError(errno.ENOSPC, f"the disk is full: expected room for {needed:,} bytes in "
                      f"{folder}, found {free:,}; nothing half-written was kept") from error


def fetch(mirrors: Iterable[str], sha256: str, work: pathlib.Path, tries: int, wait: float):
    """The verified file in the folder `work`, from the first mirror that has it."""
    failures = []
    for url in mirrors:
        try:
            return fetch_from(url, sha256, work, tries, wait)
        except DownloadError as error:
            failures.append(f"  {url}: {error}")
    raise DownloadError("\n".join([f"expected a file of SHA-256 {sha256}, found none:", *failures]))


def fetch_from(url: str, sha256: str, work: pathlib.Path, tries: int, wait: float):
    """The verified file from one mirror; every failure of it becomes a DownloadError."""
    import pooch
    import requests

    pooch.get_logger().setLevel(logging.WARNING)
    for attempt in range(tries):
        resumed = part_of(work).exists()
        try:
            return pooch.retrieve(url, f"sha256:{sha256}", "archive", work, downloader=resume)
        except requests.RequestException as error:
            failure = f"{type(error).__name__}: {error}"
            if error.response is not None and error.response.status_code < 500:
                break
            time.sleep(wait * 2**attempt if attempt + 1 < tries else 0)
        except ValueError as error:  # pooch found another hash, and removed the file
            failure = str(error).rstrip(".")
            if not resumed:
                break
    raise DownloadError(failure)


def part_of(work: pathlib.Path):
    """Where the bytes are kept until the file is whole."""
    return pathlib.Path(work, "archive.part")


def resume(url: str, output_file: str | os.PathLike, pooch: Any = None):
    """A pooch downloader that asks only for the bytes which are missing (RFC 9110, Range)."""
    import requests

    part = part_of(pathlib.Path(output_file).parent)
    have = part.stat().st_size if part.exists() else 0
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as response:
        if response.status_code != requests.codes.requested_range_not_satisfiable:
            response.raise_for_status()
            goes_on = response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
            save(response, part, have if goes_on else 0)
    os.replace(part, output_file)  # pooch now verifies its SHA-256


def save(response: Any, part: pathlib.Path, have: int):
    """Write the answer behind the first `have` bytes of the file, with a progress bar."""
    import requests
    from tqdm import tqdm

    missing = int(response.headers.get("Content-Length", 0))
    bar = tqdm(total=have + missing, initial=have, unit="B", unit_scale=True, ncols=79)
    with bar, open(part, "ab" if have else "wb") as file:
        for chunk in response.iter_content(CHUNK):
            file.write(chunk)
            bar.update(len(chunk))
    found = part.stat().st_size
    if missing and found != have + missing:
        raise requests.ConnectionError(f"expected {have + missing:,} bytes, found {found:,}")


def unpack(archive: str | os.PathLike, folder: str | os.PathLike):
    """Unpack the files of a tar archive, each with the rights of a new file.

    Python before 3.11.4, which Debian 12 has, knows no `filter` that would see to it. Raises
    DownloadError for a member that is no file or folder, or would land outside.
    """
    root = pathlib.Path(folder).resolve()
    with tarfile.open(archive) as tar:
        for member in tar:
            path = (root / member.name).resolve()
            if not (member.isfile() or member.isdir()) or not path.is_relative_to(root):
                raise DownloadError(f"{os.fspath(archive)}: expected files and folders below the "
                                    f"one that it is unpacked in, found {member.name!r}")
            if member.isfile():
                path.parent.mkdir(parents=True, exist_ok=True)
                with tar.extractfile(member) as packed, open(path, "wb") as file:
                    shutil.copyfileobj(packed, file)


def command(main: Callable, usage: str):
    """Run main(DIR) for a command line of one argument; what goes wrong is one sentence."""
    if len(sys.argv) != 2:
        raise SystemExit(f"usage: {usage}")
    try:
        main(sys.argv[1])
    except (RuntimeError, OSError) as problem:
        raise SystemExit(str(problem)) from None
    except KeyboardInterrupt:
        raise SystemExit("stopped: the same command goes on where it ended") from None
