"""Checkpoints: save while training, verify, go on after a fall, also on another mesh.

    with Checkpoints(folder, keep=3) as checkpoints:
        state, key = checkpoints.resume(state, stream, key)
        rest = itertools.islice(stream, steps - int(state.step))
        state, _ = fit(state, rest, key, checkpoints.on_step(stream, key, every=100))

FOLDER/40/ is step 40: orbax's files, and a manifest that was written last. FOLDER/metrics/
is for TensorBoard, FOLDER/.saving/ is what is half there, FOLDER/lock keeps others out.
"""
import contextlib
import copy
import os
import pathlib
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import orbax.checkpoint as ocp

from meshbook import manifests, runs
from meshbook.contents import (
    arrays, check_sound, decode_key, decode_position, describe, encode_key, encode_position
)


class NotSaved(RuntimeError):
    """A checkpoint could not be written; those before it are as they were."""


class OtherModel(ValueError):
    """A checkpoint whose leaves are not those of the state that it was to fill."""


class Checkpoints:
    """The checkpoints of one run, in a folder of its own; used as a context.

    keep: how many of the newest remain; one that turns out damaged is never deleted.
    Inside the block the folder is locked, SIGTERM means "save, then exit with 0", and
    `metrics` (runs.Metrics) writes for TensorBoard. Leaving it saves the last step.
    Raises FolderInUse if another run is at work there.
    """

    def __init__(self, folder, keep=3):
        if keep < 1:
            raise ValueError(f"keep is a number of checkpoints, at least 1; found {keep}")
        if jax.process_count() > 1:
            raise ValueError("one process writes a checkpoint and its manifest; "
                             f"expected 1 JAX process, found {jax.process_count()}")
        self.folder, self.keep = pathlib.Path(folder).absolute(), keep
        self.newest, self.resumed, self.skipped = -1, False, set()
        self.latest = self.waiting = self.pending = None

    def __enter__(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(runs.only_run(self.folder))
            self.asked_to_end = stack.enter_context(runs.sigterm())
            metrics = runs.Metrics(self.folder / "metrics")
            self.metrics = stack.enter_context(contextlib.closing(metrics))
            self.saver = stack.enter_context(make_saver())
            self.thread = stack.enter_context(ThreadPoolExecutor(1))
            self.stack = stack.pop_all()
        return self

    def __exit__(self, kind, error, trace):
        try:
            with self.stack:
                self.record()
                if error is None and self.latest and not self.latest[0].step.is_deleted():
                    self.save(*self.latest)
                self.wait()
        except Exception as failure:
            if error is None or isinstance(error, SystemExit):
                raise
            error.add_note(f"While ending the run: {type(failure).__name__}: {failure}")
        if error is None and self.asked_to_end():
            raise SystemExit(0)

    def resume(self, state, stream, key):
        """(state, key) of the newest step that verifies, the stream set to its position.

        The arrays come as this state's are laid out, each device reading its own part;
        without any checkpoint, state and key come back as they are. A damaged one is
        named in a warning and skipped. Raises OtherModel.
        """
        self.resumed, found = True, newest_intact(self.folder)
        self.newest, manifest = found or (-1, None)
        self.skipped = {step for step in steps(self.folder) if step > self.newest}
        self.metrics.restart(self.newest + 1)
        if found is None:
            return state, key
        state = load(self.folder / str(self.newest), manifest, state)
        stream.set_state(decode_position(manifest["position"]))
        return state, decode_key(manifest["key"])

    def on_step(self, stream, key, every):
        """A callback for fit(): metrics of each step, a checkpoint of each `every`-th.

        stream: the iterator that fit() draws from, itself and not a wrapper that reads
        ahead: get_state() must be the position after this step's batch. Raises Diverged
        one step after a loss that is not finite, NotSaved one step after a failed save,
        and SystemExit(0) once SIGTERM came and the step is saved.
        """
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
            end = self.asked_to_end()
            if step % every == 0 or end:
                self.save(*self.latest)
            if end:
                self.wait()
                raise SystemExit(0)

        return callback

    def save(self, state, position, key):
        """Copy the state and write it in the background; a step saved already is left.

        position: what the stream's get_state() returned, JSON values or bytes; key: the
        run's. A state that is not finite is not saved: raises Diverged. Raises ValueError
        in a folder with checkpoints that were not resumed, and NotSaved.
        """
        self.record()
        self.wait()
        step = int(state.step)
        if step == self.newest:
            return
        self.check_order(step)
        check_sound(step, state)
        content = dict(step=step, position=encode_position(position), key=encode_key(key),
                       leaves=describe(arrays(state)))
        with self.clear_errors(step):
            self.metrics.flush()  # a checkpoint never knows of steps that metrics do not
            shutil.rmtree(self.folder / ".saving", ignore_errors=True)
            self.saver.save(self.folder / ".saving" / str(step),
                            args=ocp.args.PyTreeSave(arrays(state)))
        self.pending = self.thread.submit(self.publish, step, content)

    def wait(self):
        """Return once nothing is being written; raises NotSaved if it failed."""
        pending, self.pending = self.pending, None
        if pending:
            pending.result()

    def publish(self, step, content):
        """Wait for orbax, write the manifest, and only then give the folder its name."""
        unfinished, final = self.folder / ".saving" / str(step), self.folder / str(step)
        with self.clear_errors(step):
            self.saver.wait_until_finished()
            manifests.write(unfinished, content)
            if os.path.lexists(final):
                os.rename(final, free_name(f"{final}.damaged"))
            os.rename(unfinished, final)
        self.newest = step
        self.skipped.discard(step)
        self.prune()

    def prune(self):
        """Delete what is older than the newest `keep`, unless it is damaged."""
        counted = [step for step in steps(self.folder) if step not in self.skipped]
        for step in counted[:-self.keep]:
            if intact(self.folder, step):
                going = self.folder / ".saving" / str(step)  # or a kill would leave half of it
                os.rename(self.folder / str(step), going)
                shutil.rmtree(going)
            else:
                self.skipped.add(step)

    def record(self):
        """Write the metrics that are waiting; Diverged if their loss is not finite."""
        waiting, self.waiting = self.waiting, None
        if waiting:
            step, metrics = waiting
            metrics = jax.tree.map(float, metrics)
            self.metrics.write(step, metrics)
            runs.check_finite(step, metrics)

    def check_order(self, step):
        """ValueError where a save would mix two runs in one folder."""
        if not self.resumed and self.newest < 0 and steps(self.folder):
            raise ValueError(f"{self.folder} holds checkpoints of steps {steps(self.folder)}: "
                             "call resume() before the first save, or choose an empty folder")
        if step < self.newest:
            raise ValueError(f"expected a step after {self.newest}, the newest checkpoint in "
                             f"{self.folder}; found step {step}")

    @contextlib.contextmanager
    def clear_errors(self, step):
        """Whatever goes wrong becomes NotSaved, and nothing half-written stays."""
        try:
            yield
        except Exception as error:
            with contextlib.suppress(Exception):  # orbax may be writing other files still
                self.saver.wait_until_finished()
            shutil.rmtree(self.folder / ".saving", ignore_errors=True)
            full = "the disk is full; " if "No space left" in str(error) else ""
            before = f"is that of step {self.newest}" if self.newest >= 0 else "does not exist yet"
            raise NotSaved(
                f"step {step} could not be saved in {self.folder}: {full}expected room to "
                f"write, found {shutil.disk_usage(self.folder).free:,} bytes free and "
                f"{type(error).__name__}: {str(error)}; the newest checkpoint {before}"
            ) from error


def restore(folder, state):
    """The state of the newest step that verifies, laid out as this one is; takes no lock.

    Raises FileNotFoundError where there is none, and OtherModel.
    """
    found = newest_intact(folder)
    if found is None:
        raise FileNotFoundError(f"expected a checkpoint in {folder}, found none that is intact")
    return load(pathlib.Path(folder).absolute() / str(found[0]), found[1], state)


def steps(folder):
    """The steps that have a folder here, ascending; nothing is said of their state."""
    names = [path.name for path in pathlib.Path(folder).iterdir() if path.is_dir()]
    return sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)


