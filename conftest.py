"""Programs of tests, and of notebooks under test, are compiled as fast as XLA can.

What a proof reads, and what a page asserts, holds for them and for those of the book.
(JAX's compilation cache does not help here: to keep a CPU program costs several times as much as
to compile it so.)
"""
import os

import argument_types

argument_types.check()  # before the package is imported

from meshbook.sharding import FAST, flags  # noqa: E402

# Before JAX makes its devices; workers and kernels inherit it. What was set stays as it is.
os.environ["XLA_FLAGS"] = f"{flags(FAST)} {os.environ.get('XLA_FLAGS', '')}".strip()


def pytest_collection_modifyitems(items):
    """Notebooks, then profiles (each holds every program that its process has compiled), training,
    and the rest: two workers end together when nothing long comes last."""
    first = ("profiling", "training")
    def place(item):
        if item.path.suffix != ".py":
            return -1
        folder = item.path.parent.name
        return first.index(folder) if folder in first else len(first)

    items.sort(key=place)
