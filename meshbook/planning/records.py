"""What was measured and recorded: on accelerators, by `make bench`, and with TinyStories.

A record of an accelerator is results/<device>.json of a full-size run on a GPU or a TPU; that of
TinyStories is results/tinystories.json. Where there is none, nothing is drawn, and a page shows
nothing.
"""

import json
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from meshbook.drawing.figures import bars, curves
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


def draw_benchmark(name: str, machine: str, labels: Mapping[str, str], about: str,
                   folder: Path | str = RESULTS):
    """Bars of what a machine recorded of a benchmark.

    labels: {name of a row: what the bar is called}, in this order, of rows that have a value;
    about: what the bars are. Raises KeyError for a machine or a row that is not in the record.
    """
    values = {row["name"]: (row["value"], row["unit"]) for row in benchmarked(name, folder)[machine]
              if row["value"] is not None}
    shown = {label: values[row][0] for row, label in labels.items()}
    (unit,) = {values[row][1] for row in labels}
    words = ", ".join(f"{label} {value:.3g}" for label, value in shown.items())
    return bars(shown, unit, f"{about}, in {unit}, recorded on {machine}: {words}")


def tinystories(part: str, folder: Path | str = RESULTS):
    """A part of the record of TinyStories, "stories" or "training"; None where there is none."""
    path = Path(folder) / "tinystories.json"
    return json.loads(path.read_text("utf8")).get(part) if path.exists() else None


def draw_training(folder: Path | str = RESULTS):
    """The recorded run on TinyStories: its training and validation loss, or None without one."""
    run = tinystories("training", folder)
    if run is None:
        return None
    looks = run["looks"]
    found = {"training": tuple(zip(*run["losses"])),
             "validation": ([look["step"] for look in looks],
                            [look["validation"] for look in looks])}
    first, last = looks[0]["validation"], looks[-1]["validation"]
    return curves(found, "step", "loss in nats per token",
                  f"Training and validation loss on TinyStories in {run['steps']:,} steps: "
                  f"validation falls from {first:.2f} to {last:.2f} nats per token",
                  marks=[("guessing", math.log(run["config"]["vocabulary"]))])


def written_samples(looks: Sequence[int] = (0, 1, -1), prompt: int = 0,
                    folder: Path | str = RESULTS):
    """What the recorded model wrote after a prompt at some of its looks, as lines; "" without one.

    looks: which of the recorded ones, 0 for that before training; prompt: its number.
    """
    run = tinystories("training", folder)
    if run is None:
        return ""
    chosen = sorted({range(len(run["looks"]))[look] for look in looks if
                     -len(run["looks"]) <= look < len(run["looks"])})
    lines = []
    for look in (run["looks"][place] for place in chosen):
        text = " ".join((run["prompts"][prompt] + look["samples"][prompt]).split())
        text = "".join(sign if sign.isprintable() else "·" for sign in text)
        lines += [f"After {look['step']:,} steps, validation {look['validation']:.2f} nats per "
                  f"token ({look['bits per byte']:.2f} bits per byte):",
                  textwrap.fill(text, 76), ""]
    return "\n".join(lines).rstrip()


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


def targets_met(record: Mapping):
    """{target: whether it was met} of a record of an accelerator, of the targets that it measured.

    A target wishes for "at least x" or "at most x".
    """
    def met(wished, value):
        number = float(wished.split()[-1])
        return value >= number if wished.startswith("at least") else value <= number

    return {what: met(wished, value) for what, wished, value in record["targets"]
            if value is not None}


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
