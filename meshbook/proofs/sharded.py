"""Is it really sharded? Read from the pieces that the devices hold, never from an annotation."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshbook.proofs.shards import (
    bits_of, bytes_by_device, pieces_of, require_array, slices_of, wide
)
from meshbook.proofs.verdicts import (
    ProofFailed, Verdict, device_name, leaf_count, named_leaves, path_name,
)
from meshbook.text import sized_bytes


def assert_sharded(
    tree: Any, expected: Any, mesh: Any = None, held: int | np.integer | None = None,
    whole: Any = None,
):
    """Prove that every device holds its slice of every leaf: its place, its shape and its data.

    tree: any pytree of arrays: weights, optimizer moments, a batch. expected: a pytree of
    shardings or PartitionSpecs of the same structure, or a prefix of it; one alone stands for
    all leaves. Write it down, or derive it from rules that you wrote (`by_letters`): taken from the
    program's own metadata it would only say that the program agrees with itself. A PartitionSpec is
    read on `mesh`, else on the mesh of `jax.set_mesh`, else on the one mesh that the leaves lie on.
    held: bytes that each device must hold of the whole tree, from a formula. whole: the same tree
    on the host; every shard must have, bit for bit, the elements of its expected slice. Without it
    shards at the same place of a leaf are compared with each other.
    Only this process's devices are looked at.
    Raises ProofFailed, naming leaf, device, expected and found; ValueError where `expected` or
    `whole` does not fit the tree, a spec does not fit its leaf or its mesh, or there is no leaf.

    >>> rules = {"w_in": P(None, "model"), "w_out": P("model")}
    >>> assert_sharded(state.params, {"mlp": rules}, held=4 * 2 * D * F // 2)
    sharded: 2 leaves on 8 devices, 1.05 MB per device, as predicted
    """
    leaves = named_leaves(tree)
    if not leaves:
        raise ValueError("expected a tree with leaves, found none: that would say nothing")
    specs = _for_each_leaf(tree, expected)
    hosts = named_leaves(whole)
    if whole is not None and (odd := sorted(hosts.keys() ^ leaves.keys())):
        raise ValueError(f"expected `whole` to have the leaves of the tree, found only in one of "
                         f"them: {', '.join(odd[:4])}")
    if mesh is None and any(isinstance(spec, PartitionSpec) for spec in specs.values()):
        mesh = _ambient_mesh() or _common_mesh(leaves)
    faults = []
    for name, leaf in leaves.items():
        require_array(name, leaf)
        sharding = _on_mesh(name, leaf, specs[name], mesh)
        wrong = _misplaced(name, leaf, sharding)
        if whole is None:
            wrong = wrong or _drifted(name, leaf)
        else:
            host = _host(name, leaf, hosts[name])
            wrong = wrong or _misfilled(name, leaf, sharding, host)
        faults += wrong[:1]
    if faults:
        others = ", ".join(fault.leaf for fault in faults[1:4])
        more = f" Also wrong: {others}" + (" ..." if len(faults) > 4 else "") if others else ""
        faults[0].args = (f"{faults[0]}.{more}",)
        raise faults[0]
    found = bytes_by_device(tree)
    for device, size in found.items() if held is not None else ():
        if size != held:
            raise ProofFailed(
                f"{device_name(device)}: expected {held:,} bytes of {leaf_count(leaves)} by the "
                f"formula, found {size:,}", leaf="bytes", device=device.id, expected=held,
                found=size)
    return Verdict(
        f"sharded: {leaf_count(leaves)} on {len(found)} devices, "
        f"{sized_bytes(max(found.values(), default=0))} per device"
        + (", as predicted" if held is not None else ""), bytes=found)


def by_letters(tree: Any, rules: Mapping[str, str | Sequence[str] | None],
               stacked: str | None = None):
    """The PartitionSpec of every leaf by the letters that its name ends in: a pytree of specs.

    tree: a pytree whose leaves are named for their dimensions, such as w_in_DF. rules: {letter:
    mesh axis, or a tuple of axes}; a letter that is not there is not split. A mesh axis splits one
    dimension of an array, the last that asks for it. What stands in `rules` comes from you, not
    from the program that made the arrays. stacked: a key of the tree below which each leaf has one
    dimension more than its name says, the first, which is not split: of layers that a scan runs.

    >>> by_letters({"w_in_DF": w, "scale_D": scale}, {"F": "model"})
    {'scale_D': P(), 'w_in_DF': P(None, 'model')}
    """
    def spec(path, leaf):
        letters = path_name(path).rpartition("/")[2].rpartition("_")[2]
        taken, split = set(), []
        for letter in reversed(letters):
            rule = rules.get(letter) or ()
            axes = [axis for axis in ((rule,) if isinstance(rule, str) else rule)
                    if axis not in taken]
            taken.update(axes)
            if axes or split:  # what is not split at the end is not written down
                split.insert(0, axes[0] if len(axes) == 1 else tuple(axes) or None)
        one_more = [None] if split and stacked is not None and stacked in _keys(path) else []
        return PartitionSpec(*one_more, *split)

    return jax.tree_util.tree_map_with_path(spec, tree)


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
    wanted = {device: slices_of(index, leaf.shape)
              for device, index in sharding.addressable_devices_indices_map(leaf.shape).items()}
    found = {}
    for shard in leaf.addressable_shards:
        (device,) = shard.data.devices()  # where the numbers really are
        index = slices_of(shard.index, leaf.shape)
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


def _host(name, leaf, whole):
    """The bits of a whole leaf on the host; ValueError where they are of another kind."""
    bits, whole = bits_of(leaf), np.asarray(bits_of(whole))
    if (whole.shape, whole.dtype) != (bits.shape, bits.dtype):
        raise ValueError(f"leaf {name}: expected `whole` to have its {bits.dtype}{bits.shape}, "
                         f"found {whole.dtype}{whole.shape}")
    return whole


def _misfilled(name, leaf, sharding, host):
    """One ProofFailed for each device whose data is not that of its slice of the whole."""
    indices = sharding.addressable_devices_indices_map(leaf.shape)
    return [
        _differs(f"leaf {name}, {device_name(device)}: expected the elements of "
                 f"{_written(slices_of(indices[device], leaf.shape))} of the whole, found others",
                 name, device, host[indices[device]], found)
        for copies in pieces_of(leaf).values() for device, found in copies
        if host[indices[device]].tobytes() != found.tobytes()
    ]


def _drifted(name, leaf):
    """One ProofFailed for each device whose copy is not that of the first that has the slice."""
    return [
        _differs(f"leaf {name}: {device_name(first)} and {device_name(device)} should hold the "
                 f"same {_written(place) if place else 'number'}", name, device, expected, found)
        for place, [(first, expected), *copies] in pieces_of(leaf).items()
        for device, found in copies if expected.tobytes() != found.tobytes()
    ]


def _differs(message, name, device, expected, found):
    """The ProofFailed of two arrays, with the elements that are furthest apart."""
    pair = [wide(each) for each in (expected, found)]
    with np.errstate(invalid="ignore"):  # inf - inf
        apart = np.abs(pair[0] - pair[1])
    apart = np.where(np.isnan(pair[0]) != np.isnan(pair[1]), np.inf, apart)
    raw = [np.ascontiguousarray(each).reshape(-1, 1).view(np.uint8) for each in (expected, found)]
    other = (raw[0] != raw[1]).any(-1).reshape(apart.shape)  # 0 and -0 are 0 apart
    most = np.argmax(np.where(other, np.nan_to_num(apart, posinf=np.inf), -1))
    at = tuple(map(int, np.unravel_index(most, apart.shape)))
    expected, found = (each[at].item() for each in pair)
    return ProofFailed(
        f"{message}; largest difference {abs(expected - found):.3g}, at {at}: expected "
        f"{expected:.9g}, found {found:.9g}",
        leaf=name, device=device.id, expected=expected, found=found)


def _written(slices):
    if slices is None or isinstance(slices, str):
        return slices or "nothing"
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in slices) + "]"


def assert_replicas_equal(tree: Any):
    """Prove that devices that should hold the same numbers do, bit for bit.

    tree: any pytree of arrays; pieces at the same place of a leaf are compared. Partial
    sums (`unreduced`) are no copies, and are left out, as is what lies on the host. Copies along an
    axis of an array, as `pmap` stacks them, are elements of it: compare `leaf[0]` with the others.
    The verdict counts the leaves that have copies, and says where there are none.
    Raises ProofFailed, naming leaf, both devices and the largest difference.

    >>> assert_replicas_equal(state)
    replicas equal: 34 leaves, 8 copies
    """
    leaves, copies = named_leaves(tree), {}
    for name, leaf in leaves.items():
        if wrong := _drifted(name, leaf):
            raise wrong[0]
        copies[name] = max(map(len, pieces_of(leaf).values()), default=0)
    compared = [name for name in leaves if copies[name] > 1]
    most = max(copies.values(), default=0)
    if not compared:
        return Verdict(f"no replicas, nothing compared: {leaf_count(leaves)}, each piece on one "
                       "device or on the host", copies=most, compared=compared)
    alone = len(leaves) - len(compared)
    return Verdict(f"replicas equal: {leaf_count(compared)}, {most} copies"
                   + (f"; {alone} without copies" if alone else ""), copies=most, compared=compared)
