"""Profile the steps of a training, and read the profile back as a table.

`trace` writes what TensorBoard's profile plugin opens; `read_trace` makes records of it: which
operation ran on which device, from when to when, in which step. Nothing here knows of a model.

On simulated CPU devices the times tell who waits for whom, not how fast anything is: a collective's
time there begins when a device arrives at it, so it holds the wait for the devices that come later.
"""

import collections
import itertools
import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax

from meshbook.profiling import xplane
from meshbook.text import markdown_table, text_table


class Record(NamedTuple):
    """One operation on one device; start and duration in ms, from the first operation's start."""

    device: int
    operation: str
    kind: str
    start: float
    duration: float
    step: int | None

    @property
    def end(self):
        """When it ended, in ms."""
        return self.start + self.duration


class Gap(NamedTuple):
    """A time without any operation on a device, in ms; `step` is that of what came next."""

    device: int
    start: float
    duration: float
    step: int | None


class Share(NamedTuple):
    """All executions of an operation: ms of all devices together, its share, how many."""

    operation: str
    kind: str
    ms: float
    share: float
    count: int


def trace(step: Callable, name: str | None, warmup: int = 5, steps: int = 30,
          folder: str | os.PathLike = "_build/profiles"):
    """Run some steps to warm up, then record the next ones as a run with a name of its own.

    step: called with 0, 1, 2, ...; it keeps its own state and returns arrays that are ready when
    the step's work is done. Returns the run's folder, `folder/name`. A run of the same name is
    replaced when the new one is complete. Raises ValueError for a name that is no file name, for
    numbers of steps that make no sense and where `step` returns no arrays, FileExistsError where
    the folder of that name holds something else.

    >>> read_trace(trace(step, "mesh_4_2_batch_128"))
    """
    _check(name, warmup, steps)
    target = pathlib.Path(folder, name)
    if target.exists() and os.listdir(target) != ["plugins"]:
        raise FileExistsError(f"{target} is in the way: expected nothing there, or an older run "
                              "(a folder with `plugins` alone), found something else")
    target.parent.mkdir(parents=True, exist_ok=True)
    if warmup:
        _finish([step(number) for number in range(warmup)][-1])
    with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=folder) as scratch:
        with jax.profiler.trace(f"{scratch}/new", profiler_options=_options()):
            for number in range(warmup, warmup + steps):
                with jax.profiler.StepTraceAnnotation("step", step_num=number):
                    results = step(number)
            _finish(results)
        _replace(pathlib.Path(scratch, "new"), target, pathlib.Path(scratch, "old"))
    return target


def _check(name, warmup, steps):
    if not isinstance(name, str) or not re.fullmatch(r"\w[\w.\-]*", name, re.ASCII):
        raise ValueError("expected a name of letters, digits, `_`, `-` and `.`, such as "
                         f"mesh_4_2_batch_128; found {name!r}")
    if warmup < 0 or steps < 1:
        raise ValueError("expected 0 or more steps to warm up and 1 or more to record; found "
                         f"warmup={warmup}, steps={steps}")


