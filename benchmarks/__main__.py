"""Run every benchmark, print one table, and record it in results/.

    python -m benchmarks              all of them (make bench)
    python -m benchmarks dispatch     only bench_dispatch.py

A benchmark is a module bench_NAME.py with a function `run()` that returns a list of
rows: dicts with name, value, unit, and where they say something floor, ratio and note. Each
runs in a process of its own, so that none inherits another's devices or memory.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from datetime import datetime, timezone
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("jax", "jaxlib", "flax", "optax", "numpy", "grain", "torch", "torchvision")
CHILD = "--rows"


def names():
    """The benchmarks there are."""
    paths = sorted(Path(__file__).parent.glob("bench_*.py"))
    return [path.stem.removeprefix("bench_") for path in paths]


def measure(name):
    """{"rows", "device"} of a benchmark, run in its own process; it may write on the terminal."""
    read, write = os.pipe()
    command = [sys.executable, "-m", "benchmarks", CHILD, name, str(write)]
    child = subprocess.Popen(command, cwd=ROOT, pass_fds=[write])
    os.close(write)
    with os.fdopen(read) as pipe:
        found = pipe.read()
    if child.wait():
        sys.exit(f"benchmark {name} failed")
    return json.loads(found)


def answer(name, descriptor):
    """In the child: run one benchmark, and hand back its rows and the accelerator it ran on."""
    found = {"rows": import_module(f"benchmarks.bench_{name}").run(), "device": None}
    if "jax" in sys.modules and (device := sys.modules["jax"].devices()[0]).platform != "cpu":
        found["device"] = device.device_kind
    with os.fdopen(int(descriptor), "w") as pipe:
        json.dump(found, pipe)


def machine(device=None):
    """An accelerator, or else the processor, and how many of the processor's cores there are."""
    cores = len(os.sched_getaffinity(0))
    if device:
        return f"{device}, {cores} cores"
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    model = found[1] if found else platform.processor() or platform.machine()
    return f"{' '.join(model.split())}, {cores} cores"


def git(*words):
    """What git says of this tree; nothing where there is no git, or no repository."""
    if shutil.which("git") is None:
        return ""
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def provenance(command, packages=VERSIONS):
    """Where numbers come from: when, by what command, from which code, with which packages.

    The code's commit is what git says, or MESHBOOK_COMMIT where the tree came without git.
    """
    here = git("rev-parse", "HEAD") + ("+edits" if git("status", "--porcelain") else "")
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "commit": os.environ.get("MESHBOOK_COMMIT") or here,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
    }


def record(results, arguments):
    """Put the results into the files of the machines they ran on, under this version of JAX."""
    source, paths = provenance(" ".join(["python -m benchmarks", *arguments])), {}
    for name, found in results.items():
        where = machine(found["device"])
        slug = re.sub(r"[^a-z0-9]+", "-", where.lower()).strip("-")
        path = paths[where] = ROOT / "results" / f"{slug}.json"
        runs = json.loads(path.read_text()).get("runs", {}) if path.exists() else {}
        run = runs.setdefault(f"jax {version('jax')}", {"benchmarks": {}})
        run["benchmarks"][name] = {"provenance": source, "rows": found["rows"]}
        content = {"machine": where, "runs": dict(sorted(runs.items()))}
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return list(paths.values())


def number(value):
    """A number as the table shows it; a text stays a text."""
    if isinstance(value, str) or value is None:
        return value or ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def table(results):
    """All rows of all benchmarks."""
    shown = Table("benchmark", "what", "value", "unit", "floor", "note")
    for name, found in results.items():
        for row in found["rows"]:
            shown.add_row(name, row["name"], number(row["value"]), row["unit"],
                          number(row.get("floor")), row.get("note", ""))
        shown.add_section()
    return shown


def main(arguments):
    """Run the named benchmarks, or all."""
    if arguments[:1] == [CHILD]:
        return answer(*arguments[1:])
    if unknown := set(arguments) - set(names()):
        sys.exit(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(names())}")
    results = {name: measure(name) for name in arguments or names()}
    paths = record(results, arguments)
    Console().print(table(results))
    print("recorded in", ", ".join(str(path.relative_to(ROOT)) for path in paths))


if __name__ == "__main__":
    main(sys.argv[1:])
