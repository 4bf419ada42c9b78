"""Checkpoints: save while training, verify, go on after a fall, also on another mesh.

    with Checkpoints(folder, keep=3) as checkpoints:
        state, key = checkpoints.resume(state, stream, key)
        rest = itertools.islice(stream, steps - int(state.step))
        state, _ = fit(state, rest, key, checkpoints.on_step(stream, key, every=100))

FOLDER/40/ is step 40: the arrays, and a manifest that was written last. FOLDER/metrics/ is for
TensorBoard, FOLDER/progress says when what happened, FOLDER/.saving/ is what is half there,
FOLDER/lock keeps others out.

A file system with POSIX renames, fsync and locks, which all processes of the run share: no bucket.
Every save holds one copy of a process's own shards in its host's memory.
"""
import contextlib
import copy
import os
import pathlib
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any

import jax

from meshbook.saving import agreement, checkpoint_files, manifests, parts, runs
from meshbook.saving.checkpoint_files import OtherModel, newest, steps
from meshbook.saving.contents import (
    arrays, check_sound, decode_key, decode_position, describe, encode_key, encode_position,
    host_copy,
)
from meshbook.saving.identities import OtherRun, check_run, identity_of, versions
from meshbook.saving.progress import Progress
from meshbook.training import TrainState

__all__ = ["Checkpoints", "NotSaved", "OtherModel", "OtherRun", "restore", "steps"]


class NotSaved(RuntimeError):
    """A checkpoint could not be written; those before it are as they were."""


