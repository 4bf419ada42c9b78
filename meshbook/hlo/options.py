"""How programs are compiled: in less time where they run a few times, and once for all runs."""
import contextlib
import os
import warnings
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

KEPT = {
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_compilation_cache_include_metadata_in_key": True,
    "jax_traceback_in_locations_limit": 0,
}


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


@contextlib.contextmanager
def optimised():
    """What is compiled in this context is optimised as usual, also after a quick start.

    For a program that runs many times, such as the step of a training, on a page whose other
    programs run a few times each.
    """
    quick = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", quick)


def keep_programs(folder: str | os.PathLike):
    """Have JAX keep all programs that it compiles in this folder, and look for them there first.

    What is found has the same text, names included, as what would be compiled: a program is known
    by its operations, their names, the compiler and its options. It has no lines of Python, which
    are others in every notebook. Where JAX has a folder already, that stays; so does an option that
    the environment has, such as JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS.
    """
    if jax.config.jax_compilation_cache_dir:
        return
    for name, value in KEPT.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)
    jax.config.update("jax_compilation_cache_dir", os.fspath(folder))
    # Another process may be writing it at this moment. Then it is compiled once more.
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")
