"""A step of training on a mesh: a model's table, laid out by the sharding rules of a plan."""
from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshbook.costs import tables
from meshbook.costs.plans import Plan, rules_of
from meshbook.costs.rows import Row, Table, chosen
from meshbook.sharding import Sharding, axes_of
from meshbook.sharding.rules import spec_of

ATTENTION = {  # flags of a layer by the kind of its attention
    "scores": {"scores"}, "rows": set(), "blocks": {"blocks"}, "fused": {"blocks", "fused"},
    "skipped": {"blocks", "fused", "skipped"}}


class Layout:
    """Where arrays lie: sharding rules on a mesh {axis: devices}."""

    def __init__(self, rules: Sharding, mesh: Mapping[str, int]):
        self.rules, self.mesh, self._known = rules, dict(mesh), {}

    def named(self, letters: str, of: str, kind: str = "activations"):
        """The mesh axes that the rules name for some letters, `of` an array of these letters."""
        key = letters, of, kind
        if key not in self._known:
            named = _named(self.rules, letters, kind)
            self._known[key] = tuple(axis for letter in of for axis in named[letter])
        return self._known[key]

    def over(self, letters: str, of: str, kind: str = "activations"):
        """Those of them that have several devices."""
        key = letters, of, kind, "several"
        if key not in self._known:
            self._known[key] = tuple(
                axis for axis in self.named(letters, of, kind) if self.mesh[axis] > 1)
        return self._known[key]

    def devices(self, axes: tuple):
        """How many devices a group along these axes has."""
        return math.prod(self.mesh[axis] for axis in axes)

    def parts(self, letters: str, kind: str = "activations"):
        """Into how many parts an array of these letters is split."""
        key = letters, kind
        if key not in self._known:
            self._known[key] = self.devices(self.over(letters, letters, kind))
        return self._known[key]


@functools.cache
def of_all_letters(rules: Sharding):
    """The rules with the letters of `tables`, some of which follow others."""
    known = rules.activations
    whole = tuple(axis for axis in axes_of(known["T"]) if axis != "model")
    return rules.also(**dict.fromkeys("ORPUNAZI"), L=known.get("L"), E=known.get("E"),
                      G=known["H"], M=known["F"], W=whole or None)


@functools.cache
def _named(rules, letters, kind):
    rules = of_all_letters(rules)
    chosen = dict(rules.activations if kind == "activations" else rules.parameters)
    if kind in ("gradients", "moments"):
        chosen |= dict(getattr(rules, kind) or {})
    spec = (*spec_of(letters, chosen), *[None] * len(letters))
    return dict(zip(letters, map(axes_of, spec)))


@dataclass(frozen=True, eq=False)
class Placed:
    """A row of a table on one device.

    part: of the model, one of `tables.ALL_PARTS`; layers: of the device that have it, 1 outside of
    the layers; leaves: arrays of the model that are such a parameter; flags: of such a layer, none
    outside. used, stored, gradients, moments: numbers of its parameter in all of them, of which the
    device has the products, which it keeps, of its gradient, of one of Adam's moments. flops: of
    its product forward in all of them, for one pass of all rows; useful: its share of what has to
    be done.
    """

    row: Row
    part: str
    layers: int
    leaves: int
    flags: frozenset
    used: int
    stored: int
    gradients: int
    moments: int
    flops: float
    useful: float

    @functools.cached_property
    def in_layers(self):
        """Whether it is in the layers."""
        return bool(self.flags)

    @functools.cached_property
    def shape(self):
        """The letters of the parameter, with L where it is in the layers."""
        return "L" * self.in_layers + self.row.shape


