"""How programs that run a few times are compiled: in less time, with the same collectives."""
from collections.abc import Mapping

import jax
import jaxlib
from jax.sharding import Mesh

# On CPUs alone: in one piece, and without the fusion emitters of jaxlib 0.10, which newer ones
# cannot do without.
ON_CPUS = {"xla_cpu_parallel_codegen_split_count": 1}
if jaxlib.__version__.startswith("0.10."):
    ON_CPUS["xla_cpu_use_fusion_emitters"] = False
FAST = {"xla_backend_optimization_level": 0} | ON_CPUS  # and without LLVM's optimisation


def flags(options: Mapping):
    """Compiler options as XLA_FLAGS has them, for all programs of a process."""
    return " ".join(f"--{name}={value}".lower() for name, value in options.items())


def compiled_fast(mesh: Mesh | None = None) -> dict:
    """Compiler options for what runs a few times on this mesh, or on JAX's first device.

    On a CPU they save about a third of the time that compiling takes, with jaxlib 0.10 more than
    half. Collectives and products stay as they are; what is fused with what may differ.
    """
    device = mesh.devices.flat[0] if mesh else jax.devices()[0]
    return FAST if device.platform == "cpu" else {}
