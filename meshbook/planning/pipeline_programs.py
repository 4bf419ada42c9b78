"""What the compilers of TPUs made of a decoder's step in stages, schedule by schedule: a record.

The compiler's clock plays a program as the device that has most to do: in each turn of its loop the
longest of the branches that some device takes, because all of them meet at the turn's end.
"""
import json
from typing import NamedTuple

from meshbook.costs.plans import Plan
from meshbook.costs.step import describe
from meshbook.costs.work import step_work
from meshbook.drawing.figures import bars
from meshbook.models.decoder import DecoderConfig
from meshbook.planning.clocks import device_of
from meshbook.planning.topologies import RESULTS, Compilation
from meshbook.text import text_table

RECORD = "tpu-pipeline.json"
SIZES = "vocabulary", "tokens", "embed", "hidden", "heads", "layers"


class Recorded(NamedTuple):
    """A step that was compiled: `benchmarks.aot_pipeline.Cell` as a dict, and its Compilation."""

    cell: dict
    program: Compilation

    @property
    def useful(self):
        """Useful FLOPs of one device."""
        config = DecoderConfig(**{name: self.cell[name] for name in SIZES})
        across, stages = self.cell["shape"]
        rows = across * self.cell["rows"] * self.cell["microbatches"]
        return step_work(describe(config, Plan(across, stage=stages), rows)).useful

    @property
    def utilisation(self):
        """MFU by the compiler's clock, from 0 to 1."""
        seconds = self.program.clock["step"] / 1e3
        return self.useful / (seconds * device_of(self.cell["tpu"]).flops)

    @property
    def parts(self):
        """{"F", "B", "W": ms of a slot in which all devices do it}; None but for a slot table."""
        return self.program.seen


def recorded_pipelines():
    """{name: Recorded} of the steps that were compiled, such as "v5e-8 ZB-H1 8"."""
    path = RESULTS / RECORD
    cells = json.loads(path.read_text("utf8"))["cells"] if path.exists() else {}
    return {name: Recorded(fields["cell"], Compilation.of_record(fields["program"]))
            for name, fields in cells.items()}


def of_tpu(tpu: str):
    """{(schedule, microbatches): Recorded} of a topology such as "v5e-8"."""
    return {(each.cell["schedule"], each.cell["microbatches"]): each
            for each in recorded_pipelines().values() if each.cell["tpu"] == tpu}


def table_of_pipelines(tpu: str):
    """A text table of a topology: microbatches, ms, MFU, temporaries and exposed transfers."""
    rows = [(f"{count} microbatches, {schedule}", f"{each.program.temporaries / 2**30:.2f} GiB",
             f"{each.program.clock['step']:.0f} ms", f"{each.utilisation:.1%}",
             f"{each.program.clock['exposed']:.0f} ms")
            for (schedule, count), each in of_tpu(tpu).items()]
    return text_table((tpu, "temporaries", "a step", "MFU", "exposed"), rows, numbers=1)


def draw_pipelines(tpu: str, microbatches: int):
    """Bars of the ms of a step, schedule by schedule: computing, copying, waiting for transfers.

    Copies that go on beside the core are not in them.
    """
    shown = {}
    for (schedule, count), each in of_tpu(tpu).items():
        if count == microbatches:
            clock = each.program.clock
            busy, waits = clock["kinds"]["compute"], clock["exposed"]
            shown[f"{schedule}: MFU {each.utilisation:.0%}"] = {
                "computing": busy, "copying": clock["step"] - busy - waits,
                "waiting for transfers": waits}
    said = "; ".join(f"{label}, {sum(row.values()):.0f} ms" for label, row in shown.items())
    return bars(shown, "ms", f"Milliseconds of a step of {microbatches} microbatches on {tpu} by "
                f"the compiler's clock. {said}")
