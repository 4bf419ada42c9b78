"""What was recorded, as one table: programs compiled for TPUs, benchmarks, steps of accelerators.

A record is "tpu", "tpu-decoder" or another of COMPILED, which `python -m benchmarks.aot` writes; or
it has the name of a benchmark, or of a cell of `python -m benchmarks.accelerator`. What is not
there has no rows, and a page shows nothing.
"""
from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from meshbook.costs.devices import GIB
from meshbook.costs.work import causal_work, step_work
from meshbook.drawing.figures import bars
from meshbook.drawing.svg import readable
from meshbook.planning.clocks import device_of
from meshbook.planning.programs import step_of
from meshbook.planning.recorded_steps import asked_step
from meshbook.planning.topologies import RESULTS, recorded
from meshbook.text import text_table

COMPILED = ("tpu", "tpu-decoder", "tpu-pipeline", "tpu-context", "tpu-experts", "tpu-meshes",
            "tpu-drawn")
FIELDS = (
    "record", "name", "device", "mesh", "plan", "rows", "fits", "peak", "live", "held",
    "temporaries", "flops", "useful", "mfu", "ms", "exposed", "computing", "copying", "copies",
    "exchanges", "value", "unit", "ratio", "machine", "date", "cell", "program", "step")
MEASURED = {"peak": "peak bytes", "temporaries": "temporary bytes", "flops": "flops",
            "useful": "useful flops", "mfu": "share of peak"}  # as accelerators call them
BYTES = {"peak", "live", "held", "temporaries"}
HEADINGS = {"ms": "a step", "mfu": "MFU"}


def frame(record: str | None = None, *fields: str, folder: Path | str = RESULTS):
    """The rows of a record, or of all, as a pandas.DataFrame by name, with FIELDS and more fields
    of the cells; what is not known, or of another kind of row, is nan or None.

    device: a topology such as "v5e-8", or an accelerator. program: a Compilation, of which mesh,
    fits, flops and bytes are; step: its Step, where a table describes it, with plan and rows. cell:
    what the record says was asked for, or measured.
    ms: of a step by the compiler's clock, to which add up exposed (a chip only waits for links),
    computing, and copying, all else that its core does; in "tpu-meshes" with each axis of a mesh as
    a line of chips. copies: ms of all copies, also of those beside the core. exchanges: {kind of
    collective: [ms on the links, ms of them exposed]}.
    useful: FLOPs of a device that have to be done, in "tpu-context" of pairs of tokens that the
    mask leaves; mfu: what part they are of what its matrix units could have done in that time.
    value, unit, ratio, machine, date: of what was measured.
    """
    import pandas  # where it is needed only: compiling for a TPU does without

    rows = rows_of(record, folder)
    found = pandas.DataFrame(rows, columns=FIELDS)
    more = {field: [(row["cell"] or {}).get(field) for row in rows] for field in fields}
    return found.assign(**more).set_index("name")


def rows_of(record: str | None = None, folder: Path | str = RESULTS):
    """The rows of a record, or of all, as dicts; of a benchmark those of a machine's last run."""
    folder = Path(folder)
    found = [row for name in COMPILED if record in (None, name) for row in _compiled(name, folder)]
    if record in COMPILED:
        return found
    return found + [row for row in (*_benchmarks(folder), *_accelerated(folder))
                    if record in (None, row["record"])]


def _compiled(record, folder):
    for name, made in recorded(record, folder).items():
        step = asked_step(record, made.cell) if made.cell else step_of(name, made.mesh)
        row = {"record": record, "name": name, "device": made.topology, "cell": made.cell,
               "program": made, "step": step, "exchanges": _exchanges(record, made.seen)}
        row |= {each: getattr(made, each) for each in
                ("mesh", "fits", "peak", "live", "held", "temporaries", "flops")}
        row |= {"plan": step.plan, "rows": step.rows} if step else {}
        row |= _times(made) | {"useful": _useful(record, step, made)}
        if row["useful"] and made.clock:
            most = device_of(made.topology).flops * row["ms"] / 1e3
            row["mfu"] = row["useful"] / most
        yield row


