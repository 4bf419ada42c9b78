"""Programs of tests, and of notebooks under test, are compiled without LLVM's optimisation.

The HLO is the same, and so is everything that a proof reads; compiling takes half the time.
(JAX's compilation cache does not help here: to keep a CPU program costs several times as much as
to compile it so.)
"""
import os

FASTER = "--xla_backend_optimization_level=0"

# Before JAX is imported; workers and kernels inherit it.
if "xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FASTER}".strip()
