"""The training steps that were compiled for TPUs, as Steps: from the records in results/."""
import json
import re
from dataclasses import replace

from benchmarks import aot_context, aot_decoder, aot_experts, aot_meshes, aot_pipeline
from meshbook.costs.plans import Plan
from meshbook.costs.step import describe
from meshbook.models import MiniGPTConfig, ViTConfig
from meshbook.planning.topologies import RESULTS, Compilation

SCHEDULES = {"GPipe": "gpipe", "checkpointed GPipe": "gpipe", "lockstep 1F1B": "lockstep",
             "1F1B": "one_f_one_b", "ZB-H1": "zero_bubble"}


def cells(name):
    """(name, fields of the cell, Compilation) of a record's training steps."""
    record = json.loads((RESULTS / f"{name}.json").read_text("utf8"))["cells"]
    for each, fields in record.items():
        if each.split()[0] not in ("layer", "gradients") and "slices" not in each:
            yield each, fields.get("cell"), Compilation.of_record(fields.get("program", fields))


def of(kind, fields):
    """A Cell of a benchmark from its fields."""
    return kind(**{name: tuple(value) if isinstance(value, list) else value
                   for name, value in fields.items()})


def recorded_steps():
    """[(name, Step or None, tokens of a chunk of logits, Compilation)]; None: no table says it."""
    return [*_decoders(), *_meshes(), *_pipelines(), *_experts(), *_contexts(), *_vits()]


def _decoders():
    for name, fields, found in cells("tpu-decoder"):
        cell = of(aot_decoder.Cell, fields)
        rules = {True: "fully_sharded_again", False: "fully_sharded_kept"}.get(
            cell.regather, cell.row)
        plan = Plan(cell.shape[0], model=cell.shape[1], rules=rules, microbatches=cell.parts or 1)
        yield name, describe(cell.config, plan, cell.batch, cell.rules), 2048, found


def _meshes():
    for name, fields, found in cells("tpu-meshes"):
        if "plan" in fields:
            plan = Plan(**fields["plan"])
            yield name, describe(aot_meshes.CONFIG, plan, fields["rows"]), 512, found


def _pipelines():
    for name, fields, found in cells("tpu-pipeline"):
        cell = of(aot_pipeline.Cell, fields)
        remat = "all" if cell.schedule.startswith("checkpointed") else cell.config.remat
        plan = Plan(2, stage=4, rules="data_parallel", schedule=SCHEDULES[cell.schedule],
                    microbatches=cell.microbatches, remat=remat)
        yield name, describe(cell.config, plan, cell.batch), 512, found


def _experts():
    for name, fields, found in cells("tpu-experts"):
        cell = of(aot_experts.Step, fields)
        across = cell.across or 1
        plan = Plan(8 // across, expert=across, rules="data_parallel")
        yield name, describe(cell.config, plan, 8 * cell.rows), 512, found


def _contexts():
    for name, fields, found in cells("tpu-context"):
        cell = of(aot_context.Cell, fields)
        plan = Plan(context=cell.devices, rules="data_parallel", **(
            {"method": cell.way} if cell.devices > 1 else
            {"attention": "blocks"} if cell.way == "blocks" else {}))
        yield name, describe(cell.config, plan, 1), 2048, found


def _vits():
    for name, _, found in cells("tpu"):
        special = dict(re.findall(r"(\w+)=(\S+)", name))
        embed = int(special.get("embed", 384))
        config = MiniGPTConfig() if "model" in special else ViTConfig(embed=embed, hidden=4 * embed)
        plan = Plan(found.mesh.get("batch", 1), model=found.mesh.get("model", 1),
                    rules=special.get("row", "tensor_parallel"),
                    remat="all" if "checkpoint" in special else "none",
                    microbatches=int(special.get("parts", 1)))
        rows = int(re.search(r"(?:none|\)) (\d+)", name)[1])
        if special.get("dropout") == "0.0":
            config = replace(config, dropout=0.0)
        said = not {"loss", "dtype"} & set(special)
        yield name, describe(config, plan, rows) if said else None, 512, found
