"""Arrays laid out on eight devices, and where their parts are, read without the code under test."""
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from meshbook.sharding import make_mesh

MESH = make_mesh((4, 2))
CUBE = make_mesh((2, 2, 2), ("a", "b", "c"))


def put(shape, *spec, mesh=MESH):
    return jax.device_put(np.zeros(shape, np.float32), NamedSharding(mesh, P(*spec)))


def held(array):
    """{device id: slices} read without the code under test."""
    index = lambda shard: zip(shard.index, array.shape)
    return {
        shard.device.id: tuple(slice(*part.indices(size)[:2]) for part, size in index(shard))
        for shard in array.addressable_shards
    }
