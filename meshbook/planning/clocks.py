"""What the compiler's clock says of a program, in a few numbers for the record."""
from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from meshbook.costs.devices import DEVICES
from meshbook.hlo.execution import UnknownTripCount
from meshbook.hlo.schedule import NoEstimates
from meshbook.profiling.estimated_runs import estimated_run


def clocked(text: str, mesh: Any, topology: str, taken: Mapping | None = None):
    """A program's time by its compiler's clock, on the TPU of a topology: a dict, or None.

    "step", "raw" and "exposed" are ms of an `EstimatedRun`, "bases" its `by_basis`, "kinds" the ms
    that operations of each kind take; see `meshbook.profiling.estimated_runs`. None where the
    program has no estimates, or a loop that does not say how often it turns. taken: which branches
    of conditionals, as of `meshbook.hlo.schedule.play`.
    """
    try:
        run = estimated_run(text, mesh, device_of(topology), taken=taken)
    except (NoEstimates, UnknownTripCount):
        return None
    return {"step": run.step, "raw": run.raw, "exposed": sum(run.exposed().values()),
            "bases": run.by_basis(), "kinds": run.by_kind()}


def device_of(topology: str):
    """The TPU of a topology such as "v5e-8" or "v4:2x4x4": a row of the table of devices.

    Raises ValueError where the table has none.
    """
    tpus = {each.name.lower().removeprefix("tpu").strip(): each
            for each in DEVICES.values() if each.name.startswith("TPU")}
    name = re.split("[-:]", topology)[0].removeprefix("tpu")
    if name not in tpus:
        raise ValueError(f"expected a topology of a TPU among {', '.join(tpus)}; "
                         f"found {topology!r}")
    return tpus[name]


def pairs_in_order(rows: Iterable[Mapping], by: str, other: str, low: float, high: float):
    """How well two columns of the published programs order pairs: (pairs in order, all pairs).

    rows: of `results/clock.json`; the pairs are of programs on one kind of TPU whose times in the
    column `by` are `low` to `high` times one another, and in order where those of `other` are, too.
    """
    rows = list(rows)
    pairs = [(one, two) for one in rows for two in rows
             if one["tpu"] == two["tpu"] and low < one[by] / two[by] <= high]
    return sum(one[other] > two[other] for one, two in pairs), len(pairs)
