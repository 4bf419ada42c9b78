"""The calculator's form says what its formulas do not know, and writes numbers that can be read."""

import re

import pytest
from browsers import CHROMIUM
from test_calculator_axes import choose, page, tab  # noqa: F401
from test_calculator_plans_form import shown

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium on the PATH")

LARGE = {"model": "Decoder", "vocabulary": 32000, "tokens": 2048, "embed": 2048, "hidden": 5632,
         "heads": 32, "groups": 4, "layers": 22, "number": 2, "batch": 64, "rows": 8, "across": 1}
FUSED = "No fused attention is counted"
TILES = "in the tiles of a TPU, on H100, too"
CAUSAL = "skips those that the causal mask hides"
NODE = "NVLink joins 8 GPUs of a node"


def written(page):  # noqa: F811
    return page.locator(".calculator-output").inner_text()


def test_the_limits_of_memory_are_said_where_they_hold(page):  # noqa: F811
    choose(page, **LARGE, device="H100", preset="fully_sharded_kept")
    assert FUSED in written(page) and TILES in written(page)
    choose(page, byRow=1)
    assert FUSED not in written(page) and TILES in written(page)
    choose(page, device="TPU v5e")
    assert "tiles of a TPU" not in written(page)
    choose(page, preset="stage", byRow=0, across=2)
    assert FUSED in written(page)
    choose(page, preset="context")
    assert FUSED not in written(page)


def test_the_floor_of_compute_is_one_of_attention_without_a_mask(page):  # noqa: F811
    assert CAUSAL not in written(page)  # of the ViT, which has no mask
    for model in "MiniGPT", "Decoder":
        choose(page, model=model)
        assert CAUSAL in written(page) and "No program" not in written(page)


def test_links_between_nodes_and_slices_are_not_known(page):  # noqa: F811
    choose(page, **LARGE, device="H100", preset="fully_sharded_kept")
    assert NODE not in written(page)
    choose(page, rows=64)
    assert NODE in written(page) and "between all 64" in written(page)
    choose(page, device="TPU v5e", rows=256, batch=512)
    assert "A slice of" not in written(page)
    choose(page, rows=512)
    assert "A slice of TPU v5e has at most 256 devices" in written(page)


def test_chosen_is_the_sharding_and_not_the_mesh_alone(page):  # noqa: F811
    choose(page, **LARGE, byRow=1, device="H100", preset="data_parallel")
    rows = page.locator("table:has(caption:text('All meshes of 8 devices')) tbody tr")
    (mine,) = [text for text in rows.all_inner_texts() if "chosen" in text]
    assert mine.startswith("(8, 1) ZeRO-3, regather, the chosen mesh with another sharding")
    choose(page, preset="fully_sharded_again")
    (mine,) = [text for text in rows.all_inner_texts() if "chosen" in text]
    assert re.match(r"\(8, 1\) ZeRO-3, regather, chosen\s", mine)
    assert "need not be the order of the times" in written(page)


def test_a_mesh_larger_than_the_slice_is_ranked_by_two_axes(page):  # noqa: F811
    choose(page, **LARGE, device="TPU v5e", slice="2x4", preset="fully_sharded_kept")
    assert "All meshes of" not in written(page) and "The ranking below" not in written(page)
    choose(page, rows=256, batch=256)
    assert "All meshes of 256 devices" in written(page)
    assert "of the 8 chips of “Chips to rank”, not of the 256 devices" in written(page)


def test_a_context_is_not_impossible(page):  # noqa: F811
    choose(page, **LARGE, device="TPU v5e", slice="2x4", preset="context")
    shown(page)
    heads = page.locator(".calculator-ranking summary").all_inner_texts()
    assert "4 meshes with a context are not ranked" in [
        re.sub(r"^\d+", "4", head) for head in heads if "context" in head]
    impossible = page.locator("details", has_text="are impossible").last
    assert "context" not in impossible.inner_text()


def test_numbers_can_be_read(page):  # noqa: F811
    of = lambda what, number: page.evaluate(f"meshbookForm.{what}({number})")
    assert of("timeOf", 8.59e-12) == "8.59 ps" and of("timeOf", 2e-9) == "2 ns"
    assert of("timeOf", 0.0125) == "12.5 ms" and of("timeOf", 4e9) == "4.00 × 10^9 s"
    assert of("memoryOf", 3 * 2**50) == "3 PiB" and of("memoryOf", 2**90) == "1.07 × 10^9 EiB"
    choose(page, model="Decoder", tokens=10**9, rows=8, batch=10**6)
    axis = page.locator(".calculator-output svg text").all_text_contents()
    levels = [each for each in axis if each.endswith("EiB")]
    assert len(levels) > 2 and max(map(len, levels)) <= len("1.50 × 10^7 EiB")
