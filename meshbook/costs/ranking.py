"""All plans for a training run on so many chips: which are possible, and which come first."""
from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshbook.costs import turns
from meshbook.costs.devices import Device
from meshbook.costs.machines import Machine
from meshbook.costs.plans import AXES, Plan
from meshbook.costs.seconds import step_seconds
from meshbook.costs.step import describe, layout_of
from meshbook.costs.tables import sizes_of, table_of
from meshbook.costs.timeline import step_peak
from meshbook.models.decoder_config import DecoderConfig

WHOLE = ("tensor_parallel", "zero1", "fully_sharded_kept", "fully_sharded_again")
STAGED = ("tensor_parallel", "zero1", "fully_sharded")  # weights are gathered once a step
COMPILED = ("tensor_parallel", "fully_sharded")  # of models that leave all sums to the compiler
POLICIES = ("none", "products", "attention", "all")
SCHEDULES = ("gpipe", "lockstep", "zero_bubble")
METHODS = ("ring", "ulysses")
SPARE = 0.25  # of a device's memory, for gaps and for what a compiler keeps that no formula knows
TIE = 1.1  # steps less than so many times apart are in no order by the compiler's clock
DIVIDED = {"B": "rows of a microbatch", "T": "tokens", "D": "embed", "F": "hidden",
           "H": "heads", "G": "groups", "V": "padded vocabulary", "L": "periods of layers",
           "E": "experts", "M": "hidden units of the shared expert"}


class Impossible(ValueError):
    """No plan on a mesh is possible."""


@dataclass(frozen=True)
class Ranked:
    """A plan by formula: seconds of a step by what they are spent on, and bytes of one device."""

    plan: Plan
    seconds: dict
    peak: int
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
    def fits(self):
        """Whether a device has so much memory, and SPARE besides."""
        return self.peak <= (1 - SPARE) * self.device.memory


