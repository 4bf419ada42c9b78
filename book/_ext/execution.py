"""Execute the pages that the cache does not have, two at a time, before Sphinx reads any.

A cell that measures time has the tag `alone`: while it runs, no other page does. Pages with such
cells come last. `execution: {seconds: N}` in a page's header says about how long it takes: of the
others the longest begin first.
"""

import multiprocessing
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from glob import escape
from pathlib import Path

from jupyter_cache import get_cache
from jupyter_cache.base import CacheBundleIn
from jupyter_cache.executors.utils import single_nb_execution
from myst_nb.core.read import create_nb_reader

TOGETHER = 2
turns = None  # this process's, where pages are executed in several


class Turns:
    """The machine's places, for as many pages as run together: one each, or all of them for one.

    gate: only who holds it may wait for places, so that nobody passes whoever waits for all.
    """

    def __init__(self, gate, free, places):
        self.gate, self.free, self.places, self.held = gate, free, places, 0

    def take(self, places):
        """Give up the places that this page has, and wait for so many."""
        self.give()
        with self.gate:
            while self.held < places:
                self.free.acquire()
                self.held += 1

    def give(self):
        """Give up all places that this page has."""
        while self.held:
            self.held -= 1
            self.free.release()

    def before(self, cell, cell_index):
        """Take what this cell needs."""
        self.take(self.places if is_alone(cell) else 1)


def is_alone(cell):
    """Whether nothing else may run while this cell does."""
    return "alone" in cell.metadata.get("tags", ())


def begin(*shared):
    """In a new process: share the machine's places with the others."""
    global turns
    turns = Turns(*shared)


@dataclass
class Page:
    """A page with code: its name, its file, its cells, and once it has run, how that ended.

    seconds: how long it took; error: the exception's name and its traceback, or None.
    """

    name: str
    path: Path
    notebook: dict
    seconds: float | None = None
    error: tuple | None = None

    @property
    def place(self):
        """Its place in the order: with cells that run alone last, else the longest first."""
        header = self.notebook.metadata.get("execution", {})
        return any(map(is_alone, self.notebook.cells)), -header.get("seconds", 0)


def read(env, name):
    """A page as Sphinx will read it, or None where it has no code."""
    path = Path(env.doc2path(name))
    text = path.read_text("utf-8-sig")
    reader = create_nb_reader(str(path), env.myst_config, env.mystnb_config, text)
    return reader and Page(name, path, reader.read(text))


def stale(env, names, cache):
    """The pages among these that the cache does not have."""
    for page in filter(None, (read(env, name) for name in names)):
        try:
            cache.match_cache_notebook(page.notebook)
        except KeyError:
            yield page


def execute(page, timeout):
    """Run a page's cells in a kernel of its own, in its folder; returns the page with outputs."""
    turns.take(1)  # a kernel's start is work, too
    try:
        result = single_nb_execution(page.notebook, cwd=str(page.path.parent), timeout=timeout,
                                     allow_errors=False, on_cell_execute=turns.before)
    except Exception as error:  # the kernel died, or never began
        page.error = type(error).__name__, traceback.format_exc()
        return page
    finally:
        turns.give()
    page.seconds = result.time
    if result.err is not None:
        page.error = type(result.err).__name__, result.exc_string
    return page


def execute_all(pages, timeout, together=TOGETHER):
    """Run pages side by side; yields each when it is done."""
    new = multiprocessing.get_context("spawn")  # a fork of a process with threads may never go on
    shared = new.Lock(), new.Semaphore(together), together
    with ProcessPoolExecutor(together, new, initializer=begin, initargs=shared) as pool:
        running = [pool.submit(execute, page, timeout)
                   for page in sorted(pages, key=lambda page: page.place)]
        for each in as_completed(running):
            yield each.result()


def keep(page, cache):
    """Give the outputs of a page to the cache."""
    data = {"execution_seconds": page.seconds}
    cache.cache_notebook_bundle(CacheBundleIn(page.notebook, str(page.path), data=data),
                                check_validity=False, overwrite=True)


def execute_stale(env, names):
    """Execute what is stale among these pages, and keep it: {name: page} of those.

    Only this process writes the cache. A page that failed is not kept, and Sphinx is told not to
    execute it once more.
    """
    config = env.mystnb_config
    cache = get_cache(config.execution_cache_path)
    done = {}
    for page in execute_all(list(stale(env, names, cache)), config.execution_timeout):
        done[page.name] = page
        if page.error is None:
            keep(page, cache)
            print(f"  {page.path.stem:30} executed in {page.seconds:.0f} s", flush=True)
        else:
            config.execution_excludepatterns = [*config.execution_excludepatterns,
                                                escape(page.path.as_posix())]
            print(f"  {page.path.stem:30} FAILED: {page.error[0]}", flush=True)
    return done