def _options():
    """No Python calls and few of the runtime's: the devices' operations, and the programs."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, 1
    return options


def _finish(results):
    """Wait until the devices are done with a step."""
    if not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(results)):
        raise ValueError("expected step to return arrays, to wait for them before the recording "
                         f"ends; found {results!r}")
    jax.block_until_ready(results)


def _replace(new, target, old):
    """Put a folder in the place of another, which stays where it is if that fails."""
    if target.exists():
        os.rename(target, old)
    try:
        os.rename(new, target)
    except OSError:
        if old.exists():
            os.rename(old, target)
        raise


def read_trace(folder: str | os.PathLike):
    """Read a run: all operations of its devices, as a Trace.

    folder: what `trace` returned, or any folder with one profile in it, or a `.xplane.pb` file.
    Reads profiles of CPU, GPU (the streams) and TPU (the line of the cores' operations). An
    operation that only contains others, such as a loop, is left out: they stand for it. On a CPU,
    a program that JAX took from its compilation cache is not in the file, and the kinds of its
    operations are told by their names. Raises FileNotFoundError where there is no profile,
    ValueError where there are several, where the file is broken, and where nothing ran on a device
    in it.
    """
    profile = xplane.read_profile(_only_file(pathlib.Path(folder)))
    events, step_of = xplane.leaves(profile), xplane.step_of(profile)
    begin = profile.events[0].start
    return Trace(
        Record(event.device, event.operation, kind,
               (event.start - begin) / 1e6, (event.end - event.start) / 1e6, step_of(event))
        for event, kind in zip(events, xplane.kinds(profile, events), strict=True))


def _only_file(folder):
    if folder.is_file():
        return folder
    if not folder.is_dir():
        raise FileNotFoundError(f"expected the folder of a run, found nothing at {folder}")
    found = sorted(folder.rglob("*.xplane.pb"))
    if not found:
        raise FileNotFoundError(f"expected a profile (*.xplane.pb) in {folder}, found none")
    if len(found) > 1:
        names = ", ".join(str(path.relative_to(folder)) for path in found[:6])
        raise ValueError(f"expected one profile in {folder}, found {len(found)}: {names}; name one")
    return found[0]


class Trace:
    """The records of a run, by time; prints as the table of its longest operations.

    Times are ms. What is added up over devices is device time: two devices that are busy for 1 ms
    at once make 2 ms. On a CPU mesh a collective's time holds the wait for the last device.
    """

    def __init__(self, records: Iterable[Record]):
        self.records = tuple(sorted(records, key=lambda record: record.start))

    def only(self, step: int | None = None, device: int | None = None):
        """The part of the trace in one step, on one device, or both."""
        return Trace(each for each in self.records
                     if step in (None, each.step) and device in (None, each.device))

    def by_operation(self):
        """{operation: ms}, longest first."""
        return self._sum(lambda record: record.operation)

    def by_kind(self):
        """{"compute", "collective" or "copy": ms}, longest first."""
        return self._sum(lambda record: record.kind)

    def by_device(self):
        """{device: ms in which it ran operations}, by device."""
        return dict(sorted(self._sum(lambda record: record.device).items()))

    def _sum(self, key):
        total = collections.Counter()
        for record in self.records:
            total[key(record)] += record.duration
        return dict(total.most_common())

    def share(self, kind: str):
        """The part of the operations' time that one kind takes, from 0 to 1."""
        kinds = self.by_kind()
        return kinds.get(kind, 0.0) / (sum(kinds.values()) or 1.0)

    def spans(self):
        """{step: (start, end)}: from its first operation on any device to the last one's end.

        Steps are sent off before earlier ones are done, so on different devices they may overlap.
        """
        found = collections.defaultdict(list)
        for record in self.records:
            if record.step is not None:
                found[record.step].append(record)
        return {step: (records[0].start, max(each.end for each in records))
                for step, records in sorted(found.items())}

    def step_times(self):
        """{step: ms from its first operation on any device to the end of the last one}."""
        return {step: end - start for step, (start, end) in self.spans().items()}

    def gaps(self):
        """The times between operations of the steps in which a device had none, as Gaps."""
        found, busy_until = [], {}
        for record in self.records:
            if record.step is None:
                continue
            until = busy_until.setdefault(record.device, record.start)
            if record.start > until:
                gap = record.start - until
                found.append(Gap(record.device, until, gap, record.step))
            busy_until[record.device] = max(until, record.end)  # streams of a device overlap
        return found

    def exposed(self, kind: str = "collective"):
        """{device: ms in which it ran operations of this kind, and of no other}, by device."""
        edges = collections.defaultdict(list)
        for record in self.records:
            own = record.kind == kind
            edges[record.device] += [(record.start, own, 1), (record.end, own, -1)]
        return {device: _alone(sorted(own)) for device, own in sorted(edges.items())}

    def operations(self, top: int | None = None):
        """Shares of all operations, longest first; behind the first `top` the rest as one."""
        total, count = collections.Counter(), collections.Counter()
        for record in self.records:
            total[record[1:3]] += record.duration
            count[record[1:3]] += 1
        whole = sum(total.values()) or 1.0
        rows = [Share(*key, ms, ms / whole, count[key]) for key, ms in total.most_common()]
        rest = rows[top:] if top is not None else []
        if len(rest) < 2:
            return Operations(rows)
        sums = (sum(column) for column in itertools.islice(zip(*rest, strict=True), 2, None))
        return Operations([*rows[:top], Share(f"{len(rest)} others", "", *sums)])

    def frame(self):
        """The records as a pandas table; a step that is not known is <NA>, others are whole.

        Raises ImportError where pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise ImportError("frame() makes a pandas table: expected pandas, found none; "
                              "`pip install pandas`, or use the records themselves") from None
        return pandas.DataFrame(self.records, columns=Record._fields).astype({"step": "Int64"})

    def __repr__(self):
        return repr(self.operations(10))

    def _repr_markdown_(self):
        return self.operations(10)._repr_markdown_()


def _alone(edges):
    """The time in which only the kind that is asked for runs: of [(when, own kind?, +1 or -1)]."""
    running, alone, before = [0, 0], 0.0, 0.0
    for at, own, change in edges:
        if running[True] and not running[False]:
            alone += at - before
        running[own] += change
        before = at
    return alone


class Operations(list):
    """Shares of operations; prints as an aligned table."""

    header = ("operation", "kind", "ms", "share", "count")

    def rows(self):
        """The table's cells."""
        return [(each.operation, each.kind, f"{each.ms:,.2f}", f"{each.share:.1%}",
                 f"{each.count:,}") for each in self]

    def __repr__(self):
        return text_table(self.header, self.rows(), numbers=3)

    def _repr_markdown_(self):
        return markdown_table(self.header, self.rows(), numbers=3)
