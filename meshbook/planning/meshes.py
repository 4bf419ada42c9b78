"""All plans for a training run on so many chips: which are possible, and which come first.

A plan is a mesh and what goes with it: the preset of the sharding rules, the schedule of a pipeline
and its microbatches, and what layers keep for the backward pass.
"""
from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from meshbook.costs.devices import Device
from meshbook.costs.places import spans
from meshbook.models.decoder import DecoderConfig
from meshbook.planning.mesh_steps import plan_memory, plan_peak, plan_seconds

RECORD = "tpu-meshes.json"
AXES = ("batch", "expert", "stage", "context", "model")
WHOLE = ("tensor_parallel", "zero1", "fully_sharded_kept", "fully_sharded_again")
STAGED = ("tensor_parallel", "zero1", "fully_sharded")  # weights are gathered once a step
POLICIES = ("none", "products", "attention", "all")
SCHEDULES = ("gpipe", "lockstep", "zero_bubble")
SPARE = 0.25  # of a device's memory, for gaps and for what a compiler keeps that no formula knows


@dataclass(frozen=True)
class Plan:
    """A mesh, by the sizes of its axes, and how a step goes on it.

    rules: a preset of `decoder_costs.PRESETS`; schedule: of the stages, if there are several, one
    of SCHEDULES; microbatches: parts of the batch, one after the other; remat: a policy of
    `DecoderConfig.remat`.
    """

    batch: int = 1
    expert: int = 1
    stage: int = 1
    context: int = 1
    model: int = 1
    rules: str = "fully_sharded_kept"
    schedule: str = "gpipe"
    microbatches: int = 1
    remat: str = "all"

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
        return ", ".join([self.rules, *[self.schedule] * (self.stage > 1), *parts,
                          f"remat {self.remat}"])

    @property
    def name(self):
        """Mesh and plan in words."""
        return f"{self.where}: {self.how}"

    @property
    def is_fully_sharded(self):
        """Whether parameters are stored in parts along "batch"."""
        return self.rules.startswith("fully_sharded")


@dataclass(frozen=True)
class Ranked:
    """A plan by formula: seconds of a step by what they are spent on, and bytes of one device."""

    plan: Plan
    seconds: dict
    memory: dict
    device: Device

    @property
    def step(self):
        """Seconds of a step."""
        return sum(self.seconds.values())

    @property
    def wire(self):
        """Seconds of a step in which links are used, which nothing hides."""
        return sum(t for what, t in self.seconds.items() if what in AXES)

    @property
    def peak(self):
        """The most bytes that one device holds at once."""
        return plan_peak(self.memory)

    @property
    def fits(self):
        """Whether a device has so much memory, and SPARE besides."""
        return self.peak <= (1 - SPARE) * self.device.memory


def meshes(chips: int) -> Iterator[Plan]:
    """Every mesh of so many chips, as Plans: all ways to write their number as a product."""
    sizes = [size for size in range(1, chips + 1) if chips % size == 0]
    for rest in itertools.product(sizes, repeat=len(AXES) - 1):
        first, left = chips, 1
        for size in rest:
            left *= size
        if first % left == 0:
            yield Plan(first // left, *rest)


def plans_on(mesh: Plan, most: int = 64) -> Iterator[Plan]:
    """Every way to train on a mesh: rules, schedules, powers of two of microbatches, remat."""
    counts = [2**i for i in range(most.bit_length())]
    staged = mesh.stage > 1
    for rules, schedule, count, remat in itertools.product(
            STAGED if staged else WHOLE, SCHEDULES if staged else SCHEDULES[:1], counts, POLICIES):
        yield replace(mesh, rules=rules, schedule=schedule, microbatches=count, remat=remat)


def impossible(config: DecoderConfig, plan: Plan, rows: int):
    """Why a decoder cannot be trained by a plan with so many rows a step: a sentence, or "".

    What does not divide is said first.
    """
    e, split = config.experts, plan.rules != "tensor_parallel"
    if plan.context > 1:
        return _no_context(config)
    if plan.expert > 1 and e is None:
        return f"a decoder without experts has nothing to split over {plan.expert} devices"
    across, parts = plan.batch * plan.expert, plan.microbatches
    sizes = [("heads", config.heads, plan.model), ("hidden", config.hidden, plan.model),
             ("groups", config.groups or config.heads, plan.model),
             ("periods of layers", config.layers // config.period, plan.stage),
             ("experts", e.count if e else 0, plan.expert),
             ("hidden units of the shared expert", e.shared if e else 0, plan.model),
             ("padded vocabulary", config.padded, plan.model * plan.stage),
             ("rows in a microbatch of a batch", rows / parts, across),
             ("embed", config.embed, plan.batch if split else 1)]
    for name, size, ways in sizes:
        if size % ways:
            return f"{name}={size:g} does not divide over {ways} devices"
    if plan.stage > 1 and plan.schedule != "gpipe" and plan.remat != "none":
        return f"{plan.schedule} keeps what it needs: expected remat none, found {plan.remat}"
    if plan.schedule == "zero_bubble" and parts < plan.stage:
        return f"zero_bubble needs a microbatch for each of {plan.stage} stages; found {parts}"
    return ""


def _no_context(config):
    if config.latent:
        return (f"attention over a context is for keys and values of heads; found "
                f"latent={config.latent}")
    return "a context beside other axes has no formula here; see context_costs"


def ranked(config: DecoderConfig, plan: Plan, rows: int, device: Device, torus: Sequence[int]):
    """The Ranked of one plan that is possible, on chips that form a torus without wraparound."""
    return Ranked(plan, plan_seconds(config, plan, rows, device, spans(torus, plan.sizes)),
                  plan_memory(config, plan, rows), device)


def best_on(config: DecoderConfig, mesh: Plan, rows: int, device: Device, torus: Sequence[int]):
    """The Ranked of the fastest plan on a mesh that fits, of the smallest if none does.

    Raises ValueError, with the sentence of `impossible`, where no plan is possible.
    """
    plans = list(plans_on(mesh, rows))
    possible = [plan for plan in plans if not impossible(config, plan, rows)]
    if not possible:
        raise ValueError(impossible(config, plans[0], rows))
    place = spans(torus, mesh.sizes)
    found = [Ranked(plan, plan_seconds(config, plan, rows, device, place),
                    plan_memory(config, plan, rows), device) for plan in possible]
    fitting = [each for each in found if each.fits]
    return min(fitting, key=lambda each: each.step) if fitting else min(
        found, key=lambda each: each.peak)


def rank(config: DecoderConfig, rows: int, device: Device, torus: Sequence[int]):
    """(the best plan of every possible mesh, fastest first, those that fit before all others;
    {mesh that is impossible: why}).

    torus: chips along its dimensions, such as (2, 4, 4); rows: B, of a step on all devices.
    """
    found, refused, chips = [], {}, 1
    for size in torus:
        chips *= size
    for mesh in meshes(chips):
        try:
            found.append(best_on(config, mesh, rows, device, torus))
        except ValueError as error:
            refused[mesh] = str(error)
    return sorted(found, key=lambda each: (not each.fits, each.step)), refused
