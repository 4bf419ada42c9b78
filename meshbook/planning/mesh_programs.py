"""Plans beside each other: JAXformer on 32 TPU v4, by formula and as it was compiled.

Of the record "tpu-meshes" times are by the compiler's clock, with the axes of the mesh as lines of
chips: a slice of fewer than 4 × 4 × 4 chips of a v4 has no links around.
"""
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshbook.costs.devices import GIB
from meshbook.costs.plans import Plan
from meshbook.planning.records import draw_ms
from meshbook.text import text_table

SLICES = "2 slices v4:2x2x1"
SLICED = dict(vocabulary=1_024, tokens=256, embed=512, hidden=2048, heads=8, layers=4)
RULES = {"tensor_parallel": "whole", "fully_sharded": "fsdp", "fully_sharded_kept": "fsdp",
         "fully_sharded_again": "again"}  # for tables
SPENT = {"products": "products", "memory": "memory", "random": "random numbers"}


def on_torus(made: Any, wire: float):
    """ms of a step: the compiler's work, and links as they lie on the torus; nan if it is refused.

    made: a row of the record; wire: seconds, of a `Ranked`. The clock lays every axis of a mesh
    along one line of chips, so its own waits are those of another machine.
    """
    return made.ms - made.exposed + 1e3 * wire


def name_of_slices(how: str):
    """The name under which a program for two slices is kept; how: whole, hybrid or all chips."""
    return f"{SLICES} (2, 4) {how}"


def rank_correlation(one: Sequence[float], other: Sequence[float]):
    """Spearman's: the correlation of the places that values without ties have in their orders."""
    places = [np.argsort(np.argsort(values)) for values in (one, other)]
    return float(np.corrcoef(*places)[0, 1])


def table_of_ranked(found: Sequence[Any]):
    """A text table of Ranked plans, the first one first: what each is, ms of a step, GiB."""
    rows = []
    for place, each in enumerate(found, 1):
        plan, staged = each.plan, each.plan.stage > 1
        rows.append((str(place), plan.where, RULES.get(plan.rules, plan.rules),
                     plan.schedule if staged else "", str(plan.microbatches), plan.remat,
                     f"{1e3 * each.step:.0f}", f"{each.peak / GIB:.0f}"))
    return text_table(("", "mesh", "rules", "schedule", "m", "remat", "ms", "GiB"), rows,
                      numbers=2)


def table_of_recorded(found: Sequence[Any], record: Any):
    """A text table: of each Ranked plan that was compiled ms by formula and by the clock, GiB.

    record: the `records.frame` of "tpu-meshes", by plan. The plans stand in the order of the
    formula, their meshes as sizes of batch, expert, stage and model.
    """
    rows = []
    for each in sorted(found, key=lambda each: each.step):
        made = record.loc[each.plan]
        clock = (f"{made.ms:.0f}", f"{made.exposed:.0f}") if made.fits else ("refused", "")
        rows.append((sizes_in(each.plan), short(each.plan), f"{1e3 * each.step:.0f}", *clock,
                     f"{each.peak / GIB:.1f}", f"{made.peak / GIB:.1f}"))
    return text_table(("mesh", "plan", "formula", "clock", "waits", "GiB", "asks"), rows, numbers=5)


def sizes_in(plan: Plan):
    """The sizes of batch, expert, stage and model, such as "(8, 1, 2, 2)"."""
    return str((plan.batch, plan.expert, plan.stage, plan.model))


def short(plan: Plan):
    """How a plan goes, in few letters, such as "zero1 m2 none" or "gpipe m16 all"."""
    schedule = {"zero_bubble": "zb"}.get(plan.schedule, plan.schedule)
    parts = [RULES.get(plan.rules, plan.rules), *[schedule] * (plan.stage > 1)]
    return " ".join([*parts, f"m{plan.microbatches}", plan.remat])


def draw_ranked(found: Sequence[Any], bubble: Any):
    """Bars of the ms of a step of Ranked plans: products, memory, random numbers, bubble, wire.

    bubble: a function that gives the share of a plan's turns that are for nothing; this share of
    the first three is the bubble.
    """
    shown = {}
    for each in found:
        idle, seconds = bubble(each.plan), {name: 1e3 * t for name, t in each.seconds.items()}
        busy = {label: (1 - idle) * seconds[name] for name, label in SPENT.items()}
        lost = {"bubble": sum(seconds[name] for name in SPENT) - sum(busy.values())}
        shown[f"{sizes_in(each.plan)} {short(each.plan)}"] = busy | lost | {"wire": 1e3 * each.wire}
    return draw_ms(shown, "a step of JAXformer on 32 TPU v4 by formula")


def draw_compared(found: Sequence[Any], record: Any):
    """Two bars for each Ranked plan, ms of a step by formula and by the clock: work and links.

    record: as of `table_of_recorded`; all plans fit.
    """
    shown = {}
    for each in found:
        made, label = record.loc[each.plan], f"{sizes_in(each.plan)} {short(each.plan)}"
        steps = {"formula": (1e3 * each.step, 1e3 * each.wire), "clock": (made.ms, made.exposed)}
        shown |= {f"{label}, {name}": {"work": step - links, "links": links}
                  for name, (step, links) in steps.items()}
    return draw_ms(shown, "a step of JAXformer on 32 TPU v4")
