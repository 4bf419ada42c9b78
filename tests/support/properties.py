"""Properties: how many examples are drawn, and the meshes that they are drawn on.

`make test` draws a few, the same ones each time; the weekly run, with MESHBOOK_LONG set, draws others.
"""
import math
import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

LONG = bool(os.environ.get("MESHBOOK_LONG"))
MORE = 50  # times as many examples in the weekly run


def examples(few):
    """Settings of a property of which `make test` draws so many examples."""
    return settings(max_examples=few * (MORE if LONG else 1), derandomize=not LONG, deadline=None,
                    database=None, suppress_health_check=list(HealthCheck))


def shapes(most=8, axes=3):
    """Meshes of 1 to `most` devices and up to so many axes, powers of two or not: their sizes."""
    return st.sampled_from([shape for count in range(1, axes + 1)
                            for shape in _of_so_many(count, most)])


def _of_so_many(axes, most):
    """All tuples of so many sizes whose product is at most `most`."""
    if axes == 0:
        return [()]
    return [(*shape, size) for shape in _of_so_many(axes - 1, most)
            for size in range(1, most // math.prod(shape) + 1)]
