"""What a proof answers: a verdict in one line, or an error that says where it failed."""

from collections.abc import Sequence, Sized
from typing import Any

import jax


class ProofFailed(AssertionError):
    """A proof did not hold; the message names what was expected and what was found.

    Where the kind of fault has them, `leaf` (a path), `device`, `expected` and `found` are set.
    """

    def __init__(self, message: str, leaf: str | tuple | None = None, device: int | None = None,
                 expected: Any = None, found: Any = None):
        super().__init__(message)
        self.leaf, self.device, self.expected, self.found = leaf, device, expected, found


class Verdict:
    """A proof that held: prints as one line; the figures behind it are attributes."""

    def __init__(self, line: str, **figures: Any):
        self.line = line
        self.__dict__.update(figures)

    def __repr__(self):
        return self.line


def path_name(path: Sequence):
    """The path of a leaf as readers write it: params/blocks/0/kernel."""
    return jax.tree_util.keystr(path, simple=True, separator="/") or "the array"


def named_leaves(tree: Any):
    """The leaves of any pytree by the name of their path; ValueError where two have the same."""
    named = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if (name := path_name(path)) in named:
            raise ValueError(f"expected a name for every leaf, found two leaves that are {name}: "
                             "use no / in the keys of a tree")
        named[name] = leaf
    return named


def device_name(device: jax.Device):
    """A device as messages call it: device 3 (cpu)."""
    return f"device {device.id} ({device.platform})"


def leaf_count(leaves: Sized):
    """How many leaves, in words: 1 leaf, 34 leaves."""
    return f"{len(leaves)} lea{'f' if len(leaves) == 1 else 'ves'}"
