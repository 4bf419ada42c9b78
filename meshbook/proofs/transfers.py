"""What is sent from device to device outside of compiled programs, where their text cannot tell.

A pipeline on submeshes sends its activations with `jax.device_put`, and `jit` moves an argument
that lies elsewhere than it is wanted. Neither stands in any HLO.
"""

import contextlib
import math
from unittest import mock

import jax


class Sent:
    """How many arrays went from device to device, and the wire bytes of that."""

    def __init__(self):
        self.count = self.bytes = 0


@contextlib.contextmanager
def transfers():
    """Count what this block sends from device to device with `jax.device_put`: yields a Sent.

    Counted is each shard that its device did not hold before; what comes from the host is not. The
    function has to be called by its full name. An argument that `jit` would move by itself is
    refused: the block raises JAX's error, "Disallowed device-to-device transfer".
    """
    sent, put = Sent(), jax.device_put

    def counted(x, *args, **settings):
        moved = put(x, *args, **settings)
        for before, after in zip(jax.tree.leaves(x), jax.tree.leaves(moved), strict=True):
            if isinstance(before, jax.Array) and (size := _arrived(before, after)):
                sent.count, sent.bytes = sent.count + 1, sent.bytes + size
        return moved

    with mock.patch.object(jax, "device_put", counted):
        with jax.transfer_guard_device_to_device("disallow"):
            yield sent


def _arrived(before, after):
    """Bytes of the shards that their devices did not hold before."""
    had = before.sharding.devices_indices_map(before.shape)
    has = after.sharding.devices_indices_map(after.shape)
    shard = after.sharding.shard_shape(after.shape)
    new = [device for device, index in has.items() if had.get(device) != index]
    return len(new) * after.dtype.itemsize * math.prod(shard)
