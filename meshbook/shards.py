"""Is it really sharded? Read from the pieces that the devices hold, never from an annotation."""

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshbook.verdicts import (
    ProofFailed, Verdict, aligned, device_name, leaf_count, markdown, named_leaves, path_name,
    sized_bytes)


def assert_sharded(tree, expected, mesh=None):
    """Prove that every device holds exactly the slice of every leaf that `expected` says.

    tree: any pytree of arrays: weights, optimizer moments, a batch. expected: a pytree of
    shardings or PartitionSpecs of the same structure, or a prefix of it; one alone stands for
    all leaves. A PartitionSpec is read on `mesh`, else on the mesh of `jax.set_mesh`, else on the
    one mesh that the leaves lie on. Only this process's devices are looked at.
    Raises ProofFailed, naming leaf, device, expected and found slice; ValueError where `expected`
    does not fit the tree, or a spec does not fit its leaf or its mesh.

    >>> assert_sharded(state.params, {"mlp": {"w_in": P(None, "model"), "w_out": P("model")}})
    sharded: 2 leaves on 8 devices, 1.05 MB a device
    """
    leaves = named_leaves(tree)
    specs = _for_each_leaf(tree, expected)
    if mesh is None and any(isinstance(spec, PartitionSpec) for spec in specs.values()):
        mesh = _ambient_mesh() or _common_mesh(leaves)
    faults = []
    for name, leaf in leaves.items():
        _require_array(name, leaf)
        faults += _misplaced(name, leaf, _on_mesh(name, leaf, specs[name], mesh))[:1]
    if faults:
        others = ", ".join(fault.leaf for fault in faults[1:4])
        more = f" Also wrong: {others}" + (" ..." if len(faults) > 4 else "") if others else ""
        faults[0].args = (f"{faults[0]}.{more}",)
        raise faults[0]
    held = bytes_by_device(tree)
    return Verdict(
        f"sharded: {leaf_count(leaves)} on {len(held)} devices, "
        f"{sized_bytes(max(held.values(), default=0))} a device", bytes=held)


def _for_each_leaf(tree, expected):
    """The expected sharding of each leaf by its name; prefixes are spread over what they cover."""
    is_spec = lambda node: isinstance(node, (jax.sharding.Sharding, PartitionSpec))
    wanted = {_keys(path): spec for path, spec in
              jax.tree_util.tree_leaves_with_path(expected, is_leaf=is_spec)}
    for keys, spec in wanted.items():
        if not is_spec(spec):
            raise ValueError(f"expected a sharding or a PartitionSpec for "
                             f"{'/'.join(keys) or 'the tree'}, found {spec!r}")
    covers = lambda keys: next((keys[:n] for n in range(len(keys) + 1) if keys[:n] in wanted), None)
    is_empty = lambda node: not jax.tree.leaves(node)
    specs, used = {}, set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_empty):
        cover = covers(_keys(path))
        used.add(cover)
        if cover is None and not is_empty(leaf):
            known = ", ".join("/".join(keys) for keys in list(wanted)[:6])
            raise ValueError(f"leaf {path_name(path)}: no expected sharding; `expected` names "
                             f"{known or 'nothing'}")
        specs[path_name(path)] = wanted.get(cover)
    if unused := ["/".join(keys) for keys in wanted if keys not in used]:
        raise ValueError(f"`expected` names {', '.join(unused[:6])}, which the tree does not have; "
                         f"it has {', '.join(list(specs)[:6])}")
    return specs


def _keys(path):
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def _ambient_mesh():
    mesh = jax.sharding.get_mesh()
    return None if mesh.empty else mesh


def _common_mesh(leaves):
    """The mesh the leaves lie on, if any does; they may not lie on two that order devices apart."""
    first = None
    for name, leaf in leaves.items():
        mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
        if mesh is None or not getattr(mesh, "size", 0):
            continue
        first = first or (name, mesh)
        ids = [[device.id for device in each.devices.flat] for each in (first[1], mesh)]
        if ids[0] != ids[1]:
            raise ProofFailed(
                f"leaf {name}: expected the devices in the order of {first[0]}, {ids[0]}; found "
                f"{ids[1]}", leaf=name, expected=ids[0], found=ids[1])
    return first and first[1]


