"""What was measured and recorded: on accelerators, as pictures, and by `make bench`, as rows.

A record of an accelerator is results/<device>.json of a full-size run on a GPU or a TPU. Where
there is none, nothing is drawn, and a page shows nothing.
"""

import json
from collections.abc import Callable
from pathlib import Path

from meshbook.drawing.figures import bars
from meshbook.planning.topologies import RESULTS


def accelerators(folder: Path | str = RESULTS):
    """All records of accelerators in a folder, by device."""
    found = [json.loads(path.read_text("utf8")) for path in sorted(Path(folder).glob("*.json"))]
    return [each for each in found
            if each.get("platform") in ("gpu", "tpu") and each.get("size") == "full"]


def benchmarked(name: str, folder: Path | str = RESULTS):
    """{machine: rows} of a benchmark, as each machine recorded it last."""
    found = {}
    for path in sorted(Path(folder).glob("*-cores.json")):
        record = json.loads(path.read_text("utf8"))
        runs = [run["benchmarks"][name] for run in record["runs"].values()
                if name in run["benchmarks"]]
        if runs:
            last = max(runs, key=lambda run: run["provenance"]["date"])
            found[record["machine"]] = last["rows"]
    return found


def draw_steps(cell: str, folder: Path | str = RESULTS):
    """Bars: ms a step of each contestant of a cell, its share of peak, and the floors below all.

    cell: its name in the record, such as "vit, batch 1,024, bfloat16". The floor of compute is
    that of the model's useful FLOPs, the floor of memory that of the program that moves least.
    Raises KeyError for a cell that no record has.
    """
    def rows(done):
        shown = {label(name, each): 1e3 * each["step seconds"] for name, each in done.items()}
        floors = [each["floors"] for each in done.values() if each.get("moved bytes")]
        for what in ("compute", "memory") if floors else ():
            shown[f"floor: {what}"] = 1e3 * min(each[what] for each in floors)
        return shown

    def label(name, each):
        share = each.get("share of peak")
        return name if share is None else f"{name}: {share:.0%} of peak"

    return recorded_bars(cell, folder, "step seconds", rows, "ms", "Milliseconds a step")


def draw_peaks(cell: str, folder: Path | str = RESULTS):
    """Bars: GiB that a step of each contestant of a cell needs at its peak."""
    rows = lambda done: {name: each["peak bytes"] / 2**30 for name, each in done.items()}
    what = "Memory at the peak of a step, GiB"
    return recorded_bars(cell, folder, "peak bytes", rows, "GiB", what)


def recorded_bars(cell: str, folder: Path | str, key: str, rows: Callable, unit: str, what: str):
    """Bars of what rows(contestants that have the key) gives, on the first accelerator with them.

    KeyError for a cell that no record has; None where there is no record.
    """
    records = accelerators(folder)
    if not records:
        return None
    known = sorted({name for record in records for name in record["cells"]})
    if cell not in known:
        raise KeyError(f"no cell {cell!r} was measured; there are {'; '.join(known)}")
    record = next(each for each in records if cell in each["cells"])
    contestants = record["cells"][cell]["contestants"]
    found = rows({name: each for name, each in contestants.items() if each.get(key)})
    said = ", ".join(f"{name} {value:.3g}" for name, value in found.items())
    return bars(found, unit, f"{what} on {record['device']}, {cell}: {said}")
