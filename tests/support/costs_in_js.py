"""book/_static/costs*.js in a browser, beside the Python that they follow."""
import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest

from meshbook.costs import page
from meshbook.models import MiniGPTConfig, ViTConfig
from meshbook.models.decoder import DecoderConfig
from meshbook.models.expert_layers import JAXFORMER, ExpertSizes

STATIC = Path(__file__).resolve().parents[2] / "book" / "_static"
SCRIPTS = ("costs.js", "costs-machines.js", "costs-work.js", "costs-traffic.js", "costs-memory.js",
           "costs-seconds.js", "costs-ranking.js")
DENSE = DecoderConfig(1000, tokens=384, embed=96, hidden=144, heads=12, layers=12, dropout=0.1)
LATENT = replace(DENSE, latent=24, rotary=6, period=3, bias=True, gated=False)
DROPLESS = replace(DENSE, experts=ExpertSizes(6, 2))
NARROW = replace(DENSE, groups=4, dtype=jnp.bfloat16, remat="attention", bias=True)
CONFIGS = [
    ViTConfig(), ViTConfig(image=48, patch=6, classes=16, embed=96, hidden=192, heads=4, layers=3,
                           dropout=0.0),
    ViTConfig(image=28, patch=2, classes=12, embed=1024, hidden=4096, heads=16, layers=24,
              dtype=jnp.bfloat16),
    MiniGPTConfig(), MiniGPTConfig(250, tokens=24, embed=48, hidden=96, heads=4, layers=2),
    MiniGPTConfig(embed=1536, hidden=6144, heads=12, layers=48, dropout=0.0, dtype=jnp.bfloat16),
    DENSE, replace(DENSE, remat="products", by_row=True, groups=1), NARROW,
    replace(DENSE, period=4, dropout=0.0, remat="all"), LATENT,
    replace(LATENT, rotary=0, period=1, bias=False, by_row=True, dtype=jnp.bfloat16),
    replace(DENSE, experts=ExpertSizes(12, 3, shared=48, capacity=1.5)),
    replace(NARROW, period=2,
            experts=ExpertSizes(8, 2, capacity=1.25, auxiliary=1e-2, biased=True)),
    replace(LATENT, experts=ExpertSizes(6, 1, capacity=0.3, biased=True), by_row=True),
    DecoderConfig.jaxformer(experts=JAXFORMER, dtype=jnp.bfloat16, by_row=True),
    replace(DecoderConfig.jaxformer(), latent=0, rotary=0, groups=4)]
SAID = """make => {
  try { return make(); } catch (error) {
    if (!(error instanceof RangeError)) throw error;
    return error.message;
  }
}"""


@contextmanager
def opened(browser):
    """A tab with the scripts, and the data of this package."""
    context = browser.new_context()
    tab = context.new_page()
    for name in SCRIPTS:
        tab.add_script_tag(path=STATIC / name)
    tab.evaluate(f"() => {{ globalThis.said = {SAID}; }}")
    load(tab, page.data())
    yield tab
    context.close()


def load(tab, data):
    tab.evaluate("text => { globalThis.costs = meshbook.costs(JSON.parse(text)); }",
                 json.dumps(data))


def answers_of(tab, script, given):
    """What a function of the script says, both as text: the browser's own way is slow."""
    return json.loads(tab.evaluate(f"text => JSON.stringify(({script})(JSON.parse(text)))",
                                   json.dumps(given)))


def sizes_of(config):
    """A config as the script has it: the model's name, and its sizes."""
    return type(config).__name__.removesuffix("Config"), page.json_of(config)


def close(numbers):
    return {what: pytest.approx(each, rel=1e-12) for what, each in numbers.items()}


def said(make, *given):
    """What a function says, or what it refuses."""
    try:
        return make(*given)
    except ValueError as error:
        return str(error)
