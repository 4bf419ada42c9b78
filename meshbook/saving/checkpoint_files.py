"""One checkpoint on disk: the arrays, and a manifest that says what they must be.

One process has orbax write them, several write `parts`. Either is read by any number. Every array
is hashed in memory before it is written. What counts as written is what was read back from the disk
and had those hashes.
"""
import os
import pathlib
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import orbax.checkpoint as ocp

from meshbook.proofs.verdicts import named_leaves, path_name
from meshbook.saving import manifests, parts
from meshbook.saving.agreement import first_fault, told_by_all
from meshbook.saving.contents import arrays, describe, digests
from meshbook.training import TrainState


class OtherModel(ValueError):
    """A checkpoint whose leaves are not those of the state that it was to fill."""


def write_step(folder: str | os.PathLike, tree: Any, content: dict):
    """Write arrays of the host; return when they are on the disk and were read back.

    tree: nested dicts of NumPy arrays; content: for the manifest, with `leaves`. Raises
    manifests.Damaged if what is on the disk is not what was in memory.
    """
    hashes = digests(tree)
    leaves = {name: leaf | {"sha256": hashes[name]} for name, leaf in content["leaves"].items()}
    save(folder, tree)
    manifests.write_manifest(folder, content | {"leaves": leaves})
    read_arrays(folder, leaves)


def save(folder: str | os.PathLike, tree: Any):
    """Let orbax write the arrays into a folder that does not exist yet."""
    with ocp.PyTreeCheckpointer() as saver:
        saver.save(folder, args=ocp.args.PyTreeSave(tree))


def read_arrays(folder: str | os.PathLike, leaves: Mapping[str, Mapping]):
    """{path: NumPy array}; manifests.Damaged where an array has not the SHA-256 of its leaf."""
    me = jax.process_index()  # each process reads by itself, and orbax waits for no other
    alone = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me})
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as reader:
        tree = reader.restore(folder)
    found = digests(tree)
    faults = [f"{name}: expected SHA-256 {leaf['sha256']} of the array that was trained, found "
              f"{found.get(name, 'no array')}" for name, leaf in leaves.items()
              if found.get(name) != leaf["sha256"]]
    if faults:
        raise manifests.Damaged(f"{folder}: {'; '.join(faults)}")
    return named_leaves(tree)


def steps(folder: str | os.PathLike):
    """The steps that have a folder here, ascending; nothing is said of their state."""
    names = [path.name for path in pathlib.Path(folder).iterdir() if path.is_dir()]
    return sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)


def newest(
    folder: str | os.PathLike, state: TrainState,
    check: Callable = lambda path, manifest: None
):
    """(step, manifest, state) of the newest step that verifies, or (-1, None, state).

    Goes back from the newest and stops at the first that is intact: none before it is read. What
    is damaged is named in a warning. check(path, manifest) may refuse. Of several processes each
    reads what its devices need, and a step counts if it is intact for all. Raises OtherModel.
    """
    for step in reversed(told_by_all("steps", steps(folder))[0]):
        path, fault = pathlib.Path(folder, str(step)).absolute(), ""
        try:
            manifest, found = read_step(path, step, state, check)
        except manifests.Damaged as error:
            fault = str(error)
        if not (fault := first_fault(told_by_all(f"step {step} restored", fault))):
            return step, manifest, found
        warnings.warn(f"the checkpoint of step {step} is skipped: {fault}", stacklevel=3)
    return -1, None, state


def read_step(path: pathlib.Path, step: int, state: TrainState, check: Callable):
    """(manifest, state) of one checkpoint; manifests.Damaged unless it is intact."""
    manifest = manifests.verify(path, later=".bin")
    if manifest["step"] != step:
        raise manifests.Damaged(f"expected step {step}, found step {manifest['step']}")
    if "identity" not in manifest:
        raise manifests.Damaged("expected the identity of a run, found none, as version "
                                "0.1.0 wrote it")
    check(path, manifest)
    check_leaves(path, manifest["leaves"], describe(arrays(state)))
    if "parts" in manifest:
        return manifest, fill(state, parts.Parts(path, manifest["leaves"], manifest["parts"]))
    return manifest, fill(state, read_arrays(path, manifest["leaves"]))


def fill(state: TrainState, found: Mapping[str, Any] | parts.Parts):
    """This state with other arrays, {path: NumPy array or Leaf}: each device gets its own part."""
    def place(path, x):
        whole = found[path_name(path)]
        return jax.make_array_from_callback(x.shape, x.sharding, lambda index: whole[index])

    return replace(state, **jax.tree.map_with_path(place, arrays(state)))


def check_leaves(path: str | os.PathLike, found: dict[str, dict], expected: dict[str, dict]):
    """OtherModel unless both have the same leaves; shardings may differ."""
    words = lambda leaf: f"{leaf['dtype']} {tuple(leaf['shape'])}" if leaf else "none"
    names = sorted(expected | found, key=lambda name: name.startswith("opt_state"))
    faults = [f"{name}: expected {words(expected.get(name))}, found {words(found.get(name))}"
              for name in names if words(expected.get(name)) != words(found.get(name))]
    if faults:
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise OtherModel(f"{path} is of another model: {'; '.join(faults[:3])}{more}")


def publish(unfinished: pathlib.Path, final: pathlib.Path):
    """Give a verified checkpoint its name, for good; what has the name already is set aside."""
    if os.path.lexists(final):
        os.rename(final, free_name(f"{final}.damaged"))
    move(unfinished, final)


def delete(path: pathlib.Path, going: pathlib.Path):
    """Delete a checkpoint; it loses its name first, so that no half of it is ever found."""
    move(path, going)
    shutil.rmtree(going)


def move(path: pathlib.Path, to: pathlib.Path):
    """Rename, and wait until the disk has both folders' new entries."""
    os.rename(path, to)
    for folder in {path.parent, to.parent}:
        manifests.sync(folder)


def free_name(path: str | os.PathLike):
    """The path, or the first of path-2, path-3, … that does not exist."""
    number, name = 1, path
    while os.path.lexists(name):
        number, name = number + 1, f"{path}-{number + 1}"
    return name
