"""What the compilers of TPUs made of a decoder's step in stages, schedule by schedule: a record.

The compiler's clock plays the longest branch of a conditional. In a slot of a table some device
does F, B or W, so a slot counts as the longest of the three, and devices with less to do wait.
"""
import json
from typing import NamedTuple

from meshbook.drawing.charts import bars
from meshbook.models.decoder_config import DecoderConfig
from meshbook.planning.clocks import device_of
from meshbook.planning.decoder_costs import decoder_step_flops
from meshbook.planning.topologies import RESULTS, Compilation

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
        return decoder_step_flops(config, rows)[0] / (across * stages)

    @property
    def utilisation(self):
        """MFU by the compiler's clock, from 0 to 1."""
        seconds = self.program.clock["step"] / 1e3
        return self.useful / (seconds * device_of(self.cell["tpu"]).flops)


def recorded_pipelines():
    """{name: Recorded} of the steps that were compiled, such as "v5e-8 ZB-H1 8"."""
    path = RESULTS / RECORD
    cells = json.loads(path.read_text("utf8"))["cells"] if path.exists() else {}
    return {name: Recorded(each["cell"], Compilation.of_record(each["program"]))
            for name, each in cells.items()}


def draw_pipelines(tpu: str, microbatches: int):
    """Bars of the ms of a step, schedule by schedule: compute, copies, transfers that all wait for.

    None where there is no record.
    """
    shown, said = {}, []
    for each in recorded_pipelines().values():
        if (each.cell["tpu"], each.cell["microbatches"]) == (tpu, microbatches):
            clock = each.program.clock
            label = f"{each.cell['schedule']}: MFU {each.utilisation:.0%}"
            shown[label] = {"on the core": clock["step"] - clock["exposed"],
                            "waiting for transfers": clock["exposed"]}
            said.append(f"{label}, {clock['step']:.0f} ms")
    return bars(shown, "ms", f"Milliseconds of a step of {microbatches} microbatches on {tpu} by "
                f"the compiler's clock. {'; '.join(said)}") if shown else None