def _require_array(name, leaf):
    if not isinstance(leaf, jax.Array):
        kind = type(leaf).__name__
        raise ProofFailed(f"leaf {name}: expected a jax.Array on devices, found {kind} on the host",
                          leaf=name, expected="jax.Array", found=kind)
    if leaf.is_deleted():
        raise ValueError(f"leaf {name}: its numbers are gone, it was donated to a step; "
                         "pass the state that the step returned")


def _on_mesh(name, leaf, spec, mesh):
    """The expected sharding of one leaf, checked against its mesh and its shape."""
    if isinstance(spec, PartitionSpec):
        if mesh is None:
            raise ValueError(f"leaf {name}: {spec} needs a mesh; no leaf lies on one. "
                             "Pass mesh=, or use jax.set_mesh")
        used = {axis for entry in spec for axis in
                (entry if isinstance(entry, tuple) else (entry,)) if isinstance(axis, str)}
        if unknown := sorted(used - set(mesh.axis_names)):
            raise ValueError(f"leaf {name}: expected axes among {', '.join(mesh.axis_names)}, "
                             f"found {', '.join(unknown)} in {spec}")
        spec = NamedSharding(mesh, spec)
    try:
        length = len(getattr(spec, "spec", ()))
        if length > leaf.ndim:
            raise ValueError(f"a spec of length {length} for {leaf.ndim} dimensions")
        spec.shard_shape(leaf.shape)
    except ValueError as problem:
        raise ValueError(f"leaf {name}: {_plan(spec)} does not fit shape {leaf.shape}: "
                         f"{problem}") from None
    return spec


def _plan(sharding):
    """A sharding as messages call it: P('model',) on mesh {'batch': 4, 'model': 2}."""
    if isinstance(sharding, NamedSharding):
        return f"{sharding.spec} on mesh {dict(sharding.mesh.shape)}"
    return str(sharding)


def _misplaced(name, leaf, sharding):
    """One ProofFailed for each device whose slice of a leaf is not the expected one."""
    wanted = {device: _slices(index, leaf.shape)
              for device, index in sharding.addressable_devices_indices_map(leaf.shape).items()}
    found = {}
    for shard in leaf.addressable_shards:
        (device,) = shard.data.devices()  # where the numbers really are
        index = _slices(shard.index, leaf.shape)
        fits = shard.data.shape == tuple(stop - start for start, stop in index)
        found[device] = index if fits else f"an array of shape {shard.data.shape}"
    return [
        ProofFailed(
            f"leaf {name}, {device_name(device)}: expected {_written(wanted.get(device))} "
            f"({_plan(sharding)}), found {_written(found.get(device))} "
            f"of shape {leaf.shape}",
            leaf=name, device=device.id, expected=wanted.get(device), found=found.get(device))
        for device in sorted(wanted.keys() | found.keys(), key=lambda device: device.id)
        if wanted.get(device) != found.get(device)
    ]


def _slices(index, shape):
    pairs = zip(index, shape, strict=False)  # the index of a random key has one entry more
    return tuple(each.indices(extent)[:2] for each, extent in pairs)


def _written(slices):
    if slices is None or isinstance(slices, str):
        return slices or "nothing"
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in slices) + "]"


def bytes_by_device(tree):
    """How many bytes of a pytree each of this process's devices holds, by device."""
    held = {}
    for leaf in jax.tree.leaves(tree):
        for shard in getattr(leaf, "addressable_shards", ()):
            (device,) = shard.data.devices()
            held[device] = held.get(device, 0) + _numbers(shard.data).nbytes
    return held


def _numbers(array):
    """The bits of an array; a random key has its own dtype, and its data is its bits."""
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(array)
    return array


