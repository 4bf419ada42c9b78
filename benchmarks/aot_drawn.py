"""Compile decoders that a seed draws, for TPUs that are not here: results/tpu-drawn.json.

    python -m benchmarks.aot_drawn 47           draw programs by a new seed, and write them down
    python -m benchmarks.aot drawn              compile all that are written down
    python -m benchmarks.aot drawn v6e-8        those on this TPU

The other records have programs that somebody chose, and formulas were mended until they agreed with
them. These are drawn before any of them is compiled, and written down in aot_drawn.json: decoders
of many shapes, on a mesh, a plan and a batch that the formulas call possible, and that fit by the
formulas of that day into a TPU. What formulas say of a seed's programs before they are mended is
what they are worth.
"""

import dataclasses
import json
import random
import sys
from functools import partial
from pathlib import Path

import optax

from meshbook.costs.devices import GIB
from meshbook.costs.page import json_of
from meshbook.costs.plans import Plan
from meshbook.costs.ranking import SPARE, impossible, meshes, plans_on
from meshbook.costs.step import describe
from meshbook.costs.timeline import step_peak
from meshbook.models.decoder_config import DecoderConfig
from meshbook.models.expert_layers import ExpertSizes
from meshbook.planning import topologies
from meshbook.planning.clocks import clocked, device_of
from meshbook.planning.plan_programs import plan_program, taken_by
from meshbook.planning.recorded_steps import asked_step

RESULTS = topologies.RESULTS / "tpu-drawn.json"
DRAWN = Path(__file__).with_suffix(".json")  # {seed: [fields of a Cell]}
COUNT = 16
TPUS = "v4:2x2x2", "v5e-8", "v5p", "v6e-8"  # of eight chips each


@dataclasses.dataclass(frozen=True)
class Cell:
    """One program: sizes of a decoder and a plan as JSON has them, a TPU, rows of text, the seed.

    formula: bytes at the peak of each device by the formula of the day when it was drawn.
    """

    tpu: str
    config: dict
    plan: dict
    rows: int
    seed: int
    formula: int

    @property
    def name(self):
        """The TPU and the plan, and the decoder by its largest sizes."""
        sizes = "x".join(str(self.config[name]) for name in ("layers", "embed", "tokens"))
        return f"{self.tpu} {Plan(**self.plan).name}, {self.rows} rows of {sizes}"


def cells():
    """All that is recorded."""
    for many in json.loads(DRAWN.read_text("utf8")).values():
        yield from (Cell(**fields) for fields in many)


def drawn(seed: int):
    """So many Cells by a seed, the TPUs in turn."""
    chance = random.Random(seed)
    return [_cell(chance, seed, TPUS[number % len(TPUS)]) for number in range(COUNT)]


def _cell(chance, seed, tpu):
    """A Cell of more than a gibibyte on each device, that fits by the formula."""
    most = (1 - SPARE) * device_of(tpu).memory
    while True:
        config, rows = _decoder(chance), 2 ** chance.randint(3, 8)
        mesh = chance.choice(list(meshes(8)))
        plan = chance.choice(list(plans_on(mesh, 8)))
        if impossible(config, plan, rows):
            continue
        peak = step_peak(describe(config, plan, rows))
        if GIB < peak <= most:
            return Cell(tpu, json_of(config), dataclasses.asdict(plan), rows, seed, peak)


def _decoder(chance):
    """A decoder whose layers have many shapes; its heads have 64 or 128 numbers."""
    embed, size = 256 * chance.randint(2, 10), chance.choice((64, 128))
    heads = embed // size
    experts = ExpertSizes(chance.choice((8, 16)), chance.choice((1, 2, 4)),
                          shared=chance.choice((0, embed)),
                          capacity=chance.choice((1.0, 1.25, 2.0)))
    return DecoderConfig(
        vocabulary=chance.choice((8_000, 32_000, 50_257)), tokens=2 ** chance.randint(9, 12),
        embed=embed, hidden=128 * chance.randint(embed // 64, embed // 32), heads=heads,
        groups=chance.choice([g for g in range(heads) if g == 0 or heads % g == 0]),
        layers=chance.randint(2, 8), gated=chance.random() < 0.7, bias=chance.random() < 0.3,
        by_row=chance.random() < 0.3, experts=experts if chance.random() < 0.3 else None,
        dtype=chance.choice(("bfloat16", "bfloat16", "float32")))


def compiled(cell, cache=None):
    """The Compilation of a cell."""
    plan, config = Plan(**cell.plan), asked_step("tpu-drawn", dataclasses.asdict(cell)).config
    mesh = topologies.tpu_mesh(cell.tpu, tuple(plan.mesh.values()), tuple(plan.mesh))
    program = plan_program(config, plan, cell.rows, mesh, optax.adamw(6e-4, weight_decay=0.1))
    return topologies.compile_for(cell.tpu, *program, cache=cache,
                                  clock=partial(clocked, taken=taken_by(plan)))


if __name__ == "__main__":
    known = json.loads(DRAWN.read_text("utf8")) if DRAWN.exists() else {}
    if sys.argv[1] in known:
        sys.exit(f"seed {sys.argv[1]} is drawn already")
    new = [dataclasses.asdict(cell) for cell in drawn(int(sys.argv[1]))]
    DRAWN.write_text(json.dumps(known | {sys.argv[1]: new}, indent=1) + "\n", "utf8")
