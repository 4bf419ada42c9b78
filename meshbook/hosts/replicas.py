"""Whether replicas still have the same bits: each device hashes what it holds, and all compare.

A bit that flips in the memory of one device is no error to JAX. The replicas drift apart, and each
device goes on with its own. Hashes of a few bytes for each array are enough to see it.
"""
import collections
import math
from collections.abc import Mapping
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array

from meshbook.hosts.roll_call import processes
from meshbook.proofs.verdicts import named_leaves
from meshbook.saving.contents import arrays
from meshbook.sharding import axes_of
from meshbook.training import TrainState


class Different(RuntimeError):
    """Replicas of one array do not have the same bits; says which, and on which devices."""


def hash_of(x: Array):
    """A uint32 that any change of one element changes: mixed bits, with odd weights, mod 2**32.

    Mixing and multiplying by an odd number lose nothing. The weights differ from place to place, so
    two elements that were swapped are noticed, too; other pairs of changes almost always.
    """
    if x.dtype == bool:
        x = x.astype(jnp.uint8)
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag])
    word = min(x.dtype.itemsize, 4)  # bytes: a larger number is two words
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * word}").reshape(-1)
    mixed = bits * np.uint32(2_654_435_761)  # a uint32, whatever the bits were
    mixed ^= mixed >> 16
    weights = 2 * jnp.arange(bits.size, dtype=jnp.uint32) + 1
    return (mixed * weights).sum(dtype=jnp.uint32)


@partial(jax.jit, static_argnums=0)
def hashes_on(mesh: Mesh, leaves: list):
    """uint32 (devices, leaves), on every device: one row of hashes for each device."""
    def own(leaves):
        row = jnp.stack([hash_of(x) for x in leaves])
        return jax.lax.all_gather(row, mesh.axis_names)  # as mesh.devices lie, on any mesh

    specs = [jax.typeof(x).sharding.spec for x in leaves]
    return jax.shard_map(own, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=False)(leaves)


def hashes(tree: Any, mesh: Mesh):
    """{path: {device: hash of what it holds}} of the leaves of a tree on this mesh.

    Every process has to call it, and each gets the hashes of all.
    """
    named = named_leaves(tree)
    with jax.set_mesh(mesh):
        found = np.asarray(hashes_on(mesh, list(named.values())))
    return {name: dict(zip(mesh.devices.flat, column.tolist()))
            for name, column in zip(named, found.T)}


def check_replicas(state: TrainState, step: int):
    """Different unless all replicas of each array of the state have the same bits.

    Every process has to call it at the same step, and in each the same error is raised.
    """
    tree, faults = arrays(state), []
    found = hashes(tree, state.program.mesh)
    for name, x in named_leaves(tree).items():
        holders = collections.defaultdict(list)
        for device, index in x.sharding.devices_indices_map(x.shape).items():
            holders[str(index)].append(device)
        faults += [fault(name, group, found[name]) for group in holders.values()]
    faults = list(filter(None, faults))
    if faults:
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise Different(f"step {step}: expected replicas of the same bits; {'; '.join(faults[:3])}"
                        f"{more}")


def check_batch(batch: Mapping[str, Array], mesh: Mesh, rows: str | tuple[str, ...] = "batch"):
    """Different unless each group of processes has put rows of its own onto the mesh.

    batch: arrays as sharding.place() makes them, rows split over the mesh axes `rows`. Within a
    group all processes must have the same rows, and no two groups may have the same ones: neither
    is seen in the loss. Every process has to call it.
    """
    found, names = hashes(batch, mesh), sorted(batch)
    ways = math.prod(mesh.shape[axis] for axis in axes_of(rows))
    where = NamedSharding(mesh, P(rows)).devices_indices_map((ways,))
    by_row, by_process = collections.defaultdict(dict), collections.defaultdict(dict)
    for device, (index,) in where.items():
        seen = tuple(found[name][device] for name in names)
        by_row[index.indices(ways)[0]][device] = seen
        by_process[device.process_index][index.indices(ways)[0]] = seen
    faults = [fault("the batch", list(each), each) for each in by_row.values()]
    holders = collections.defaultdict(set)
    for process, each in by_process.items():
        holders[tuple(each.values())].add((process, tuple(each)))
    for same in holders.values():
        if len({places for _, places in same}) > 1:
            numbers = sorted(process for process, _ in same)
            faults.append(f"{processes(numbers)} have loaded the same rows for different places in "
                          "the batch: each has to load its own share")
    if any(faults):
        raise Different("; ".join(list(filter(None, faults))[:3]))


def fault(name: str, group: list, found: dict):
    """Who of a group differs from the most of it, in words; "" if nobody does."""
    by_hash = collections.defaultdict(list)
    for device in group:
        by_hash[found[device]].append(device)
    if len(by_hash) == 1:
        return ""
    sizes = sorted(map(len, by_hash.values()))
    if sizes[-1] == sizes[-2]:  # as many against as many: nobody knows who is right
        return f"{name} differs between {' and '.join(map(words, by_hash.values()))}"
    most = max(by_hash.values(), key=len)
    others = reduce(list.__add__, [each for each in by_hash.values() if each is not most])
    return f"{name} differs on {words(others)} from {words(most)}"


def words(devices: list):
    """"device 3 (process 1)", or several."""
    each = [f"{device.id} (process {device.process_index})" for device in devices]
    shown = ", ".join(each[:4]) + (f" and {len(each) - 4} more" if len(each) > 4 else "")
    return f"device{'s' if len(each) > 1 else ''} {shown}"
