"""The steps of both models on one accelerator, at full size: speed, floors, memory, and proofs.

    python -m benchmarks.accelerator                 as much as 8 minutes allow; again: the rest
    python -m benchmarks.accelerator --folder OUT    the record elsewhere than in results/

It needs jax, flax, optax, numpy and jaxtyping, and PyTorch for the comparison. It measures the ViT
in batches of 128, 1,024 and 4,096 and MiniGPT with 4 and 8 blocks, in bfloat16 and float32, each
contestant in turns with the others; compares losses and gradients with the CPU's; and reads a
trace. The record, results/<device>.json, is written after every part, and parts that it already has
of the same code are left out (--again: none is). On a CPU it runs small, with MESHBOOK_SIZE=test,
to be tested.
"""

import argparse
import json
import os
import re
import sys
import time
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.__main__ import ROOT, machine, provenance
from benchmarks.accelerator_cells import cells
from benchmarks.accelerator_report import derived, device_of, show, targets
from benchmarks.accelerator_worker import Gone, Worker

BUDGET, ROUNDS = 8 * 60, 7
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "torch")
CLOSING = 15  # seconds kept for the last writing and the end of all processes
PATIENCE = 150  # seconds that one answer may take


def measured(cell, workers, left):
    """{contestant: facts and "rounds", seconds a step, or "error"}; left(): seconds that remain."""
    for worker in workers:
        worker.send(do="prepare", cell=asdict(cell))
    found, owner = {}, {}
    for worker in workers:
        try:
            ready = worker.receive(left())
        except Gone as gone:
            ready = {f"all of {worker.module}": {"error": str(gone)}}
        if ready.keys() == {"error"}:
            ready = {worker.module.removeprefix("benchmarks.accelerator_"): ready}
        found |= ready
        owner |= {name: worker for name, each in ready.items() if "error" not in each}
    for name in list(owner):
        attempt(found, owner, name, left, lambda each, more: each.update(more), do="warm")
    for name in owner:
        found[name]["rounds"] = []
    for _ in range(ROUNDS):
        for name in list(owner):
            attempt(found, owner, name, left,
                    lambda each, more: each["rounds"].append(more["seconds"]), do="round")
    return found


def attempt(found, owner, name, left, keep, do):
    """Ask one contestant for something; one that fails is out, with its reason."""
    try:
        keep(found[name], owner[name].ask(left(), do=do, name=name))
    except RuntimeError as error:
        found[name]["error"] = str(error)
        worker = owner.pop(name)
        if isinstance(error, Gone):  # with it went all that it had prepared
            for other in [each for each in owner if owner[each] is worker]:
                found[other]["error"] = f"{worker.module} ended"
                del owner[other]


def start_of(path, head, again):
    """The record so far, of the same code, versions and device, or an empty one."""
    old = json.loads(path.read_text()) if path.exists() and not again else {}
    same = all(old.get(key) == head[key] for key in ("device", "size")) and all(
        old["provenance"][key] == head["provenance"][key] for key in ("commit", "versions"))
    commit = head["provenance"]["commit"]
    same = same and commit and not commit.endswith("+edits")
    return (old if same else {"cells": {}, "checks": {}}) | head


def main(words):
    """Measure what there is time for; write after every part. Exit status 1: something failed."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.accelerator")
    options.add_argument("--folder", type=Path, default=ROOT / "results")
    options.add_argument("--again", action="store_true", help="measure what is recorded, too")
    options.add_argument("--budget", type=float, default=BUDGET, help="seconds (480)")
    chosen, begin = options.parse_args(words), time.monotonic()
    left = lambda: chosen.budget - CLOSING - (time.monotonic() - begin)
    tiny = os.environ.get("MESHBOOK_SIZE") == "test"
    workers = [Worker("benchmarks.accelerator_jax"), Worker("benchmarks.accelerator_torch")]
    checks = Worker("benchmarks.accelerator_checks",
                    XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer=")
    try:
        here = workers[0].ask(left(), do="describe")
        if here["platform"] == "cpu" and not tiny:
            sys.exit("expected an accelerator, found a CPU; MESHBOOK_SIZE=test runs it small")
        return measure(chosen, left, tiny, here, workers, checks)
    finally:
        for worker in [*workers, checks]:
            worker.end()


def measure(chosen, left, tiny, here, workers, checks):
    """All parts, in the order of what must not be missing."""
    present = [name for name in PACKAGES if is_installed(name)]
    if "torch" not in present:
        workers = workers[:1]
    head = {**here, "machine": machine(), "size": "test" if tiny else "full",
            "provenance": provenance("python -m benchmarks.accelerator", present)}
    path = chosen.folder / f"{re.sub(r'[^a-z0-9]+', '-', here['device'].lower()).strip('-')}.json"
    record, device = start_of(path, head, chosen.again), device_of(here["device"])
    parts = [*cells(tiny)]
    parts.insert(2, "checks")
    longest, missing, soon = 20.0, [], lambda: min(left(), PATIENCE)
    for part in parts:
        began, name = time.monotonic(), getattr(part, "name", part)
        if record["cells"].get(name) or (part == "checks" and record["checks"]):
            continue
        if left() < min(longest, 45):
            missing.append(name)
            continue
        if part == "checks":
            record["checks"] = checked(checks, soon, tiny)
        else:
            record["cells"][name] = derived(
                part, measured(part, workers, soon), device)
            show(name, record["cells"][name])
        longest = max(longest, time.monotonic() - began)
        write(path, record)
    record |= {"missing": missing, "targets": [list(row) for row in targets(record)]}
    write(path, record)
    return closing(path, record, missing)


def checked(worker, left, tiny):
    """Proof 2 on this device, and the table of operations: {name: result}."""
    found = {}
    for name in ("vit", "gpt", "fast vit", "fast gpt", "vit trace", "gpt trace"):
        try:
            found[name] = worker.ask(left(), do=name, tiny=tiny)
        except RuntimeError as error:
            found[name] = {"error": str(error)}
        print(f"{name}: {found[name].get('line') or found[name].get('error')}", flush=True)
    worker.end()
    return found


def write(path, record):
    """The record into its file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".new")
    scratch.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    scratch.replace(path)


def closing(path, record, missing):
    """The targets on the terminal; 1 where something failed."""
    print()
    for what, wished, found in record["targets"]:
        print(f"{what:58} {wished:14} {'not measured' if found is None else f'{found:.3f}'}")
    if missing:
        print(f"no time was left for: {'; '.join(missing)}. Run the command again for those.")
    print(f"recorded in {path}")
    failed = [name for part in record["cells"].values()
              for name, each in part["contestants"].items() if "error" in each]
    failed += [name for name, each in record["checks"].items() if "error" in each]
    return 1 if failed else 0


def is_installed(name):
    """Whether a package is here."""
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