class Checkpoints:
    """The checkpoints of one run, in a folder of its own; used as a context.

    keep: how many of the newest remain. A step counts once it was read back from the disk
    and verified, and only then is an older one deleted; one known to be damaged never is.
    Inside the block the folder is locked, SIGTERM means "save, then exit with 0", and
    `metrics` (runs.Metrics) writes for TensorBoard. Leaving it saves the last step.
    With several JAX processes each makes one and calls the same methods at the same steps: each
    writes its own shards, process 0 alone keeps the lock, the metrics and the progress, and a
    SIGTERM of one is one of all. Raises FolderInUse if another run is at work there.
    """

    def __init__(self, folder: str | os.PathLike, keep: int = 3):
        if keep < 1:
            raise ValueError(f"keep is a number of checkpoints, at least 1; found {keep}")
        self.together, self.first = jax.process_count() > 1, jax.process_index() == 0
        self.folder, self.keep = pathlib.Path(folder).absolute(), keep
        self.newest, self.skipped = -1, set()
        self.identity = self.stream = self.latest = self.waiting = self.pending = None

    def __enter__(self):
        manifests.make_folder(self.folder)
        with contextlib.ExitStack() as stack:
            self.lock(stack)
            self.asked_to_end = stack.enter_context(runs.sigterm())
            self.any_asked = agreement.AnyOf().raised if self.together else bool
            metrics = (runs.Metrics if self.first else runs.NoMetrics)(self.folder / "metrics")
            self.metrics = stack.enter_context(contextlib.closing(metrics))
            self.progress = Progress(self.folder if self.first else None)
            stack.enter_context(contextlib.closing(self.progress))
            self.thread = stack.enter_context(ThreadPoolExecutor(1))
            self.stack = stack.pop_all()
        return self

    def lock(self, stack: contextlib.ExitStack):
        """Hold the folder: process 0 does, and tells the others if it cannot."""
        fault = ""
        try:
            if self.first:
                stack.enter_context(runs.only_run(self.folder))
        except runs.FolderInUse as error:
            fault = str(error)
        if fault := agreement.told_by_all("lock", fault)[0]:
            raise runs.FolderInUse(fault)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None
    ):
        try:
            with self.stack:
                self.record()
                if error is None and self.latest and not self.latest[0].step.is_deleted():
                    self.save(*self.latest)
                self.wait()
                if error is None or isinstance(error, SystemExit):
                    self.progress.note("end", self.newest)
        except Exception as failure:
            if error is None or isinstance(error, SystemExit):
                raise
            error.add_note(f"While ending the run: {type(failure).__name__}: {failure}")
        if error is None and self.asked_to_end():
            raise SystemExit(0)

    def resume(self, state: TrainState, stream: Iterator, key: jax.Array):
        """(state, key) of the newest step that verifies, the stream set to its position.

        Comes before the first save, since it says which run this is: the stream's data, seed
        and batch, the model's configuration, the optimizer and the key that the run began with
        are kept in every checkpoint. Raises OtherRun for one of another run, naming what
        differs, and warns of other versions. The mesh may be another: the arrays come sharded
        as this state's. Without any checkpoint, state and key come back as they are. A damaged
        one is named in a warning and skipped. Raises OtherModel.
        """
        identity = identity_of(state, stream, key)
        agreement.check_same("run", identity)
        check = partial(check_run, identity=identity)
        self.newest, manifest, state = newest(self.folder, state, check)
        self.identity, self.stream = identity, stream
        self.skipped = {step for step in steps(self.folder) if step > self.newest}
        self.metrics.restart(self.newest + 1)
        self.progress.note("begin", self.newest)
        if manifest is None:
            return state, key
        stream.set_state(decode_position(manifest["position"]))
        return state, decode_key(manifest["key"])

    def on_step(self, stream: Iterator, key: jax.Array, every: int):
        """A callback for fit(): metrics of each step, a checkpoint of each `every`-th.

        stream: the one that resume() was given and that fit() draws from, itself and not a
        wrapper that reads ahead: get_state() must be the position after this step's batch.
        Raises Diverged one step after a loss that is not finite, NotSaved one step after a
        failed save, and SystemExit(0) once SIGTERM came and the step is saved.
        """
        if stream is not self.stream:
            raise ValueError(f"expected the stream that resume() was given, {self.stream}, "
                             f"found {stream}")
        if every < 1:
            raise ValueError(f"every is a number of steps, at least 1; found {every}")
        step = None

        def callback(state, metrics):
            nonlocal step
            if self.pending and self.pending.done():
                self.wait()
            self.record()  # of the step before this one: the host does not wait
            step = int(state.step) if step is None else step + 1
            self.waiting = step, metrics
            self.latest = state, copy.deepcopy(stream.get_state()), key
            end = self.any_asked(self.asked_to_end())
            if step % every == 0 or end:
                self.save(*self.latest)
            if end:
                self.wait()
                raise SystemExit(0)

        return callback

    def save(self, state: TrainState, position: Any, key: jax.Array):
        """Copy the state to the host, write it in the background; a step saved already is left.

        position: what the stream's get_state() returned, JSON values or bytes; key: the
        run's. A state that is not finite is not saved: raises Diverged. Raises ValueError
        before resume() was called, and NotSaved.
        """
        self.record()
        self.wait()
        step = int(state.step)
        if step == self.newest:
            return
        self.check_order(step)
        check_sound(step, state)
        content = dict(step=step, position=encode_position(position), key=encode_key(key),
                       identity=self.identity, versions=versions(),
                       leaves=describe(arrays(state)))
        with self.clear_errors(step):
            self.metrics.flush()  # a checkpoint never knows of steps that metrics do not
            if self.first:
                shutil.rmtree(self.folder / ".saving", ignore_errors=True)
                (self.folder / ".saving").mkdir()
        copy_of = parts.own_shards if self.together else host_copy
        self.pending = self.thread.submit(self.write, step, copy_of(arrays(state)), content)

    def wait(self):
        """Return once nothing is being written; raises NotSaved if it failed."""
        pending, self.pending = self.pending, None
        if pending:
            pending.result()

    def write(self, step: int, tree: Any, content: dict):
        """Write and verify under another name, and only then give the folder its own."""
        unfinished, final = self.folder / ".saving" / str(step), self.folder / str(step)
        publish = checkpoint_files.publish
        with self.clear_errors(step):
            if self.together:
                parts.write_together(unfinished, final, tree, content, publish)
            else:
                checkpoint_files.write_step(unfinished, tree, content)
                publish(unfinished, final)
        self.newest = step
        self.skipped.discard(step)
        self.progress.note("saved", step)
        if self.first:
            self.prune()

    def prune(self):
        """Delete what is older than the newest `keep`, unless it is known to be damaged."""
        counted = [step for step in steps(self.folder) if step not in self.skipped]
        for step in counted[:-self.keep]:
            name = str(step)
            checkpoint_files.delete(self.folder / name, self.folder / ".saving" / name)

    def record(self):
        """Write the metrics that are waiting; Diverged if their loss is not finite."""
        waiting, self.waiting = self.waiting, None
        if waiting:
            step, metrics = waiting
            metrics = jax.tree.map(float, metrics)
            self.metrics.write(step, metrics)
            self.progress.note("step", step)
            runs.check_finite(step, metrics)

    def check_order(self, step: int):
        """ValueError where a save would mix two runs in one folder."""
        if self.identity is None:
            raise ValueError(f"expected resume() before the first save in {self.folder}, found "
                             "none: it says which run this is, and where it goes on")
        if step < self.newest:
            raise ValueError(f"expected a step after {self.newest}, the newest checkpoint in "
                             f"{self.folder}; found step {step}")

    @contextlib.contextmanager
    def clear_errors(self, step: int):
        """Whatever goes wrong becomes NotSaved, and nothing half-written stays."""
        try:
            yield
        except Exception as error:
            shutil.rmtree(self.folder / ".saving", ignore_errors=True)
            full = "the disk is full; " if "No space left" in str(error) else ""
            before = f"is that of step {self.newest}" if self.newest >= 0 else "does not exist yet"
            raise NotSaved(
                f"step {step} could not be saved in {self.folder}: {full}expected every byte on "
                f"the disk as it was in memory, found {type(error).__name__}: {error} "
                f"({shutil.disk_usage(self.folder).free:,} bytes are free); the newest "
                f"checkpoint {before}") from error


def restore(folder: str | os.PathLike, state: TrainState):
    """The state of the newest step that verifies, sharded as this one is; takes no lock.

    Whose run it was is not asked, only whether its leaves fit. Of several JAX processes each has to
    call it. Raises FileNotFoundError where
    there is no intact checkpoint, and OtherModel.
    """
    step, _, state = newest(folder, state)
    if step < 0:
        raise FileNotFoundError(f"expected a checkpoint in {folder}, found none that is intact")
    return state