class ShardingTable:
    """Where every leaf of a pytree lives: one row a leaf, and what one device holds in all.

    rows: (path, shape, dtype, spec, bytes on one device, devices), as text. `bytes` is the total
    of one device, the fullest, and equals the sum over its shards. Prints as an aligned table and
    shows as a table in notebooks.
    """

    header = ("leaf", "shape", "dtype", "spec", "devices", "bytes a device")

    def __init__(self, tree):
        leaves = named_leaves(tree)
        self.rows = [self._row(name, leaf) for name, leaf in leaves.items()]
        self.bytes_by_device = bytes_by_device(tree)
        self.bytes = max(self.bytes_by_device.values(), default=0)
        devices = _ranges(device.id for device in self.bytes_by_device)
        self.total = (leaf_count(leaves), "", "", "", devices, f"{self.bytes:,}")

    @staticmethod
    def _row(name, leaf):
        _require_array(name, leaf)
        held = max(bytes_by_device(leaf).values(), default=0)
        devices = _ranges(device.id for device in leaf.sharding.device_set)
        spec = str(getattr(leaf.sharding, "spec", "one device")).replace("PartitionSpec", "P")
        return name, str(leaf.shape), str(leaf.dtype), spec, devices, f"{held:,}"

    def __repr__(self):
        return aligned(self.header, [*self.rows, self.total], numbers=1)

    def _repr_markdown_(self):
        rows = [[f"`{row[0]}`", row[1], row[2], f"`{row[3]}`", *row[4:]] for row in self.rows]
        total = [f"**{cell}**" if cell else "" for cell in self.total]
        return markdown(self.header, [*rows, total], numbers=1)


def _ranges(ids):
    """Sorted numbers with runs drawn together: 0-3, 6."""
    runs = []
    for number in sorted(ids):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def sharding_table(tree):
    """Make the table of where every leaf of a pytree lives, read from its shards.

    tree: any pytree of arrays. Returns a ShardingTable.
    Raises ProofFailed where a leaf is no array on devices.
    """
    return ShardingTable(tree)


def assert_replicas_equal(tree):
    """Prove that devices that should hold the same numbers do, bit for bit.

    tree: any pytree of arrays; pieces at the same place of a leaf are compared. Partial
    sums (`unreduced`) are no copies, and are left out.
    Raises ProofFailed, naming leaf, both devices and the largest difference.

    >>> assert_replicas_equal(state)
    replicas equal: 34 leaves, 8 copies
    """
    leaves, copies = named_leaves(tree), 1
    for name, leaf in leaves.items():
        first, count = {}, {}
        partial = getattr(getattr(getattr(leaf, "sharding", None), "spec", None), "unreduced", ())
        for shard in () if partial else getattr(leaf, "addressable_shards", ()):
            place = _slices(shard.index, leaf.shape)
            count[place] = count.get(place, 0) + 1
            here = np.asarray(_numbers(shard.data))
            device, there = first.setdefault(place, (shard.device, here))
            if here.tobytes() != there.tobytes():
                raise _drifted(name, place, device, shard.device, there, here)
        copies = max(copies, *count.values(), 1)
    return Verdict(f"replicas equal: {leaf_count(leaves)}, {copies} copies", copies=copies)


def _drifted(name, place, first, second, expected, found):
    apart = np.abs(np.asarray(expected, np.float64) - np.asarray(found, np.float64))
    where = np.unravel_index(np.nanargmax(apart) if not np.all(np.isnan(apart)) else 0, apart.shape)
    return ProofFailed(
        f"leaf {name}: {device_name(first)} and {device_name(second)} should hold the same "
        f"{_written(place) if place else 'number'}; "
        f"largest difference {apart[where]:.3g}, at {tuple(map(int, where))}: "
        f"expected {expected[where]:.9g}, found {found[where]:.9g}",
        leaf=name, device=second.id, expected=expected[where], found=found[where])
