"""Execute each chapter once for each state of what it depends on, and say so."""

import hashlib
import os
import platform
import shutil
import sys
import time
from importlib.metadata import version
from pathlib import Path

from execution import execute_stale
from myst_nb.sphinx_ import NbMetadataCollector
from sphinx.util import logging

LOGGER = logging.getLogger(__name__)
ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("helpers.py", "meshbook/**/*.py", "requirements.lock", "results/*.json")
SETTINGS = ("MESHBOOK_", "JAX_", "XLA_")
KEPT = 4


def sources(root):
    """Name and content of every file that a chapter's outputs depend on."""
    files = sorted(path for pattern in SOURCES for path in root.glob(pattern))
    return [(str(path.relative_to(root)), path.read_bytes()) for path in files]


def settings(environ):
    """The environment variables that reach a chapter."""
    return sorted(item for item in environ.items() if item[0].startswith(SETTINGS))


def data(folder):
    """Name, size and time of change of every file in the data folder."""
    if not folder:
        return []
    files = sorted(path for path in Path(folder).glob("**/*") if path.is_file())
    stats = [(path, path.stat()) for path in files]
    return [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats]


def cache_key(root=ROOT, environ=os.environ):
    """A name for the state of everything outside a chapter that shapes its outputs."""
    versions = [platform.python_version(), *map(version, ("jax", "flax", "numpy"))]
    state = [sources(root), settings(environ), data(environ.get("MESHBOOK_DATA")), versions]
    return hashlib.sha256(repr(state).encode()).hexdigest()[:16]


def choose_cache(app, config):
    """Point the chapters at this repository, and the cache at this state of it."""
    if folder := os.environ.get("MESHBOOK_DATA"):
        os.environ["MESHBOOK_DATA"] = os.path.abspath(folder)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    caches = ROOT / "_build" / ".execution"
    cache = caches / cache_key()
    cache.mkdir(parents=True, exist_ok=True)
    cache.touch()
    forget(caches)
    config.nb_execution_cache_path = str(cache)
    os.environ["IPYTHONDIR"] = str(profile(ROOT / "_build" / ".ipython"))


def profile(folder):
    """An IPython of the book's own: no start-up files of the reader's, no notices."""
    settings = folder / "profile_default" / "ipython_kernel_config.py"
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text("get_config().IPKernelApp.log_level = 40\n")
    return folder


def forget(caches):
    """Remove all caches but the few used last."""
    by_use = sorted(caches.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    for path in by_use[:-KEPT]:
        shutil.rmtree(path)


def failed(app, env, added, changed, removed):
    """The pages whose execution failed: they are read again, and fail again."""
    runs = {name: NbMetadataCollector.get_exec_data(env, name) for name in env.found_docs}
    return [name for name, run in runs.items() if run and not run["succeeded"]]


def execute(app, env, docnames):
    """Execute the pages that are to be read, where the cache does not have them."""
    app.meshbook_executed = execute_stale(env, docnames)
    for name, page in app.meshbook_executed.items():
        if page.error is not None:
            LOGGER.warning("executing this page failed:\n%s", page.error[1], location=name)


def report(app, doctree):
    """Print a line for each page from the cache; remember of each that failed that it did."""
    env, name = app.env, app.env.docname
    page = app.meshbook_executed.get(name)
    if page is not None and page.error is not None:
        NbMetadataCollector.set_exec_data(env, name, {
            "mtime": time.time(), "runtime": page.seconds, "method": "cache", "succeeded": False,
            "error": page.error[0], "traceback": page.error[1]})
    run = NbMetadataCollector.get_exec_data(env, name)
    if page is None and run is not None:
        print(f"  {Path(name).name:30} from cache (took {run['runtime']:.0f} s)", flush=True)


def setup(app):
    """Register with Sphinx."""
    sys.stdout.reconfigure(line_buffering=True)
    app.connect("config-inited", choose_cache, priority=100)
    app.connect("env-get-outdated", failed)
    app.connect("env-before-read-docs", execute)
    app.connect("doctree-read", report)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
