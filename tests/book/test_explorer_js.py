"""The script of the sharding explorer gives what Python gives."""

import dataclasses
import itertools
import json

import pytest
from browsers import CHROMIUM
from costs_in_js import STATIC, answers_of, load, opened, said, sizes_of

from meshbook.costs import page
from meshbook.costs.explorer import (
    MODELS, activations, exchanges, explored, notation, parameters
)
from meshbook.costs.plans import PRESETS, Plan
from meshbook.models.decoder_config import DecoderConfig
from meshbook.models.expert_layers import ExpertSizes

LATENT = DecoderConfig(500, tokens=64, embed=64, hidden=96, heads=8, layers=6, latent=16, rotary=4,
                       period=2, bias=True, gated=False)
CONFIGS = [config for config, _ in MODELS.values()] + [
    LATENT, dataclasses.replace(LATENT, latent=0, rotary=0, remat="all", dtype="bfloat16"),
    dataclasses.replace(LATENT, latent=0, rotary=0, groups=4, by_row=True, remat="products",
                        experts=ExpertSizes(8, 2, shared=32, capacity=1.25, biased=True))]
MESHES = ({}, {"batch": 8}, {"batch": 4, "model": 2}, {"batch": 2, "model": 4}, {"model": 16},
          {"batch": 16, "model": 4}, {"batch": 3, "model": 2}, {"batch": 2, "expert": 4},
          {"batch": 2, "expert": 2, "stage": 2, "model": 2, "microbatches": 4},
          {"batch": 2, "stage": 2, "microbatches": 8, "schedule": "zero_bubble"},
          {"stage": 4, "schedule": "lockstep"}, {"batch": 2, "context": 4, "model": 2},
          {"context": 2, "method": "ulysses"}, {"batch": 4, "microbatches": 2}, {"stage": 3})
IN_JS = """asked => asked.map(([model, sizes, plan, rows, clipped]) => said(() => {
  const step = costs.explored(costs.configOf(model, sizes), plan, rows);
  const listed = list => list.map(({part, name, letters, shape, spec, held, bytes, arrays,
    isParameter}) => [part, name, letters, shape, spec, held, bytes, arrays, isParameter]);
  return {
    tensors: ["parameters", "gradients", "moments"].map(
      kind => listed(costs.parameters(step, kind))),
    activations: listed(costs.activations(step)),
    written: [...costs.parameters(step), ...costs.activations(step)].map(costs.notation),
    exchanges: costs.exchanges(step, clipped).map(Object.values)};
}))"""

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium on the PATH")


def in_python(config, plan, rows, clipped):
    step = explored(config, plan, rows)
    listed = lambda tensors: json.loads(json.dumps(tensors))
    return {
        "tensors": [listed(parameters(step, kind))
                    for kind in ("parameters", "gradients", "moments")],
        "activations": listed(activations(step)),
        "written": [notation(each) for each in parameters(step) + activations(step)],
        "exchanges": listed(exchanges(step, clipped))}


def test_the_script_gives_what_python_gives(browser):
    asked = [(config, Plan(**sizes, rules=rules), rows, clipped)
             for (config, sizes), (rules, (rows, clipped)) in zip(
                 itertools.product(CONFIGS, MESHES * len(PRESETS)),
                 itertools.cycle(itertools.product(
                     PRESETS, [(48, False), (64, True), (64, False), (50, False)])))]
    with opened(browser) as tab:
        tab.add_script_tag(path=STATIC / "explorer.js")
        load(tab, page.data())
        answers = answers_of(tab, IN_JS, [
            [*sizes_of(config), dataclasses.asdict(plan), *more] for config, plan, *more in asked])
    shown, sentences = [], set()
    for each, answer in zip(asked, answers, strict=True):
        expected = said(in_python, *each)
        assert answer == expected, each
        sentences |= {expected} if isinstance(expected, str) else set()
        shown += [] if isinstance(expected, str) else [each]
    assert len(shown) > 200 and {each[0] for each in shown} == set(CONFIGS)
    assert {plan.rules for _, plan, *_ in shown} == set(PRESETS)
    for axis in ("expert", "stage", "context", "model"):
        assert any(getattr(plan, axis) > 1 for _, plan, *_ in shown)
    assert len(sentences) > 20 and any("are known with" in each for each in sentences)
