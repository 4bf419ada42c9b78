"""What a TPU's compiler made of experts, a layer alone and in a decoder's step: a record.

Times are by the compiler's clock. Of a loop over blocks, and of slots, every one is computed,
whatever the router does.
"""
import json
from typing import NamedTuple

from meshbook.drawing.figures import bars
from meshbook.planning.clocks import device_of
from meshbook.planning.topologies import RESULTS, Compilation
from meshbook.text import text_table

RECORD = "tpu-experts.json"


class Recorded(NamedTuple):
    """A program that was compiled: its cell of `benchmarks.aot_experts` as a dict."""

    cell: dict
    program: Compilation

    @property
    def work(self):
        """FLOPs of a chip as a multiple of the useful ones."""
        return self.program.flops / self.program.seen["useful"]

    @property
    def utilisation(self):
        """MFU by the compiler's clock, from 0 to 1."""
        seconds = self.program.clock["step"] / 1e3
        return self.program.seen["useful"] / (seconds * device_of(self.cell["tpu"]).flops)

    def exposed(self, kind: str):
        """ms in which a chip does nothing but wait for collectives of this kind."""
        return self.program.seen["exchanges"].get(kind, (0.0, 0.0))[1]

    def links(self, kind: str):
        """ms that collectives of this kind take on the links."""
        return self.program.seen["exchanges"].get(kind, (0.0, 0.0))[0]


def recorded_experts():
    """{name: Recorded} of all programs that were compiled, such as "step 8 1.25"."""
    path = RESULTS / RECORD
    cells = json.loads(path.read_text("utf8"))["cells"] if path.exists() else {}
    return {name: Recorded(fields["cell"], Compilation.of_record(fields["program"]))
            for name, fields in cells.items()}


def layers_by_dispatch():
    """{(way of dispatch, whether gradients are made, too): Recorded} of a layer on one chip."""
    return {(each.cell["way"], each.cell["gradients"]): each
            for each in recorded_experts().values() if "way" in each.cell}


def steps_by_chips():
    """{(chips that share the experts, capacity factor): Recorded} of a decoder's step that fits.

    The dense decoder's has no chips that share experts, and no capacity: (0, 0).
    """
    found = [each for each in recorded_experts().values() if "across" in each.cell]
    key = lambda cell: (cell["across"], cell["capacity"]) if cell["across"] else (0, 0)
    return {key(each.cell): each for each in found if each.program.fits}


def table_of_layers():
    """A text table: each way of dispatch, what it computes and how long that takes."""
    rows = [(way, "with gradients" if gradients else "forward", f"{each.work:.2f}",
             f"{each.program.clock['step']:.1f} ms",
             f"{each.program.temporaries / 2**30:.2f} GiB")
            for (way, gradients), each in layers_by_dispatch().items()]
    return text_table(("a layer", "", "work", "time", "temporaries"), rows, numbers=2)


def table_of_steps():
    """A text table: each step's time, MFU, and its all-to-alls and what of them is exposed."""
    rows = []
    for (across, capacity), each in steps_by_chips().items():
        label = f"{across} chips share, capacity {capacity}" if across else "dense"
        rows.append((label, f"{each.work:.2f}", f"{each.program.clock['step']:.0f} ms",
                     f"{each.utilisation:.1%}", f"{each.links('all-to-all'):.1f} ms",
                     f"{each.exposed('all-to-all'):.1f} ms"))
    return text_table(("a step", "work", "time", "MFU", "all-to-alls", "exposed"), rows, numbers=1)


def draw_steps():
    """Bars of the ms of a step: computing, copying, waiting for all-to-alls and for the rest."""
    shown = {}
    for (across, capacity), each in steps_by_chips().items():
        label = f"{across} chips share, capacity {capacity}" if across else "dense"
        clock, slots = each.program.clock, each.exposed("all-to-all")
        busy, waits = clock["kinds"]["compute"], clock["exposed"]
        shown[f"{label}: MFU {each.utilisation:.0%}"] = {
            "computing": busy, "copying": clock["step"] - busy - waits,
            "waiting for all-to-alls": slots, "waiting for other transfers": waits - slots}
    said = "; ".join(f"{label}, {sum(row.values()):.0f} ms" for label, row in shown.items())
    return bars(shown, "ms", f"Milliseconds of a decoder's step by the compiler's clock. {said}")
