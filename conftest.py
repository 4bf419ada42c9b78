"""Programs of tests, and of notebooks under test, are compiled as fast as XLA can.

What a proof reads, and what a page asserts, holds for them and for those of the book.
"""
import gc
import os

gc.set_threshold(1_000_000, 20, 50)  # JAX makes many objects and few circles: it took a tenth

import argument_types  # noqa: E402

argument_types.check()  # before the package is imported

from meshbook.hlo.options import FAST, flags  # noqa: E402

# Before JAX makes its devices; workers and kernels inherit it. What was set stays as it is.
os.environ["XLA_FLAGS"] = f"{flags(FAST)} {os.environ.get('XLA_FLAGS', '')}".strip()


# Notebooks come first. A profile holds every program that its process has compiled so far, and
# training's tests are long: with nothing long at the end, two workers end together.
EARLY = {"profiling": 1, "training": 2}


def pytest_collection_modifyitems(items):
    """Notebooks, the folders of EARLY, then the rest."""
    items.sort(key=lambda item: item.path.suffix == ".py" and EARLY.get(item.path.parent.name, 3))
