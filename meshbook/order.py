"""The order of records: a permutation for each epoch, and each process's part of a batch."""
import functools

import jax
import numpy as np


@functools.lru_cache(maxsize=4)
def epoch_order(length, seed, epoch):
    """The order of the records in one epoch: a permutation of range(length)."""
    return np.random.default_rng((seed, epoch)).permutation(length)


def process_share(batch_size, process_index=None, process_count=None):
    """The slice of a global batch that one process holds."""
    count = jax.process_count() if process_count is None else process_count
    index = jax.process_index() if process_index is None else process_index
    if batch_size % count:
        raise ValueError(f"batch_size {batch_size} does not divide among the processes: "
                         f"expected a multiple of {count}")
    size = batch_size // count
    return slice(index * size, (index + 1) * size)
