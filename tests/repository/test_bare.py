"""What a GPU machine has is enough: the base requirements, and what these bring along."""
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

import pytest

OURS = {"meshbook", "helpers", "benchmarks"}
BARE = "jax", "flax", "optax", "numpy", "jaxtyping"
MODULES = [f"meshbook.{name}" for name in (
    "models", "models.fast", "models.fused_loss", "training", "profiling.traces", "proofs",
    "costs.work", "costs.devices")]
BENCHMARK = [f"benchmarks.accelerator{part}" for part in ("", "_jax", "_checks")]
GUARD = """
import importlib, sys
blocked = set({blocked!r})

class Guard:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ModuleNotFoundError(f"not in the bare environment: {{name}}")

sys.meta_path.insert(0, Guard())
for module in {modules!r}:
    importlib.import_module(module)
"""


def brought_along(*names):
    """These distributions, and all that they require without extras."""
    found, waiting = set(), list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        found.add(name)
        try:
            needs = requires(name) or []
        except PackageNotFoundError:
            continue
        waiting += [re.match(r"[\w.-]+", need)[0] for need in needs if "extra ==" not in need]
    return found


def blocked():
    """The names of all that is installed here and not there."""
    same, there = lambda name: re.sub(r"[-_.]+", "-", name).lower(), brought_along(*BARE)
    asked_for = {"typeguard"}  # jaxtyping asks whether it is there, and goes on without
    return sorted({name for name, owners in packages_distributions().items()
                   if not {same(owner) for owner in owners} & there} - OURS - asked_for)


def imported(*modules):
    code = GUARD.format(blocked=blocked(), modules=modules)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize("modules", [MODULES, BENCHMARK])
def test_they_are_imported_with_the_base_requirements_alone(modules):
    done = imported(*modules)
    assert done.returncode == 0, done.stderr[-500:]


def test_the_guard_stops_what_is_not_there():
    assert {"torch", "grain", "PIL", "matplotlib", "tqdm"} <= set(blocked())
    assert not {"jax", "jaxlib", "flax", "optax", "numpy", "scipy"} & set(blocked())
    assert "not in the bare environment: matplotlib" in imported("meshbook.drawing.figures").stderr
