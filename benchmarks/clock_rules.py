"""Small programs that show what a TPU's compiler charges for: results/clock-rules.json.

    make aot && .venv-aot/bin/python -m benchmarks.clock_rules

Each is compiled for one chip of a v5e. Its text is kept, so that a page reads the estimates.
"""

import os

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from benchmarks.__main__ import ROOT, machine, provenance
from meshbook.planning import topologies

RULES = ROOT / "results" / "clock-rules.json"
SIZE = 8192  # rows and columns: far more than fits beside the core


def one_step(x):
    """One element-wise step: no fusion."""
    return -x


def two_steps(x):
    """The same bytes, in a fusion."""
    return x * x + x


def two_arrays(x, y):
    """One step on two arrays: no fusion."""
    return x * y


def two_arrays_fused(x, y):
    """The same bytes, in a fusion."""
    return x * y + x


def row_sums(x):
    """The sum of each row: no fusion."""
    return x.sum(-1)


def row_sums_fused(x):
    """The same bytes, in a fusion."""
    return (x * x + x).sum(-1)


PROGRAMS = {"one array, alone": (one_step, 1), "one array, fused": (two_steps, 1),
            "two arrays, alone": (two_arrays, 2), "two arrays, fused": (two_arrays_fused, 2),
            "row sums, alone": (row_sums, 1), "row sums, fused": (row_sums_fused, 1)}


def text_of(function, arrays, dtype):
    """The HLO text of a program of so many square arrays, compiled for a v5e."""
    place = SingleDeviceSharding(topologies.topology("v5e-8")[0])
    shape = jax.ShapeDtypeStruct((SIZE, SIZE), dtype, sharding=place)
    with topologies.quiet():
        return jax.jit(function).lower(*[shape] * arrays).compile().as_text()


def main():
    """Compile and record."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_traceback_in_locations_limit", 0)  # no paths of this machine in texts
    texts = {f"{name}, {jnp.dtype(dtype).name}": text_of(*what, dtype)
             for name, what in PROGRAMS.items() for dtype in (jnp.float32, jnp.bfloat16)}
    source = provenance("python -m benchmarks.clock_rules", ("jax", "jaxlib", "libtpu"))
    topologies.write_json(RULES, {"provenance": {"machine": machine(), **source},
                                  "programs": texts})


if __name__ == "__main__":
    main()
