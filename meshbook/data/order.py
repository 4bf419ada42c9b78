"""The order of records: a permutation for each epoch, each process's part, and the stream."""
import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np


@functools.lru_cache(maxsize=4)
def epoch_order(length: int, seed: int | np.integer, epoch: int | np.integer):
    """The order of the records in one epoch: a permutation of range(length)."""
    return np.random.default_rng((seed, epoch)).permutation(length)


def process_share(
    batch_size: int, process_index: int | None = None, process_count: int | None = None
):
    """The slice of a global batch that one process holds."""
    count = jax.process_count() if process_count is None else process_count
    index = jax.process_index() if process_index is None else process_index
    if batch_size % count:
        raise ValueError(f"batch_size {batch_size} does not divide among the processes: "
                         f"expected a multiple of {count}")
    size = batch_size // count
    return slice(index * size, (index + 1) * size)


class Stream:
    """Batches that say what they are: an iterator with a position, and an identity.

    batches: an iterator with get_state() and set_state(), such as grain's. data: what they are
    made of, with `sha256`; settings: what else decides them, as JSON values.
    """

    def __init__(self, batches: Iterator, data: Any, **settings: Any):
        self.batches, self.data, self.settings = batches, data, settings
        self.get_state, self.set_state = batches.get_state, batches.set_state

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.batches)

    @property
    def identity(self):
        """The SHA-256 of the data and the settings: equal where the batches are equal."""
        return {"sha256": self.data.sha256, **self.settings}