@dataclass(frozen=True, eq=False)
class Step:
    """What one device has and does in a step of `rows` (B, of text or images) on all devices."""

    config: Any
    plan: Plan
    rows: int
    table: Table
    layout: Layout
    sizes: Mapping[str, int]
    placed: tuple[Placed, ...]

    @property
    def remat(self):
        """The policy of rematerialisation: the plan's, or the config's."""
        return self.plan.remat or getattr(self.config, "remat", "none")

    @functools.cached_property
    def microbatch(self):
        """Rows of one device in a microbatch."""
        return self.rows // self.layout.parts("B") // self.plan.microbatches

    @functools.cached_property
    def layers(self):
        """{part: layers of one device} of the kinds of layers."""
        return {each.part: each.layers for each in self.placed if each.in_layers}

    @functools.cached_property
    def numbers(self):
        """{"used", "stored", "gradients", "moments": numbers of parameters}: see Placed."""
        return {name: sum(getattr(each, name) for each in self.placed)
                for name in ("used", "stored", "gradients", "moments")}

    @functools.cached_property
    def active(self):
        """Numbers of stored parameters that one token uses: of experts those that it goes to."""
        def part(each):
            if "E" not in each.row.shape:
                return each.stored
            return each.stored * self.config.experts.active // self.config.experts.count
        return sum(map(part, self.placed))

    def numbers_of(self, letters: str):
        """Numbers of an activation of these letters on one device, of a microbatch."""
        if letters not in self._held:
            size = math.prod(map(self._in_microbatch.get, letters))
            self._held[letters] = size // self.layout.parts(letters)
        return self._held[letters]

    @functools.cached_property
    def _held(self):
        return {}

    @functools.cached_property
    def _in_microbatch(self):
        return self.sizes | {"B": self.rows // self.plan.microbatches}


def _attention(flags, attention):
    """The flags of a layer with another kind of attention than the config's."""
    if not attention:
        return flags
    if attention not in ATTENTION:
        raise ValueError(f"attention is one of {', '.join(ATTENTION)}; found {attention!r}")
    return flags - {"scores"} | ATTENTION[attention]


def layout_of(plan: Plan):
    """Where arrays lie by a plan's own rules."""
    return _layout(plan.rules, tuple(plan.sizes.values()), plan.method)


@functools.lru_cache(4096)
def _layout(rules, sizes, method):
    plan = Plan(*sizes, rules=rules, method=method)
    return Layout(rules_of(plan), plan.sizes)


def describe(config: Any, plan: Plan, rows: int, rules: Sharding | None = None):
    """The Step of a model by a plan; rules: in the place of the plan's own.

    Raises TypeError for a config without a table, and ValueError for a policy of rematerialisation,
    or a kind of attention, that there is not.
    """
    table, remat = tables.table_of(config), plan.remat
    if remat and remat not in table.kept:
        raise ValueError(f"remat is one of {', '.join(table.kept)}; found {remat!r}")
    layout = Layout(rules, plan.sizes) if rules else layout_of(plan)
    return Step(config, plan, rows, table, layout, tables.sizes_of(config),
                _placed(config, layout, rows, plan.attention or "blocks" * (plan.context > 1)))


@functools.lru_cache(4096)
def _placed(config, layout, rows, attention):
    """The rows of a model's table on a mesh."""
    table, sizes = tables.table_of(config), tables.sizes_of(config) | {"B": rows, "L": 1}
    kinds = tables.kinds_of(config)
    kinds = [(layers, _attention(flags, attention)) for layers, flags in kinds]
    flags = tables.flags_of(config)
    first, last = ([(row, part, 1, frozenset()) for row in chosen(rows, flags)]
                   for part, rows in (("embedding", table.first), ("head", table.last)))
    inside = [(row, tables.part_of(flags), layers, frozenset(flags)) for layers, flags in kinds
              for row in chosen(table.layer, flags)]
    periods = min(layers for layers, _ in kinds) if table.stacked else 1
    return tuple(_place(layout, sizes, periods, *one) for one in (*first, *inside, *last))


def _place(layout, sizes, periods, row, part, layers, flags):
    in_layers, devices = "L" * bool(flags), math.prod(layout.mesh.values())
    count, size = layers * row.number(flags), lambda letters: math.prod(map(sizes.get, letters))
    shape, flops = in_layers + row.shape, 2 * count * row.is_product

    def numbers(kind):
        return row.is_parameter * count * size(shape) // layout.parts(shape, kind)

    letters = in_layers + row.tokens + row.shape
    stages = layout.parts(in_layers)
    return Placed(
        row, part, layers // stages, layers // periods if flags else 1, flags,
        numbers("activations"), numbers("parameters"), numbers("gradients"), numbers("moments"),
        flops * size(letters) / layout.parts(letters),
        flops * size(row.useful or letters) / devices)


def check_slots(step: Step):
    """ValueError for experts without a capacity: what they do depends on the tokens."""
    experts = getattr(step.config, "experts", None)
    if experts is not None and not experts.capacity:
        raise ValueError("what dropless experts do depends on the tokens: expected a capacity "
                         "above 0")
