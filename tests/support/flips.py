"""States in which one bit of what one device holds is another."""
import dataclasses

import jax
import numpy as np

from meshbook.proofs.verdicts import path_name
from meshbook.saving.contents import arrays


def flipped(x, device, bit=0):
    """The same array, but that one bit of what one device holds is another."""
    def own(shard):
        raw = np.array(shard.data)
        if shard.device.id == device:
            raw.reshape(-1).view(np.uint8)[0] ^= 1 << bit
        return jax.device_put(raw, shard.device)

    return jax.make_array_from_single_device_arrays(
        x.shape, x.sharding, [own(each) for each in x.addressable_shards])


def with_flip(state, name, device, bit=0):
    """A state whose leaf of this path, such as params/w, has such a bit."""
    tree = jax.tree.map_with_path(
        lambda path, x: flipped(x, device, bit) if path_name(path) == name else x, arrays(state))
    return dataclasses.replace(state, **tree)
