"""What TPUs' compilers made of the decoder's training steps, by parts of the model and by weight.

`python -m benchmarks.aot decoder` compiles them, and records of each the time of each part by the
compiler's clock, and how the gradient of each weight is summed.
"""
from __future__ import annotations

import collections
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from meshbook.drawing import svg
from meshbook.drawing.strips import draw_strips
from meshbook.hlo import execution, module
from meshbook.hlo.exchanges import Exchanges
from meshbook.planning import records
from meshbook.planning.clocks import device_of
from meshbook.planning.topologies import recorded
from meshbook.profiling.estimated_runs import estimated_run

SCOPES = ("attention", "mlp", "loss", "embed", "update")  # scopes of a step's operations
SCATTERED, WHOLE, NOWHERE = "reduce-scatter", "all-reduce", "not found"


def look(topology: str, weights: Mapping[str, tuple], text: str, mesh: Any):
    """What is recorded of a program's text besides its sizes: a dict for JSON.

    weights: {path: (dims of the whole gradient on a device, dims of its part)}.
    """
    return {"parts": time_by_part(text, mesh, topology),
            "gradients": sums_of_gradients(text, mesh, weights)}


def time_by_part(text: str, mesh: Any, topology: str):
    """{one of SCOPES, "other" or "waiting": ms} of a step by the compiler's clock.

    Operations are told by the scopes in their names; waiting is all time in which the core idles.
    """
    run, found = estimated_run(text, mesh, device_of(topology)), collections.Counter()
    for each in run.work:
        scopes = set(re.findall(r"\w+", each.op_name))
        found[next((part for part in SCOPES if part in scopes), "other")] += 1e3 * (
            each.end - each.start)
    return dict(found) | {"waiting": run.step - found.total()}


def sums_of_gradients(text: str, mesh: Any, weights: Mapping[str, tuple], axis: str = "batch"):
    """{path: SCATTERED, WHOLE or NOWHERE: how the gradient of a weight is summed along an axis}.

    weights: as of `look`. A sum is told by the dims of its result, in this order, without those of
    1, and where it has them in another order, by their number of elements.
    """
    exchanges = Exchanges(text, mesh)

    def measure(computation, instruction):
        found = exchanges.find(computation, instruction)
        if found is None or axis not in found.axes:
            return None if found is None else collections.Counter()
        return collections.Counter((found.kind, _dims(each.dims)) for each in _flat(found.shape))

    counted = execution.tally(exchanges.program, measure)
    sums = {key for key in counted if key[0] in (SCATTERED, WHOLE)}

    def how(whole, part):
        asked = (SCATTERED, _dims(part)), (WHOLE, _dims(whole))
        kinds = [kind for kind, dims in asked if (kind, dims) in sums] or [
            kind for kind, dims in asked
            if any(kind == other and math.prod(dims) == math.prod(has) for other, has in sums)]
        return " and ".join(kinds) or NOWHERE

    return {path: how(*each) for path, each in weights.items()}


def _dims(dims):
    return tuple(size for size in dims if size > 1)


def _flat(shape):
    return [shape] if isinstance(shape, module.Shape) else [
        each for part in shape for each in _flat(part)]


def split_letter(letters: str, split: str):
    """Along which letter a small step splits a weight over the rows, or None: "D", "first", "last".

    letters: the weight's, such as "DSF"; S is passed over.
    """
    own = letters.replace("S", "")
    if split == "D":
        return "D" if "D" in own else None
    return own[-1] if split == "last" else own[0]


def sums_by_split(tpu: str, dtype: str, kind: str = "latent"):
    """{letters of a weight: {letter that is split: how its gradient is summed}} on a TPU.

    From the recorded small steps that split all weights along the first letter or the last one,
    summed as the compiler does it; {} where none is recorded.
    """
    found = {}
    for made in recorded("tpu-decoder").values():
        cell = made.cell
        if cell.get("split", "D") == "D" or cell["by_hand"] or cell["other"] or (
                cell["tpu"], cell["dtype"], cell["kind"]) != (tpu, dtype, kind):
            continue
        for path, how in made.seen["gradients"].items():
            letters = path.rpartition("_")[2]
            found.setdefault(letters, {})[split_letter(letters, cell["split"])] = how
    return found


def draw_sums(tpu: str, dtypes: Sequence[str] = ("bfloat16", "float32"), kind: str = "latent"):
    """A row for each weight, a box for each dtype and letter that is split; None without a record.

    The letter stands in the box; its colour says how the gradient is summed.
    """
    rows = {}
    for dtype in dtypes:
        for letters, by_letter in sorted(sums_by_split(tpu, dtype, kind).items()):
            rows.setdefault(letters, []).extend(by_letter.items())
    if not rows:
        return None
    states = {SCATTERED: svg.SERIES[0], WHOLE: svg.SERIES[1]}
    states |= {how: None for pairs in rows.values() for _, how in pairs if how not in states}
    return draw_strips(rows, states, f"How {tpu} sums the gradient of each weight, in "
                       f"{' and '.join(dtypes)}, by the letter that is split over the rows.")


def spent_by_part(steps: Any):
    """{name and MFU: {part of the model: ms}} of rows of a `records.frame` that have ms, for
    `records.draw_ms`.

    What the update, the embedding and operations without a scope take is one part.
    """
    found = {}
    for step in steps.dropna(subset="ms").itertuples():
        parts = collections.Counter(step.program.seen["parts"])
        known = {named: parts.pop(part, 0.0) for named, part in (
            ("attention", "attention"), ("MLP", "mlp"), ("loss", "loss"))}
        waiting = parts.pop("waiting", 0.0)
        found[records.labelled(step)] = known | {"all else": parts.total(), "waiting": waiting}
    return found
