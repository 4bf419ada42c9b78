"""All meshes of so many devices in the calculator: its JavaScript ranks them as Python does."""
import dataclasses
import itertools
from pathlib import Path

import jax.numpy as jnp
import pytest
from browsers import CHROMIUM
from test_calculator import sizes_of

from meshbook.costs.devices import DEVICES
from meshbook.models import MiniGPTConfig, ViTConfig
from meshbook.models.decoder import DecoderConfig
from meshbook.planning.estimates import estimate, ranked_meshes

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "_build" / "html" / "book" / "calculator.html"
CONFIGS = {
    "ViT": [ViTConfig(), ViTConfig(embed=96, hidden=200, heads=4)],
    "MiniGPT": [MiniGPTConfig(embed=1536, hidden=6144, heads=16, layers=48)],
    "Decoder": [DecoderConfig(dropout=0.1, heads=12, embed=768, hidden=3072, layers=24),
                DecoderConfig.jaxformer(dtype=jnp.bfloat16, remat="all", by_row=True)],
}
CHOICES = [
    (config, count, batch, name, checkpointed, model)
    for model, configs in CONFIGS.items() for config, count, (batch, name), checkpointed in
    itertools.product(configs, (1, 8, 12, 64), ((256, "TPU v5e"), (960, "TPU v4")),
                      (False, True) if model != "Decoder" else (False,))]


def choice_of(config, batch, name, checkpointed, model):
    return {"model": model, "sizes": sizes_of(config), "batch": batch,
            "checkpointed": checkpointed, "device": dataclasses.asdict(DEVICES[name])}


def test_the_best_of_each_mesh_comes_first_if_it_fits_and_is_fast():
    config, device = CONFIGS["MiniGPT"][0], DEVICES["TPU v5e"]
    found, refused = ranked_meshes(config, 8, 64, device)
    assert {tuple(each.mesh.values()) for each in found} | refused.keys() == {
        (8, 1), (4, 2), (2, 4), (1, 8)}
    assert [each.fits for each in found] == sorted((each.fits for each in found), reverse=True)
    for each in found:
        assert each.estimate == estimate(config, each.preset, each.mesh, 64, device)
        assert each.fits == (each.estimate.peak <= device.memory)
        for preset in "data_parallel", "tensor_parallel", "fully_sharded":
            other = estimate(config, preset, each.mesh, 64, device)
            if (other.peak <= device.memory) >= each.fits:
                assert sum(other.floors.values()) >= each.seconds
    for fits in True, False:
        times = [each.seconds for each in found if each.fits == fits]
        assert times == sorted(times)
    assert {each.fits for each in found} == {True, False}


def test_a_mesh_that_cannot_be_has_its_reason():
    found, refused = ranked_meshes(ViTConfig(), 5, 24, DEVICES["TPU v5e"])
    assert [(each.mesh, each.preset) for each in found] == [
        ({"batch": 1, "model": 5}, "data_parallel")]  # 8 heads are not split
    assert refused == {(5, 1): "batch=24 does not divide over mesh axis 'batch' of size 5: "
                               "24 = 5·4 + 4"}


@pytest.mark.skipif(not CHROMIUM, reason="no chromium on the PATH")
def test_the_script_ranks_as_python_does(browser):
    context = browser.new_context()
    tab = context.new_page()
    for name in "calculator.js", "calculator-decoder.js", "calculator-ranking.js":
        tab.add_script_tag(path=ROOT / "book" / "_static" / name)
    answers = tab.evaluate(
        "asked => asked.map(([choice, count]) => meshbook.ranking.meshes(choice, count))",
        [[choice_of(config, batch, *rest), count] for config, count, batch, *rest in CHOICES])
    context.close()
    ranked = 0
    for (config, count, batch, name, checkpointed, _), answer in zip(CHOICES, answers, strict=True):
        found, refused = ranked_meshes(config, count, batch, DEVICES[name], checkpointed)
        assert [(each["rows"], each["across"], each["preset"], each["fits"])
                for each in answer["found"]] == [
                    (*each.mesh.values(), each.preset, each.fits) for each in found]
        for ours, theirs in zip(answer["found"], found, strict=True):
            assert ours["seconds"] == pytest.approx(theirs.seconds, rel=1e-12)
        assert {tuple(mesh): why for mesh, why in answer["refused"]} == {
            mesh: why.partition(":")[0] for mesh, why in refused.items()}
        ranked += len(found)
    assert ranked > 2 * len(CHOICES)


@pytest.mark.skipif(not CHROMIUM, reason="no chromium on the PATH")
@pytest.mark.skipif(not PAGE.exists(), reason="no site in _build/html: make book")
def test_the_form_shows_the_ranking_and_marks_the_mesh_that_is_chosen(browser):
    context = browser.new_context()
    tab = context.new_page()
    tab.goto(PAGE.as_uri())
    tab.locator("select[name=model]").select_option("JAXformer")
    for name, value in ("rows", 16), ("across", 2), ("batch", 256):
        tab.locator(f"input[name={name}]").fill(str(value))
    tab.locator("select[name=device]").select_option("A100")  # of TPUs all plans are ranked
    rows = tab.locator("table:has(caption:text('All meshes of 32 devices')) tbody tr")
    config = CONFIGS["Decoder"][1]
    found, _ = ranked_meshes(config, 32, 256, DEVICES["A100"])
    shown = [text.partition(")")[0] + ")" for text in rows.all_inner_texts()]
    assert shown == [f"({each.mesh['batch']}, {each.mesh['model']})" for each in found]
    assert ["chosen" in text for text in rows.all_inner_texts()].count(True) == 1
    context.close()
