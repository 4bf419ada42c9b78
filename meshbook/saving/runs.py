"""What a long run needs around its training: a lock, an ear for SIGTERM, metrics on disk."""
import contextlib
import fcntl
import logging
import math
import os
import pathlib
import signal
import threading
import time
from collections.abc import Mapping
from typing import Any


class FolderInUse(RuntimeError):
    """Another run works in this folder."""


class Diverged(FloatingPointError):
    """The loss, or a number of the state, is no longer finite."""


@contextlib.contextmanager
def only_run(folder: str | os.PathLike):
    """Hold the folder for this run alone; FolderInUse if another run holds it.

    The system drops the lock when the process dies, however it dies.
    """
    with open(pathlib.Path(folder, "lock"), "a+", encoding="utf-8") as file:
        os.register_at_fork(after_in_child=file.close)  # a child must not outlive us with it
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise FolderInUse(f"{folder} belongs to another run ({file.read().strip()}): expected "
                              "a folder of its own for each run, or that one to end") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} since {time.ctime()}\n")
        file.flush()
        yield


@contextlib.contextmanager
def sigterm():
    """A function that says whether the process was asked to end (SIGTERM) in this block.

    Python hears signals in its main thread only; in another one the answer is always no.
    """
    asked = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


class Metrics:
    """Numbers by step, written as TensorBoard's event files: `tensorboard --logdir FOLDER`."""

    def __init__(self, folder: str | os.PathLike):
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        # TensorBoard reads the files by name, and a name begins with the second.
        while list(pathlib.Path(folder).glob(f"events.out.tfevents.{int(time.time()):010d}.*")):
            time.sleep(0.05)
        self.writer = EventFileWriter(str(folder))
        self.flush, self.close = self.writer.flush, self.writer.close

    def restart(self, step: int):
        """From this step on, what earlier processes wrote no longer counts."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self.add(step, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, values: Mapping[str, Any]):
        """Add a dict of numbers; they are kept in float32."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=name, simple_value=float(value))
                   for name, value in values.items()]
        self.add(step, summary=Summary(value=scalars))

    def add(self, step: int, **what: Any):
        from tensorboard.compat.proto.event_pb2 import Event

        self.writer.add_event(Event(wall_time=time.time(), step=step, **what))


class NoMetrics:
    """What process 1 and those after it have in place of Metrics: process 0 writes for all."""

    def __init__(self, folder: str | os.PathLike):
        self.restart = self.write = self.flush = self.close = lambda *_: None


def read_metrics(folder: str | os.PathLike):
    """What all processes of a run wrote, as {name: {step: value}}, by TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns of every restart
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {name: {event.step: event.value for event in events.Scalars(name)}
            for name in events.Tags()["scalars"]}


def check_finite(step: int, metrics: Mapping[str, float]):
    """Diverged if the loss of this step is NaN or infinite."""
    if not math.isfinite(metrics["loss"]):
        raise Diverged(f"step {step}: expected a finite loss, found {metrics['loss']}")
