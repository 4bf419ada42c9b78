"""A checkpoint by several processes: each writes the shards that it owns, into a file of its own.

part-3.bin is the bytes of process 3's shards, one behind the other in C order; part-3.json says of
each which slice of which leaf it is, where it lies, and its SHA-256. What every process has written
is in the manifest that process 0 writes when all are done.
"""
import collections
import hashlib
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshbook.proofs.verdicts import named_leaves
from meshbook.saving import manifests
from meshbook.saving.agreement import first_fault, told_by_all

Slices = list[list[int]]  # [start, stop] along each dimension


def bounds(index: tuple[slice, ...], shape: tuple[int, ...]):
    """[[start, stop], ...] of a shard's index in a leaf of this shape."""
    return [list(each.indices(size)[:2]) for each, size in zip(index, shape)]


def own_shards(tree: Any):
    """{path: [(bounds, NumPy array)]} of the shards that this process owns, in host memory.

    Replicas have one owner; the devices that hold one take turns from shard to shard, so that
    all processes write; of few shards not equally much.
    """
    owned = {name: [each for each in x.addressable_shards
                    if each.device == owners(x, turn)[str(each.index)]]
             for turn, (name, x) in enumerate(named_leaves(tree).items())}
    for shards in owned.values():
        for each in shards:
            each.data.copy_to_host_async()
    shapes = {name: x.shape for name, x in named_leaves(tree).items()}
    return {name: [(bounds(each.index, shapes[name]), np.array(each.data)) for each in shards]
            for name, shards in owned.items()}


def owners(x: jax.Array, turn: int):
    """{index of a shard: the device that owns it}, the same in every process."""
    holders = collections.defaultdict(list)
    for device, index in x.sharding.devices_indices_map(x.shape).items():
        holders[str(index)].append(device)
    return {index: devices[(turn + number) % len(devices)]
            for number, (index, devices) in enumerate(holders.items())}


def write_part(folder: pathlib.Path, process: int, shards: Mapping[str, list]):
    """Write this process's shards, read them back, and return {file: its size and SHA-256}.

    Raises manifests.Damaged if what is on the disk is not what was in memory.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data, index = folder / f"part-{process}.bin", folder / f"part-{process}.json"
    pieces, offset = [], 0
    with data.open("xb") as file:
        for name, owned in shards.items():
            for where, x in owned:
                raw = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
                file.write(raw)
                pieces.append({"leaf": name, "slice": where, "offset": offset, "bytes": raw.size,
                               "sha256": hashlib.sha256(raw).hexdigest()})
                offset += raw.size
    manifests.sync(data)
    for piece in pieces:
        read_piece(data, piece)
    write_index(index, pieces)
    return {path.name: manifests.measure(path) for path in (data, index)}


def write_index(path: pathlib.Path, pieces: list[dict]):
    """Write where each piece belongs; manifests.Damaged unless the disk has it as it was said."""
    words = json.dumps(pieces).encode()
    path.write_bytes(words)
    manifests.sync(path)
    if (found := path.read_bytes()) != words:
        raise manifests.Damaged(f"{path}: expected the {len(words):,} bytes that were written, "
                                f"found {len(found):,} others")


def read_piece(path: pathlib.Path, piece: Mapping[str, Any]):
    """The bytes of one piece, once they have its SHA-256; else manifests.Damaged."""
    words = f"{path}: expected SHA-256 {piece['sha256']} of {piece['leaf']}{piece['slice']}"
    try:
        with path.open("rb") as file:
            file.seek(piece["offset"])
            raw = np.fromfile(file, np.uint8, piece["bytes"])
    except OSError as error:
        raise manifests.Damaged(f"{words}, found {manifests.what_is_there(error)}") from error
    found = hashlib.sha256(raw).hexdigest()
    if found != piece["sha256"]:
        raise manifests.Damaged(f"{words}, found {found}")
    return raw


class NotWritten(RuntimeError):
    """A process could not write its part, or process 0 the manifest; says which and why."""


class Parts:
    """The leaves of a checkpoint that lie in parts: parts[path][index] is a slice of one of them.

    No piece is read before somebody needs it, nor twice. Raises manifests.Damaged where one is not
    as it was, or missing.
    """

    def __init__(self, folder: pathlib.Path, leaves: Mapping[str, Mapping], count: int):
        self.folder, self.leaves, self.read = folder, leaves, {}
        self.pieces = {name: [] for name in leaves}
        for process in range(count):
            for piece in json.loads((folder / f"part-{process}.json").read_text()):
                self.pieces[piece["leaf"]].append(
                    piece | {"path": folder / f"part-{process}.bin"})

    def __getitem__(self, name: str):
        return Leaf(self, name)

    def slice_of(self, name: str, index: tuple[slice, ...]):
        """A slice of a leaf, put together from the pieces that it meets."""
        leaf = self.leaves[name]
        wanted = bounds(index, tuple(leaf["shape"]))
        found = np.empty([stop - start for start, stop in wanted], jnp.dtype(leaf["dtype"]))
        filled = 0
        for piece, into, out_of in self.met(name, wanted):
            found[into] = self.array(piece, found.dtype)[out_of]
            filled += found[into].size
        if filled != found.size:
            raise manifests.Damaged(f"{self.folder}: expected {found.size:,} elements of {name}"
                                    f"{wanted}, found {filled:,} in its parts")
        return found

    def met(self, name: str, wanted: Slices):
        """(piece, where it goes, what of it goes there) of every piece that meets a slice."""
        for piece in self.pieces[name]:
            both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(piece["slice"], wanted)]
            if all(start < stop for start, stop in both):
                yield (piece, *(tuple(slice(start - first, stop - first) for (start, stop), (
                    first, _) in zip(both, whole)) for whole in (wanted, piece["slice"])))

    def array(self, piece: Mapping[str, Any], dtype: np.dtype):
        """One piece, verified."""
        key = piece["path"], piece["offset"]
        if key not in self.read:
            raw = read_piece(piece["path"], piece)
            self.read[key] = raw.view(dtype).reshape([b - a for a, b in piece["slice"]])
        return self.read[key]


class Leaf:
    """One leaf of Parts; leaf[index] reads a slice of it."""

    def __init__(self, parts: Parts, name: str):
        self.parts, self.name = parts, name

    def __getitem__(self, index: tuple[slice, ...]):
        return self.parts.slice_of(self.name, index)


def write_together(folder: pathlib.Path, final: pathlib.Path, shards: Mapping[str, list],
                   content: dict[str, Any], publish: Callable):
    """Every process writes its part of `folder`; then process 0 the manifest, and its name.

    content: for the manifest, with `step`. publish(folder, final) gives it the name. Returns in
    each process once all is on the disk and was read back. Raises NotWritten in each, with the
    number of the process that could not.
    """
    me, step = jax.process_index(), content["step"]
    told_by_all(f"step {step} begins", me)  # process 0 has made room
    fault, files = tried(lambda: write_part(folder, me, shards))
    said = told_by_all(f"step {step} written", [fault, files])
    fault = first_fault([each for each, _ in said])
    if me == 0 and not fault:
        of_all = {name: measured for _, files in said for name, measured in files.items()}
        fault, _ = tried(lambda: (
            manifests.write_manifest(folder, content | {"parts": len(said)}, of_all),
            publish(folder, final)))
    if fault := told_by_all(f"step {step} published", fault)[0]:
        raise NotWritten(fault)


def tried(write: Callable):
    """("", what it returned), or (what went wrong, None)."""
    try:
        return "", write()
    except Exception as error:  # whatever it is, the other processes have to hear of it
        return f"{type(error).__name__}: {error}", None
