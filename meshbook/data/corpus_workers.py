"""Who makes a corpus: this process, or a pool of processes; and a test before they start."""
import dataclasses
import hashlib
import multiprocessing
import os
import platform
import sys
from collections.abc import Callable, Iterable
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from importlib.metadata import version
from typing import Any

import fsspec
import tiktoken

from meshbook.data.buckets import Place, again
from meshbook.data.corpus_plan import Plan, claim
from meshbook.data.vocabulary import identity

HEAD = 1 << 12  # bytes of an input that every worker reads


class InProcess:
    """Work in this process, one item after the other."""

    def run(self, job: Callable, items: Iterable):
        """Yield what the job returns for each item, in order."""
        yield from map(job, items)

    def everywhere(self, job: Callable):
        """What the job returns once on each worker."""
        return [job(0)]


class Processes:
    """Work in `count` processes of this machine, each of which begins anew (it is no fork)."""

    def __init__(self, count: int):
        self.count = count

    def run(self, job: Callable, items: Iterable):
        """Yield what the job returns for each item, in order.

        Raises RuntimeError where a process ends before its work, because it was killed or memory
        ran out.
        """
        items = list(items)
        done = 0
        with self._pool(job) as pool:
            try:
                for result in pool.map(_call, items):
                    yield result
                    done += 1
            except BrokenProcessPool:
                raise RuntimeError(
                    f"a worker ended before its work, killed or out of memory: {done} of "
                    f"{len(items)} results had arrived; what is finished is kept, the same call "
                    f"goes on") from None

    def everywhere(self, job: Callable):
        """What the job returns once on each worker: each waits until all have begun."""
        barrier = multiprocessing.get_context("spawn").Barrier(self.count)
        with self._pool(job, barrier) as pool:
            return list(pool.map(_call_together, range(self.count)))

    def _pool(self, job, barrier=None):
        context = multiprocessing.get_context("spawn")
        return futures.ProcessPoolExecutor(
            self.count, mp_context=context, initializer=_begin, initargs=(job, barrier))


def _begin(job, barrier):
    """In a worker: keep the job, which is sent once, not with every item, and where all wait."""
    global _job, _barrier
    _job, _barrier = job, barrier


def _call(item):
    """In a worker: the job, of one item."""
    return _job(item)


def _call_together(item):
    """In a worker: the job, when every worker has arrived here."""
    _barrier.wait(60)
    return _job(item)


@dataclasses.dataclass(frozen=True)
class Inspect:
    """A job: what a worker is, reads and writes, as a dict; `failure` says what it cannot."""

    plan: Plan
    folder: str
    encoding: tiktoken.Encoding

    def __call__(self, item: int):
        who = {"worker": f"{platform.node()}, process {os.getpid()}"}
        try:
            return who | {"failure": None} | self.found(who["worker"])
        except Exception as error:  # whatever it is, it is reported with the worker's name
            return who | {"failure": f"{type(error).__name__}: {error}"}

    def found(self, worker: str):
        """What must be equal on all workers."""
        source, place = self.plan.inputs[0], Place(self.folder)
        files, path = fsspec.core.url_to_fs(source.url)
        head = again(f"{source.url} could not be read", files.cat_file, path, 0, HEAD)
        name = f"test/{hashlib.sha256(worker.encode()).hexdigest()[:16]}"
        place.write(name, head)
        if bytes(place.read(name)) != head:
            raise OSError(f"{place.url}/{name} has other bytes than were written")
        tokens = self.encoding.encode_ordinary(head.decode(errors="replace"))
        return {"Python": platform.python_version(), "NumPy": version("numpy"),
                "tiktoken": version("tiktoken"), "byte order": sys.byteorder,
                "vocabulary": str(identity(self.encoding)),
                "first bytes of the input": hashlib.sha256(head).hexdigest(),
                "their tokens": hashlib.sha256(str(tokens).encode()).hexdigest()}


def check_workers(
    plan: Plan, folder: str | os.PathLike, encoding: tiktoken.Encoding, workers: Any
):
    """See that every worker reads, writes and encodes as this process does, before it begins.

    Returns a dict for each worker. Raises RuntimeError with the name of the first that differs, and
    with what it found, ValueError for a folder of another plan.
    """
    claim(Place(folder), plan)
    job = Inspect(plan, os.fspath(folder), encoding)
    expected, found = job(0), workers.everywhere(job)
    Place(folder).remove("test")
    for each in [expected, *found]:
        if each["failure"]:
            raise RuntimeError(f"the worker {each['worker']} cannot do its work: {each['failure']}")
        for name in expected.keys() - {"worker"}:
            if each[name] != expected[name]:
                raise RuntimeError(f"the worker {each['worker']} is not like this process: "
                                   f"expected {name} {expected[name]}, found {each[name]}")
    return found
