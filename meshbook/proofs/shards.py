"""What each device holds of an array, read from its shards."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from meshbook.proofs.verdicts import ProofFailed


def require_array(name: str, leaf: Any):
    """Raise ProofFailed for what is no array on devices, ValueError for one that was donated."""
    if not isinstance(leaf, jax.Array):
        kind = type(leaf).__name__
        raise ProofFailed(f"leaf {name}: expected a jax.Array on devices, found {kind} on the host",
                          leaf=name, expected="jax.Array", found=kind)
    if leaf.is_deleted():
        raise ValueError(f"leaf {name}: its numbers are gone, it was donated to a step; "
                         "pass the state that the step returned")


def bytes_by_device(tree: Any):
    """How many bytes of a pytree each of this process's devices holds, by device."""
    held = {}
    for leaf in jax.tree.leaves(tree):
        for shard in getattr(leaf, "addressable_shards", ()):
            (device,) = shard.data.devices()
            held[device] = held.get(device, 0) + bits_of(shard.data).nbytes
    return held


def slices_of(index: Sequence[slice], shape: Sequence[int]):
    """A shard's index as ((start, stop), ...), one pair per dimension."""
    pairs = zip(index, shape, strict=False)  # the index of a random key has one entry more
    return tuple(each.indices(extent)[:2] for each, extent in pairs)


def pieces_of(leaf: Any):
    """{slices: [(device, elements)]}: what the devices hold; partial sums are no slices."""
    pieces = {}
    if not getattr(getattr(getattr(leaf, "sharding", None), "spec", None), "unreduced", ()):
        for shard in getattr(leaf, "addressable_shards", ()):
            (device,) = shard.data.devices()
            copies = pieces.setdefault(slices_of(shard.index, leaf.shape), [])
            copies.append((device, np.asarray(bits_of(shard.data))))
    return pieces


def bits_of(array: Any):
    """The bits of an array; a random key has its own dtype, and its data is its bits."""
    if isinstance(array, jax.Array) and jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(array)
    return array


def wide(array: Any):
    """An array on the host in 64 bits, or 2 x 64 where it is complex; of a random key its bits."""
    whole = np.asarray(bits_of(array))
    return whole.astype(np.complex128 if np.iscomplexobj(whole) else np.float64)
