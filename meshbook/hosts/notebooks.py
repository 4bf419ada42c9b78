"""Colab, Kaggle and other notebooks of a stranger: this book's versions for the runtime there.

    python -m meshbook.hosts.notebooks

The first cell of every notebook runs this where the book is not installed yet. A runtime brings
its accelerator's libraries and hundreds of packages that fit them. So only what must be of this
book's version is replaced, JAX's plug-ins go with JAX, and the rest is added only where missing.
"""
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

PINS = Path(__file__).with_name("pins.txt")  # `make lock` writes it from requirements.lock
OURS = {"jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain"}
LATER = {"xprof"}  # it brings forty packages; the one page that needs it asks for it


def pins(path: str | Path = PINS):
    """[(name, version, marker)] of what the chapters need; a name may stand there twice."""
    lines = Path(path).read_text("utf8").splitlines()
    return [re.fullmatch(r"([\w.-]+)==([\w.]+)(?: ; (.*))?", line).groups("") for line in lines]


def accelerator(installed: Mapping[str, str]):
    """What the runtime's JAX was made for: "TPU", "CUDA 12", "CUDA 13", or "CPU".

    installed: {name: version} of the runtime's packages.
    """
    if "libtpu" in installed:
        return "TPU"
    for version in (13, 12):
        if f"jax-cuda{version}-plugin" in installed:
            return f"CUDA {version}"
    return "CPU"


def requirements(pins: Iterable[tuple[str, str, str]], installed: Mapping[str, str]):
    """What to ask pip for in a runtime with these packages.

    On a GPU JAX's plug-ins are replaced and NVIDIA's libraries are not: they are the runtime's,
    and torch uses them too. On a TPU `jax[tpu]` brings the libtpu that goes with it.
    """
    kind, wanted = accelerator(installed), []
    for name, version, marker in pins:
        if name in LATER or name not in OURS and name in installed:
            continue
        names = [name]
        if name == "jax" and kind == "TPU":
            names = ["jax[tpu]"]
        elif name == "jax" and kind != "CPU":
            plugin = f"jax-{kind.replace(' ', '').lower()}"
            names = ["jax", f"{plugin}-plugin", f"{plugin}-pjrt"]
        wanted += [f"{each}=={version}" + (f" ; {marker}" if marker else "") for each in names]
    return wanted


def packages():
    """{name: version} of all that is installed."""
    return {re.sub(r"[-_.]+", "-", each.metadata["Name"]).lower(): each.version
            for each in metadata.distributions() if each.metadata["Name"]}


def changes(before: Mapping[str, str], after: Mapping[str, str]):
    """What became of the packages, in words: "jax 0.7.2 → 0.12.0, new: grain 0.2.18"."""
    changed = [f"{name} {before[name]} → {version}" for name, version in sorted(after.items())
               if name in before and before[name] != version]
    new = [f"{name} {version}" for name, version in sorted(after.items()) if name not in before]
    return ", ".join(changed + ([f"new: {', '.join(new)}"] if new else [])) or "nothing to do"


def install(wanted: Sequence[str]):
    """Install these requirements. Raises RuntimeError where pip refuses, after what pip says."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if wanted and subprocess.run([*pip, *wanted]).returncode:
        raise RuntimeError(f"pip could not install {', '.join(wanted)}; it says why above")


def add(name: str):
    """Install a package of LATER in the book's version, where it is missing."""
    if name not in packages():
        install([f"{known}=={version}" for known, version, _ in pins() if known == name])


def main():
    """Install, and say in one line what was found and what changed."""
    before = packages()
    install(requirements(pins(), before))
    print(f"The Mesh Book, for {accelerator(before)}: {changes(before, packages())}")


if __name__ == "__main__":
    main()
