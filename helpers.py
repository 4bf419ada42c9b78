"""What every chapter imports: devices to work on, sizes, and a way to show code."""
import contextlib
import difflib
import gc
import html
import inspect
import logging
import os
import pathlib
import textwrap
import warnings
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

# Set before JAX is imported: its C++ side reads it once.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
gc.set_threshold(1_000_000, 20, 50)  # JAX makes many objects and few circles: it took a 25th
import jax
from jax.extend import backend

from meshbook.hlo.options import ON_CPUS, flags, keep_programs

SIZES = ("full", "laptop", "test")
# Eight simulated devices on two cores may keep each other waiting for long; whoever
# waits for minutes waits for ever, and the process ends with a message (in seconds).
PATIENCE = {
    f"xla_cpu_collective_call_{what}_timeout_seconds": seconds
    for what, seconds in (("warn_stuck", 120), ("terminate", 300))
}


def start(devices: int = 8, quick: bool = False):
    """Give this process at least `devices` devices, and say in one line what it has.

    Accelerators are used when there are enough of them; otherwise the devices are simulated on the
    CPU. `quick` has CPU programs compiled in a third of the time and less optimised, for a page
    whose programs run a few times each. Programs are kept for the next run. Returns the list of
    devices. Call it before any other JAX operation. Raises RuntimeError where JAX, in all processes
    together, runs with fewer devices, ValueError for an unknown MESHBOOK_SIZE.
    """
    _quiet()
    keep_programs(_built("compiled"))
    _simulate(devices, ON_CPUS if quick else {})
    found, alone = jax.devices(), jax.process_count() == 1
    if len(found) < devices and found[0].platform != "cpu" and alone:
        jax.config.update("jax_platforms", "cpu")
        backend.clear_backends()
        found = jax.devices()
    if len(found) < devices:
        advice = "restart the kernel and call start() before any other JAX operation"
        raise RuntimeError(
            f"start({devices}) needs {devices} devices, but JAX already runs with {len(found)} "
            f"({found[0].platform}): {advice if alone else 'give each process more'}")
    jax.config.update("jax_disable_most_optimizations", quick and found[0].platform == "cpu")
    if jax.process_index() == 0:
        print(_summary(found))
    return found


def sized(full: Any, *, laptop: Any, test: Any):
    """Return the value for this run's size: `full`, `laptop` or `test`.

    MESHBOOK_SIZE chooses. Without it the size is full on accelerators, and laptop on CPU devices.
    Raises ValueError for any other MESHBOOK_SIZE.
    """
    return {"full": full, "laptop": laptop, "test": test}[_size()]


def show(obj: Callable, against: Callable | None = None):
    """Return the source of a function or class as a Markdown code fence.

    With `against`, another function or class, the fence is the diff from it to `obj`.
    """
    after = textwrap.dedent(inspect.getsource(obj))
    if against is None:
        return Fence("python", after)
    before = textwrap.dedent(inspect.getsource(against))
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=2, lineterm="")
    return Fence("diff", "\n".join(list(lines)[2:]))


def folded(summary: str, code: str, language: str = "text"):
    """Return a code fence that unfolds below its summary, a line of words."""
    return Fold(language, code, summary)


def profiles():
    """The folder of the runs that chapters trace, where `make tensorboard` looks for them."""
    return _built("profiles")


def refused(function: Callable, *args: Any, by: type[Exception] = Exception, **kwargs: Any):
    """Return what this call says when it refuses: the type and message of its error, wrapped.

    by: the error that is expected; another is raised as it is. AssertionError where none comes.
    """
    try:
        function(*args, **kwargs)
    except by as error:
        lines = f"{type(error).__name__}: {error}".splitlines()
        return "\n".join(textwrap.fill(line, 76) for line in lines)
    raise AssertionError(f"{function.__name__} was expected to refuse this, and did not")


class Bar:
    """A line that fills up from done 0 to done total."""

    def __init__(self, total: int):
        self.total, self.done = total, 0

    def __repr__(self):
        full = 60 * self.done // self.total
        return "█" * full + "░" * (60 - full)


def progress(steps: int):
    """An `on_step` for `fit`: a bar that fills up, in place, as steps are sent off."""
    from IPython.display import DisplayHandle

    bar, shown = Bar(steps), DisplayHandle()
    shown.display(bar)

    def on_step(state, metrics):
        before = repr(bar)
        bar.done += 1
        if repr(bar) != before:
            shown.update(bar)

    return on_step


class Fence:
    """A fenced block of code, which notebooks render as Markdown."""

    def __init__(self, language: str, code: str):
        self.language = language
        self.code = code.rstrip()

    def _repr_markdown_(self):
        return f"```{self.language}\n{self.code}\n```"

    def __repr__(self):
        return self.code


class Fold(Fence):
    """A fenced block of code that is shown when its summary is clicked."""

    def __init__(self, language: str, code: str, summary: str):
        super().__init__(language, code)
        self.summary = summary

    def _repr_markdown_(self):
        summary, fence = html.escape(self.summary), super()._repr_markdown_()
        return f"<details><summary>{summary}</summary>\n\n{fence}\n\n</details>"


def _built(name):
    """A folder of what runs leave behind: in the repository, or in the working directory."""
    root = pathlib.Path(__file__).resolve().parent
    return (root if (root / "_toc.yml").exists() else pathlib.Path.cwd()) / "_build" / name


def _quiet():
    """Keep notices about absent hardware and absent widgets out of the pages."""
    for name in ("jax", "absl", "orbax"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "IProgress not found")  # of tqdm, in a notebook


def _simulate(devices, options):
    """Ask for simulated CPU devices with these options, unless JAX has started already."""
    given = os.environ.get("XLA_FLAGS", "")
    asked = {name: value for name, value in (PATIENCE | options).items() if name not in given}
    os.environ["XLA_FLAGS"] = f"{given} {flags(asked)}".strip()
    if jax.distributed.is_initialized() or jax.config.jax_num_cpu_devices >= devices:
        return  # of several processes each has what it was started with
    with contextlib.suppress(RuntimeError):  # it has started: start() counts what it has
        jax.config.update("jax_num_cpu_devices", devices)


def _size():
    """The size of this run, one of SIZES."""
    default = "laptop" if jax.default_backend() == "cpu" else "full"
    size = os.environ.get("MESHBOOK_SIZE") or default
    if size not in SIZES:
        raise ValueError(f"MESHBOOK_SIZE is {size!r}; expected one of {', '.join(SIZES)}")
    return size


def _summary(found):
    """One line: versions, devices, size, data."""
    kind = "simulated CPU" if found[0].platform == "cpu" else found[0].device_kind
    data = os.environ.get("MESHBOOK_DATA")
    return " · ".join([
        f"jax {version('jax')}, flax {version('flax')}",
        f"{len(found)} {kind} device{'s' if len(found) > 1 else ''}",
        f"size {_size()}",
        f"data {os.path.basename(os.path.normpath(data))}" if data else "data embedded"])
