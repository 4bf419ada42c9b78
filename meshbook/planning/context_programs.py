"""How long a row of text fits into a TPU, by how attention is done: a record of compiled steps."""
import json
from typing import NamedTuple

from meshbook.drawing.figures import bars
from meshbook.planning.topologies import RESULTS, Compilation
from meshbook.text import text_table

RECORD = "tpu-context.json"


class Longest(NamedTuple):
    """One way of doing attention on so many devices: what of the tokens tried fits, and what not.

    fits: the longest row that the compiler accepts, and the bytes that are live at most at once;
    too_long: the shortest that it refuses, and the bytes that it says are needed.
    """

    way: str
    devices: int
    fits: tuple[int, int]
    too_long: tuple[int, int]


def longest_rows():
    """A Longest for each way that was compiled for both a row that fits and one that does not."""
    path, found = RESULTS / RECORD, {}
    cells = json.loads(path.read_text("utf8"))["cells"] if path.exists() else {}
    for each in cells.values():
        cell, program = each["cell"], Compilation.of_record(each["program"])
        fit, not_fit = found.setdefault((cell["way"], cell["devices"]), ([], []))
        (fit if program.fits else not_fit).append(
            (cell["tokens"], program.live if program.fits else program.peak))
    return [Longest(*key, max(fit), min(not_fit))
            for key, (fit, not_fit) in found.items() if fit and not_fit]


def table_of_rows():
    """A text table: each way's longest row that fits, and the next one."""
    gib = lambda size: f"{size / 2**30:.1f} GiB"
    return text_table(("attention", "devices", "fits", "live", "too long", "would need"), [
        (each.way, f"{each.devices}", f"{each.fits[0]:,}", gib(each.fits[1]),
         f"{each.too_long[0]:,}", gib(each.too_long[1])) for each in longest_rows()], numbers=1)


def draw_rows():
    """Bars: the longest row of tokens that fits, way by way."""
    shown = {f"{each.way}, {each.devices} device{'s' * (each.devices > 1)}": each.fits[0] / 1024
             for each in longest_rows()}
    said = "; ".join(f"{label} {value:,.0f}" for label, value in shown.items())
    return bars(shown, "Ki tokens", f"The longest row that fits, in units of 1,024 tokens: {said}")