def _exchanges(record, seen):
    return seen if record == "tpu-context" else (seen or {}).get("exchanges")


def _times(made):
    """{column: ms} by the compiler's clock; {} without one."""
    if made.clock is None:
        return {}
    lines = made.seen if "step" in (made.seen or {}) else made.clock
    ms, exposed, kinds = lines["step"], lines["exposed"], made.clock["kinds"]
    return {"ms": ms, "exposed": exposed, "computing": kinds["compute"],
            "copying": ms - exposed - kinds["compute"], "copies": kinds["copy"]}


def _useful(record, step, made):
    if step is None:
        return (made.seen or {}).get("useful")
    return causal_work(step) if record == "tpu-context" else step_work(step).useful


def _benchmarks(folder):
    for path in sorted(folder.glob("*-cores.json")):
        found = json.loads(path.read_text("utf8"))
        runs = [pair for run in found["runs"].values() for pair in run["benchmarks"].items()]
        last = dict(sorted(runs, key=lambda pair: pair[1]["provenance"]["date"]))
        for name, run in last.items():
            for row in run["rows"]:
                yield {each: row.get(each) for each in ("name", "value", "unit", "ratio")} | {
                    "record": name, "machine": found["machine"], "cell": row,
                    "date": run["provenance"]["date"]}


def accelerators(folder: Path | str = RESULTS):
    """All records of accelerators in a folder, each as it is: a full-size run on a GPU or a TPU."""
    found = [json.loads(path.read_text("utf8")) for path in sorted(Path(folder).glob("*.json"))]
    return [each for each in found
            if each.get("platform") in ("gpu", "tpu") and each.get("size") == "full"]


def _accelerated(folder):
    for each in accelerators(folder):
        for name, cell in each["cells"].items():
            for who, did in cell["contestants"].items():
                seconds = did.get("step seconds")
                yield {"record": name, "name": who, "device": each["device"], "cell": did,
                       "value": seconds and 1e3 * seconds, "unit": "ms a step",
                       "machine": each["machine"], "date": each["provenance"]["date"],
                       **{column: did.get(key) for column, key in MEASURED.items()}}


def targets_met(record: Mapping):
    """{target: whether it was met} of a record of an accelerator, of the targets that it measured.

    A target wishes for "at least x" or "at most x".
    """
    def met(wished, value):
        number = float(wished.split()[-1])
        return value >= number if wished.startswith("at least") else value <= number

    return {what: met(wished, value) for what, wished, value in record["targets"]
            if value is not None}


def as_table(rows: Any, columns: Sequence[str], title: str = ""):
    """Chosen columns of a `frame` as a text table; the title stands above the names.

    Bytes are in GiB, an MFU is in per cent, other numbers are ms; words stay as they are.
    """
    heads = [title, *(HEADINGS.get(each, each) for each in columns)]
    body = zip(rows.index, *(_said(each, list(rows[each])) for each in columns))
    return text_table(heads, list(body), len(columns))


def _said(column, values):
    """The values of a column in words; "" for what is not known, which is nan."""
    digits = int(any(not isinstance(each, str) and each < 100 for each in values))
    def said(value):
        if isinstance(value, str):
            return value
        if value != value:
            return ""
        if column in BYTES:
            return f"{value / GIB:.2f} GiB"
        return f"{value:.1%}" if column == "mfu" else f"{value:,.{digits}f} ms"

    return map(said, values)


def waits(steps: Any, *kinds: str):
    """Of exchanges of these kinds in each row of a `frame`: ms on the links, ms of them exposed."""
    found = [[exchanges.get(kind, (0.0, 0.0)) for kind in kinds] for exchanges in steps.exchanges]
    return tuple([sum(pair[at] for pair in pairs) for pairs in found] for at in (0, 1))


