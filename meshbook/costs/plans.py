"""Plans: a mesh, and how a step of training goes on it."""
from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from meshbook.parallel.context import Context
from meshbook.sharding import Sharding

AXES = ("batch", "expert", "stage", "context", "model")
PRESETS = {  # of the sharding rules
    name: getattr(Sharding, name) for name in (
        "data_parallel", "tensor_parallel", "sequence_parallel", "zero1", "zero2",
        "fully_sharded")} | {
    "fully_sharded_kept": partial(Sharding.fully_sharded, regather=False),
    "fully_sharded_again": partial(Sharding.fully_sharded, regather=True)}


@dataclass(frozen=True)
class Plan:
    """A mesh, by the sizes of its axes, and how a step goes on it.

    rules: a preset of PRESETS; schedule: of the stages, if there are several, one of SCHEDULES;
    microbatches: parts of the batch, one after the other; remat: a policy of `DecoderConfig.remat`,
    "" for the config's;
    method: how queries reach the keys of other devices, see `meshbook.parallel.context`; attention:
    "scores" of all tokens, "rows" one after the other, "blocks" as a context has them, "fused" in a
    kernel, "skipped" in one that leaves out what a causal mask hides, or "" as the config says.
    """

    batch: int = 1
    expert: int = 1
    stage: int = 1
    context: int = 1
    model: int = 1
    rules: str = "fully_sharded_kept"
    schedule: str = "gpipe"
    microbatches: int = 1
    remat: str = ""
    method: str = "ring"
    attention: str = ""

    @property
    def sizes(self):
        """{axis: devices} of all axes."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def mesh(self):
        """{axis: devices} of the axes that a mesh needs: the first, the last, what is split."""
        return {axis: size for axis, size in self.sizes.items()
                if size > 1 or axis in ("batch", "model")}

    @property
    def where(self):
        """The mesh in words, such as "batch 8, stage 2, model 2"."""
        return ", ".join(f"{axis} {size}" for axis, size in self.sizes.items() if size > 1)

    @property
    def how(self):
        """The rest in words, such as "fully_sharded, gpipe, 16 microbatches, remat all"."""
        parts = [f"{self.microbatches} microbatches"] * (self.microbatches > 1)
        remat = [f"remat {self.remat}"] * bool(self.remat)
        return ", ".join([self.rules, *[self.schedule] * (self.stage > 1),
                          *[self.method] * (self.context > 1), *parts, *remat])

    @property
    def name(self):
        """Mesh and plan in words."""
        return f"{self.where}: {self.how}"

    @property
    def is_fully_sharded(self):
        """Whether parameters are stored in parts along "batch"."""
        return self.rules.startswith("fully_sharded")


def rules_of(plan: Plan):
    """The sharding rules of a plan: its preset; what experts, context and stages split besides."""
    rules = PRESETS[plan.rules]()
    if plan.expert > 1:
        rules = rules.also(E="expert", B=("batch", "expert"))
    if plan.context > 1:
        rules = replace(rules.also(activations={"T": "context"}), context=Context(plan.method))
    return rules.in_stages() if plan.stage > 1 else rules