def meshes(chips: int) -> Iterator[Plan]:
    """Every mesh of so many chips, as Plans: all ways to write their number as a product."""
    sizes = [size for size in range(1, chips + 1) if chips % size == 0]
    for rest in itertools.product(sizes, repeat=len(AXES) - 1):
        if chips % math.prod(rest) == 0:
            yield Plan(chips // math.prod(rest), *rest)


def plans_on(mesh: Plan, most: int = 64, whole: Sequence[str] = WHOLE) -> Iterator[Plan]:
    """Every way to train on a mesh: rules, schedules, powers of two of microbatches, remat.

    whole: rules where there are no stages.
    """
    counts = [2**i for i in range(most.bit_length())]
    for rules, schedule, count, remat, method in itertools.product(
            STAGED if mesh.stage > 1 else whole, SCHEDULES if mesh.stage > 1 else SCHEDULES[:1],
            counts, POLICIES, METHODS if mesh.context > 1 else METHODS[:1]):
        yield replace(mesh, rules=rules, schedule=schedule, microbatches=count, remat=remat,
                      method=method)


def impossible(config: Any, plan: Plan, rows: int):
    """Why a model cannot be trained by a plan with so many rows a step: a sentence, or "".

    What does not divide is said first.
    """
    e, layout = getattr(config, "experts", None), layout_of(plan)
    if plan.expert > 1 and e is None:
        return f"a model without experts has nothing to split over {plan.expert} devices"
    if rows % plan.microbatches:
        return f"{rows} rows do not divide into {plan.microbatches} microbatches"
    sizes = sizes_of(config) | {"B": rows // plan.microbatches,
                                "L": config.layers // getattr(config, "period", 1)}
    for letter, name in DIVIDED.items():
        ways = max(layout.devices(layout.over(letter, letter, kind))
                   for kind in ("activations", "parameters", "moments"))
        if sizes.get(letter, 0) % ways:
            return f"{name}={sizes[letter]} does not divide over {ways} devices"
    policies, remat = table_of(config).kept, plan.remat or getattr(config, "remat", "none")
    if remat not in policies:
        return f"remat is one of {', '.join(policies)}; found {remat!r}"
    if e is not None and not e.capacity:
        return "what dropless experts do depends on the tokens: expected a capacity above 0"
    if not isinstance(config, DecoderConfig):
        if plan.stage * plan.context > 1:
            return "stages and a context have programs for the decoder only"
        if plan.rules not in ("data_parallel", *COMPILED):
            return f"{plan.rules} has a program for the decoder only"
    if plan.stage > 1:
        return _in_stages(plan, remat)
    return _with_context(config, plan) if plan.context > 1 else ""


def _in_stages(plan, remat):
    if plan.context > 1:
        return "a context in stages has no program here"
    if plan.schedule not in turns.SCHEDULES:
        return (f"expected a schedule, one of {', '.join(turns.SCHEDULES)}; found "
                f"{plan.schedule!r}")
    if plan.schedule != "gpipe" and remat != "none":
        return f"{plan.schedule} keeps what it needs: expected remat none, found {remat}"
    if plan.schedule == "zero_bubble" and plan.microbatches < plan.stage:
        return (f"zero_bubble needs a microbatch for each of {plan.stage} stages; found "
                f"{plan.microbatches}")
    return ""


def _with_context(config, plan):
    if config.latent:
        return (f"attention over a context is for keys and values of heads; found "
                f"latent={config.latent}")
    if config.experts:
        return "experts beside a context have no program here: their slots are of whole rows"
    if plan.attention not in ("", "blocks", "fused", "skipped"):
        return f"a context has attention in blocks, or fused; found {plan.attention!r}"
    ways, groups = plan.context * plan.model, config.groups or config.heads
    if plan.method == "ulysses" and groups % ways:
        return f"groups={groups} does not divide over {ways} devices, as Ulysses asks"
    return ""


def ranked(config: Any, plan: Plan, rows: int, machine: Machine):
    """The Ranked of one plan that is possible."""
    return _ranked(config, plan, rows, machine.device, machine.groups(plan.sizes))


def _ranked(config, plan, rows, device, groups):
    step = describe(config, plan, rows)
    return Ranked(plan, step_seconds(step, device, groups), step_peak(step, device.tiles), device)


def best_on(config: Any, mesh: Plan, rows: int, machine: Machine):
    """The Ranked of the fastest plan on a mesh that fits, of the smallest if none does.

    Raises Impossible where no plan is possible, with the sentence of `impossible`, or where the
    machine's slices do not divide the mesh, with that of `Machine.groups`.
    """
    most = max(1, rows // (mesh.batch * mesh.expert))
    plans = list(plans_on(mesh, most, WHOLE if isinstance(config, DecoderConfig) else COMPILED))
    possible = [plan for plan in plans if not impossible(config, plan, rows)]
    if not possible:
        raise Impossible(impossible(config, plans[0], rows))
    try:
        groups = machine.groups(mesh.sizes)
    except ValueError as error:
        raise Impossible(str(error)) from None
    found = [_ranked(config, plan, rows, machine.device, groups) for plan in possible]
    fitting = [each for each in found if each.fits]
    return min(fitting, key=lambda each: each.step) if fitting else min(
        found, key=lambda each: each.peak)


def rank(config: Any, rows: int, machine: Machine, attention: str = ""):
    """(the best plan of every possible mesh, fastest first, those that fit before all others;
    {mesh that is impossible: why}).

    rows: B, of a step on all devices; attention: of all plans. Raises ValueError for no rows.
    """
    if rows < 1:
        raise ValueError(f"expected at least one row in a step; found {rows}")
    found, refused = [], {}
    for mesh in meshes(machine.size):
        mesh = replace(mesh, attention=attention)
        try:
            found.append(best_on(config, mesh, rows, machine))
        except Impossible as error:
            refused[mesh] = str(error)
    return sorted(found, key=lambda each: (not each.fits, each.step)), refused


def ties(times: Mapping[Any, float], factor: float = TIE):
    """The keys whose times are less than a factor times the least, the least first.

    Which of them is first the times cannot say: chapter tpu-time holds the clock against published
    measurements. Raises ValueError where there are no times.
    """
    least = min(times.values())
    return sorted((key for key, t in times.items() if t < factor * least), key=times.get)