def intact(folder, step):
    """The manifest of a step whose every file is as it was written; else a warning, None."""
    try:
        manifest = manifests.verify(pathlib.Path(folder, str(step)))
        if manifest["step"] != step:
            raise manifests.Damaged(f"expected step {step}, found step {manifest['step']}")
        return manifest
    except manifests.Damaged as error:
        warnings.warn(f"the checkpoint of step {step} is skipped: {error}", stacklevel=4)


def newest_intact(folder):
    """(step, manifest) of the newest checkpoint that verifies, or None."""
    for step in reversed(steps(folder)):
        if manifest := intact(folder, step):
            return step, manifest


def make_saver():
    """An asynchronous orbax checkpointer for one process and nested dicts of arrays.

    By default orbax cuts an array that every device holds, so that each device copies a
    part of it: one process gains nothing by that, and pays with a program for every cut.
    It also makes folders in the background, and waits long for one that cannot be made.
    """
    whole = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, whole))
    return ocp.AsyncCheckpointer(
        ocp.PyTreeCheckpointHandler(type_handler_registry=registry),
        async_options=ocp.options.AsyncOptions(create_directories_asynchronously=False))


def load(path, manifest, state):
    """This state with the arrays of a checkpoint, each read where it will live."""
    check_leaves(path, manifest["leaves"], describe(arrays(state)))
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays(state))
    with ocp.StandardCheckpointer() as reader:
        return replace(state, **reader.restore(path, target))


def check_leaves(path, found, expected):
    """OtherModel unless both have the same leaves; layouts may differ."""
    words = lambda leaf: f"{leaf['dtype']} {tuple(leaf['shape'])}" if leaf else "none"
    names = sorted(expected | found, key=lambda name: name.startswith("opt_state"))
    faults = [f"{name}: expected {words(expected.get(name))}, found {words(found.get(name))}"
              for name in names if words(expected.get(name)) != words(found.get(name))]
    if faults:
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise OtherModel(f"{path} is of another model: {'; '.join(faults[:3])}{more}")


def free_name(path):
    """The path, or the first of path-2, path-3, … that does not exist."""
    number, name = 1, path
    while os.path.lexists(name):
        number, name = number + 1, f"{path}-{number + 1}"
    return name
