"""The Steps that `python -m benchmarks.aot` was asked for: from its cells, as records have them."""
from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp

from meshbook.costs.plans import Plan
from meshbook.costs.step import describe
from meshbook.models.decoder_config import DecoderConfig
from meshbook.models.expert_layers import JAXFORMER, ExpertSizes
from meshbook.sharding import Sharding

SIZES = "vocabulary", "tokens", "embed", "hidden", "heads", "layers"
SCHEDULES = {"GPipe": "gpipe", "checkpointed GPipe": "gpipe", "lockstep 1F1B": "lockstep",
             "1F1B": "one_f_one_b", "ZB-H1": "zero_bubble"}


def asked_step(record: str, cell: Mapping):
    """The Step of a cell of a record such as "tpu-decoder", or None where it is no whole step of
    training of which the book has a table.
    """
    return STEPS[record](cell)


def _decoder(cell):
    if "split" in cell:  # small, for the sums of its gradients
        return None
    config = DecoderConfig.jaxformer(dtype=jnp.dtype(cell["dtype"]), **{
        name: cell[name] for name in ("remat", "by_row", "dropout", "hidden")})
    more = {} if cell["regather"] is None else {"regather": cell["regather"]}
    more |= {"overlapped": True} if cell["overlapped"] else {}
    rules = getattr(Sharding, cell["row"])(**more)
    if cell["sharded"]:
        rules = rules.also(parameters={"D": "batch"})
    rows, ways = cell["shape"]
    preset = {True: "fully_sharded_again", False: "fully_sharded_kept"}.get(
        cell["regather"], cell["row"])
    plan = Plan(rows, model=ways, rules=preset, microbatches=cell["parts"] or 1)
    return describe(config, plan, cell["batch"], rules)


def _mesh(cell):
    config = DecoderConfig.jaxformer(experts=JAXFORMER, dtype=jnp.bfloat16, by_row=True)
    return describe(config, Plan(**cell["plan"]), cell["rows"])


def _pipeline(cell):
    across, stages = cell["shape"]
    remat = "all" if cell["schedule"].startswith("checkpointed") else "attention"
    plan = Plan(across, stage=stages, rules="data_parallel", remat=remat,
                schedule=SCHEDULES[cell["schedule"]], microbatches=cell["microbatches"])
    return describe(_sized(cell), plan, across * cell["rows"] * cell["microbatches"])


def _experts(cell):
    """An MLP of the dense decoder is as wide as a token's experts together."""
    if "across" not in cell:  # a layer alone
        return None
    more = {"hidden": cell["active"] * cell["hidden"]}
    if cell["across"]:
        more = {"experts": ExpertSizes(cell["experts"], cell["active"],
                                       capacity=cell["capacity"], auxiliary=0.01)}
    across = cell["across"] or 1
    plan = Plan(8 // across, expert=across, rules="data_parallel")
    return describe(_sized(cell, **more), plan, 8 * cell["rows"])


def _sized(cell, **more):
    """The DecoderConfig of the sizes that a cell has."""
    sizes = {name: cell[name] for name in SIZES} | more
    return DecoderConfig(**sizes, remat="attention", by_row=True, dtype=jnp.bfloat16)


def _context(cell):
    config = DecoderConfig(50_257, tokens=cell["tokens"], embed=1024, hidden=4096, heads=16,
                           groups=8, layers=12, gated=False, remat="attention", dtype=jnp.bfloat16)
    how = {"attention": "blocks"} if cell["way"] == "blocks" else {}
    if cell["devices"] > 1:
        how = {"method": cell["way"]}
    return describe(config, Plan(context=cell["devices"], rules="data_parallel", **how), 1)


def _drawn(cell):
    sizes = dict(cell["config"])
    experts = sizes.pop("experts") and ExpertSizes(**cell["config"]["experts"])
    config = DecoderConfig(**sizes | {"dtype": jnp.dtype(sizes["dtype"])}, experts=experts)
    return describe(config, Plan(**cell["plan"]), cell["rows"])


STEPS = {"tpu-decoder": _decoder, "tpu-meshes": _mesh, "tpu-pipeline": _pipeline,
         "tpu-experts": _experts, "tpu-context": _context, "tpu-drawn": _drawn}