def labelled(step: Any):
    """What a bar of a step is called: its name and its MFU."""
    return f"{step.Index}: MFU {step.mfu:.0%}"


def spent(steps: Any, *kinds: str):
    """{name and MFU: {what a chip does: ms}} of the rows of a `frame` that have ms, for `draw_ms`.

    Of its waiting, that for exchanges of these kinds is apart.
    """
    steps = steps.dropna(subset="ms")
    rest, found = f"waiting for {'other ' * bool(kinds)}transfers", {}
    apart = {f"waiting for {kind}s": waits(steps, kind)[1] for kind in kinds}
    for at, step in enumerate(steps.itertuples()):
        own = {what: ms[at] for what, ms in apart.items()}
        found[labelled(step)] = {"computing": step.computing, "copying": step.copying, **own,
                              rest: step.exposed - sum(own.values())}
    return found


def draw_ms(parts: Mapping[str, Mapping[str, Real]], of: str = "a step by the compiler's clock"):
    """Bars of ms made of parts, {label: {part: ms}}; None where there are none."""
    said = "; ".join(f"{label}, {sum(row.values()):.0f} ms" for label, row in parts.items())
    return bars(parts, "ms", f"Milliseconds of {of}. {said}") if parts else None


def draw_benchmark(name: str, machine: str, labels: Mapping[str, str], about: str,
                   folder: Path | str = RESULTS):
    """Bars of what a machine recorded of a benchmark.

    labels: {name of a row: what the bar is called}, in this order, of rows that have a value;
    about: what the bars are. Raises KeyError for a machine or a row that is not in the record.
    """
    rows = {(row["machine"], row["name"]): row for row in rows_of(name, folder)
            if row["value"] is not None}
    chosen = {label: rows[machine, row] for row, label in labels.items()}
    (unit,) = {row["unit"] for row in chosen.values()}
    return _bars({label: row["value"] for label, row in chosen.items()}, unit,
                 f"{about}, in {unit}, recorded on {machine}")


def draw_steps(cell: str, folder: Path | str = RESULTS):
    """Bars: ms a step of each contestant of a cell, its share of peak, and the floors below all.

    cell: its name in the record, such as "vit, batch 1,024, bfloat16". The floor of compute is
    that of the model's useful FLOPs, the floor of memory that of the program that moves least.
    None without a record; raises KeyError for a cell that no record has.
    """
    device, rows = _contestants(cell, folder)
    done = [row for row in rows if row["value"]]
    shown = {row["name"] if row["mfu"] is None else f"{row['name']}: {row['mfu']:.0%} of peak":
             row["value"] for row in done}
    floors = [row["cell"]["floors"] for row in done if row["cell"].get("moved bytes")]
    for what in ("compute", "memory") if floors else ():
        shown[f"floor: {what}"] = 1e3 * min(each[what] for each in floors)
    return _bars(shown, "ms", f"Milliseconds a step on {device}, {cell}")


def draw_peaks(cell: str, folder: Path | str = RESULTS):
    """Bars: GiB that a step of each contestant of a cell needs at its peak; as `draw_steps`."""
    device, rows = _contestants(cell, folder)
    shown = {row["name"]: row["peak"] / GIB for row in rows if row["peak"]}
    return _bars(shown, "GiB", f"Memory at the peak of a step, GiB on {device}, {cell}")


def _contestants(cell, folder):
    """(the first accelerator that has a cell, its rows); no rows where none is recorded."""
    known = {name for each in accelerators(folder) for name in each["cells"]}
    if known and cell not in known:
        raise KeyError(f"no cell {cell!r} was measured; there are {'; '.join(sorted(known))}")
    rows = rows_of(cell, folder)
    first = rows[0]["device"] if rows else None
    return first, [row for row in rows if row["device"] == first]


def _bars(shown, unit, about):
    said = ", ".join(f"{label} {readable(value)}" for label, value in shown.items())
    return bars(shown, unit, f"{about}: {said}") if shown else None
