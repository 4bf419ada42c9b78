"""What a page needs to count in JavaScript as this package does: book/_static/costs*.js read it."""
from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import numpy as np

from meshbook.costs import explorer, machines, ranking, tables, transfers, turns, work
from meshbook.costs.devices import DEVICES
from meshbook.costs.plans import AXES, PRESETS, Plan, rules_of
from meshbook.costs.presets import MODELS
from meshbook.costs.seconds import DRAWN, OF_BOUNDS, OF_ESTIMATE
from meshbook.costs.step import ATTENTION, of_all_letters
from meshbook.costs.timeline import KINDS
from meshbook.hlo.clock import LANES
from meshbook.models import text_models
from meshbook.models.decoder_config import POLICIES
from meshbook.models.expert_layers import ExpertSizes
from meshbook.models.losses import CHUNK
from meshbook.parallel.context import BLOCK, METHODS
from meshbook.sharding import Sharding, axes_of

BETWEEN = AXES[1:-1]  # axes that are in the rules where they have several devices
DTYPES = ("float32", "bfloat16", "float16")  # of activations and products


def data():
    """Tables, rules, sizes, devices and constants of this package, as JSON has them.

    tables and configs are by the name of the model, such as "ViT"; models are by their names for
    people, each a pair of such a name and sizes; rules are by the name of the preset, and by those
    of BETWEEN that have several devices, in one string; explorer has the models of that form.
    """
    return json.loads(json.dumps({
        "tables": {_model(kind): dataclasses.asdict(each) for kind, each in tables.TABLES.items()},
        "configs": {_model(kind): _defaults(kind) for kind in tables.TABLES},
        "models": {name: [_model(type(each)), json_of(each)] for name, each in MODELS.items()},
        "experts": _defaults(ExpertSizes),
        "rules": {name: dict(_ruled(name)) for name in PRESETS},
        "explorer": {
            "models": {name: _offered(*each) for name, each in explorer.MODELS.items()},
            "of_all": explorer.OF_ALL, "parts": tables.ALL_PARTS, "passes": explorer.PASSES},
        "plan": dataclasses.asdict(Plan()),
        "axes": list(AXES), "between": list(BETWEEN), "kinds": list(KINDS),
        "schedules": list(turns.SCHEDULES), "policies": list(POLICIES), "methods": list(METHODS),
        "attention": {name: sorted(flags) for name, flags in ATTENTION.items()},
        "ranking": {name.lower(): getattr(ranking, name) for name in (
            "WHOLE", "STAGED", "COMPILED", "POLICIES", "SCHEDULES", "METHODS", "SPARE", "TIE",
            "DIVIDED")},
        "dtypes": {name: np.dtype(name).itemsize for name in DTYPES},
        "constants": {"BLOCK": BLOCK, "CHUNK": CHUNK, "DRAWN": DRAWN, "LANES": LANES,
                      "OF_BOUNDS": OF_BOUNDS, "OF_ESTIMATE": OF_ESTIMATE, "LOADS": transfers.LOADS,
                      "PADDED": text_models.LANES, "SIDE": work.SIDE},
        "slices": machines.SLICES,
        "devices": {name: dataclasses.asdict(each) for name, each in DEVICES.items()}},
        allow_nan=False))


def _model(kind):
    return kind.__name__.removesuffix("Config")


def json_of(config: Any):
    """A config's sizes as JSON has them, a dtype by its name; parameters are always float32."""
    sizes = dataclasses.asdict(config) | {"dtype": np.dtype(config.dtype).name}
    return {name: value for name, value in sizes.items() if name != "param_dtype"}


def _offered(config, axes):
    """A model of the explorer, its mesh axes, and the presets that it knows on some mesh."""
    known = {name for stages in (1, 2)
             for name in explorer.known_presets(config, Plan(stage=stages))[1]}
    return {"model": _model(type(config)), "sizes": json_of(config), "axes": axes,
            "presets": [name for name in PRESETS if name in known]}


def _defaults(kind):
    named = lambda value: np.dtype(value).name if isinstance(value, type) else value
    return {field.name: named(field.default) for field in dataclasses.fields(kind)}


def _ruled(preset):
    """(axes of BETWEEN that have several devices, rules of a preset) of all of them."""
    for sizes in itertools.product((1, 2), repeat=len(BETWEEN)):
        split = dict(zip(BETWEEN, sizes))
        rules = of_all_letters(rules_of(Plan(rules=preset, **split)))
        yield " ".join(axis for axis, size in split.items() if size > 1), _listed(rules)


def _listed(rules: Sharding):
    named = lambda own: {letter: list(axes_of(rule)) for letter, rule in own.items()}
    split = lambda own: {letter: axes for letter, axes in named(own).items() if axes}
    return {"activations": split(rules.activations), "parameters": split(rules.parameters),
            "gradients": None if rules.gradients is None else named(rules.gradients),
            "moments": named(rules.moments), "regather": rules.regather}
