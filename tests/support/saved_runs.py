"""A run whose folder was resumed or begun, and the arrays of its states."""
import contextlib
import dataclasses

import jax
import numpy as np
from soak import make_stream

from meshbook.saving import checkpoints
from meshbook.saving.checkpoints import Checkpoints

WHERE = {"next_index": 0}


@contextlib.contextmanager
def begun(folder, state, key, **options):
    """Checkpoints of a folder whose run was resumed, or began."""
    with Checkpoints(folder, **options) as run:
        run.resume(state, make_stream(), key)
        yield run


def numbers(state):
    """Every array of a state, as NumPy, by its path."""
    leaves = jax.tree.leaves_with_path(checkpoints.arrays(state))
    return {jax.tree_util.keystr(path): np.array(x) for path, x in leaves}


def assert_equal(one, other):
    one, other = numbers(one), numbers(other)
    assert one.keys() == other.keys()
    for path in one:
        np.testing.assert_array_equal(one[path], other[path], strict=True, err_msg=path)


def at(state, step):
    """The same state, as if it were that of another step."""
    return dataclasses.replace(state, step=state.step * 0 + step)
