"""The form's table of all meshes of a slice of TPUs: it shows what Python ranks, as you type."""
import re
from dataclasses import replace

import pytest
from browsers import CHROMIUM
from test_calculator_axes import choose, page, tab  # noqa: F401
from test_calculator_plans import JAX

from meshbook.costs.devices import DEVICES
from meshbook.models.decoder import DecoderConfig
from meshbook.planning.meshes import rank

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium on the PATH")
RULES = {"tensor_parallel": "whole weights", "zero1": "ZeRO-1", "fully_sharded": "ZeRO-3",
         "fully_sharded_kept": "ZeRO-3", "fully_sharded_again": "ZeRO-3, regather"}
SCHEDULES = {"gpipe": "GPipe", "lockstep": "1F1B, lockstep", "zero_bubble": "ZB-H1"}
KEPT = {"none": "everything", "products": "products", "attention": "attention", "all": "its input"}


def shown(tab):  # noqa: F811
    """[[mesh, plan, step, memory]] of all rows, and the reasons of what is impossible."""
    tab.wait_for_selector(".calculator-ranking[aria-busy=false]")
    home = tab.locator(".calculator-ranking")
    rows = [re.split(r"[\n\t]+", line.strip()) for line in home.locator("tbody tr").evaluate_all(
        "rows => rows.map(row => [...row.querySelectorAll('th span, small, td')].map("
        "each => each.firstChild.textContent).join('\t'))")]
    return rows, home.locator("li").all_text_contents()


def in_words(each):
    plan = each.plan
    how = [RULES[plan.rules], *[SCHEDULES[plan.schedule]] * (plan.stage > 1),
           *[f"{plan.microbatches} microbatches"] * (plan.microbatches > 1),
           f"keeps {KEPT[plan.remat]}"]
    return [plan.where or "one device", "; ".join(how)]


def is_shown(tab, config, rows, device, torus):  # noqa: F811
    found, refused = rank(config, rows, DEVICES[device], torus)
    lines, reasons = shown(tab)
    assert [line[:2] for line in lines] == [in_words(each) for each in found]
    for (*_, step, memory), each in zip(lines, found, strict=True):
        number, unit = step.split()
        assert float(number.replace(",", "")) * {"s": 1, "ms": 1e-3, "µs": 1e-6}[unit] == (
            pytest.approx(each.step, rel=0.006))
        assert memory.endswith(", no") != each.fits
    said = {}
    for mesh, why in refused.items():
        said.setdefault(why, []).append(mesh)
    assert sorted(reasons) == sorted(f"{why}: {which(meshes)}" for why, meshes in said.items())


def which(meshes):
    if len(meshes) > 1 and all(mesh.context > 1 for mesh in meshes):
        return f"all {len(meshes)} meshes with a context"
    return "; ".join(mesh.where for mesh in meshes)


def test_jaxformer_on_its_chips_is_ranked_as_in_chapter_17(page):  # noqa: F811
    choose(page, model="JAXformer")
    is_shown(page, JAX, 256, "TPU v4", (2, 4, 4))
    assert page.locator(".calculator-ranking tbody tr >> visible=true").count() == 10
    page.locator("summary").first.press("Enter")
    assert page.locator(".calculator-ranking tbody tr >> visible=true").count() == 41
    page.locator("[name=experts]").press_sequentially("0")  # 160 experts
    assert page.locator(".calculator-ranking").get_attribute("aria-busy") == "true"
    config = replace(JAX, experts=replace(JAX.experts, count=160))
    is_shown(page, config, 256, "TPU v4", (2, 4, 4))
    assert page.locator("details").first.get_attribute("open") is not None  # it stays so
    other = page.context.new_page()
    other.goto(page.url)
    assert shown(other) == shown(page)


def test_each_device_has_its_slices_and_what_has_none_is_not_ranked_so(page):  # noqa: F811
    slices = lambda: page.locator("[name=slice] option").all_inner_texts()
    assert not page.locator("[name=slice]").is_visible()  # of the ViT
    choose(page, model="Decoder", batch=64)
    assert slices()[-1] == "64: 8 × 8" and page.locator("[name=slice]").input_value() == "2x4"
    choose(page, slice="2x2")
    is_shown(page, DecoderConfig(dropout=0.1), 64, "TPU v5e", (2, 2, 1))
    choose(page, device="H100")
    assert slices() == [] and not page.locator("[name=slice]").is_visible()
    assert page.locator(".calculator-ranking").inner_text() == ""
    assert "All meshes of 8 devices" in page.locator(".calculator-output").inner_text()
    choose(page, device="TPU v5p", slice="2x2x2", layers=0)
    assert page.locator(".calculator-ranking").inner_text() == ""
    choose(page, layers=4, heads=1, rows=3)  # what the step above cannot have, the ranking may
    assert "batch=64 does not divide" in page.locator(".calculator-output").inner_text()
    is_shown(page, DecoderConfig(heads=1, dropout=0.1), 64, "TPU v5p", (2, 2, 2))


@pytest.mark.parametrize("width", (390, 1200))
def test_nothing_of_the_table_is_wider_than_the_page(page, width):  # noqa: F811
    page.set_viewport_size({"width": width, "height": 800})
    choose(page, model="JAXformer")
    shown(page)
    for summary in page.locator("summary").all():
        summary.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
