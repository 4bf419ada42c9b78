"""Differences and what is allowed: bars end where the values say, and a failure is not green."""
import math
from xml.etree import ElementTree

import pytest

from meshbook.drawing import svg
from meshbook.drawing.margins import draw_margins


def nodes(picture, tag):
    return [node for node in ElementTree.fromstring(picture.html).iter() if node.tag.endswith(tag)]


def test_bars_and_ticks_lie_on_one_logarithmic_axis():
    rows = {"losses": (1e-7, 1e-6), "gradients": (1e-6, 1e-5), "parameters": (1e-5, 1e-4)}
    drawn = draw_margins(rows)
    wide = [float(node.get("width")) for node in nodes(drawn, "rect")]
    assert wide[1] - wide[0] == pytest.approx(wide[2] - wide[1], abs=0.02)
    ticks = [float(node.get("x1")) for node in nodes(drawn, "line")
             if node.get("stroke-width") == "2.4"]
    assert len(ticks) == 3
    for (found, allowed), bar, tick in zip(rows.values(), wide, ticks):
        decade = wide[1] - wide[0]
        start = float(nodes(drawn, "rect")[0].get("x"))
        assert tick - (start + bar) == pytest.approx(decade * math.log10(allowed / found), abs=0.03)
    assert "gradients 1.0e-06, allowed 1e-05" in drawn.alt


def test_more_than_allowed_is_red_and_nothing_at_all_is_a_bar_of_no_length():
    drawn = draw_margins({"good": (0, 1e-6), "bad": (2e-6, 1e-6)})
    fills = {node.get("data-row"): node.get("fill") for node in nodes(drawn, "rect")}
    assert fills == {"good": svg.SERIES[2], "bad": svg.KINDS[1]}
    assert float(nodes(drawn, "rect")[0].get("width")) == 0 and "good 0, allowed" in drawn.alt


@pytest.mark.parametrize("rows", [{}, {"x": (-1, 1)}, {"x": (math.nan, 1)}, {"x": (1, 0)}])
def test_what_is_no_difference_is_refused(rows):
    with pytest.raises(ValueError, match="expected differences of at least 0"):
        draw_margins(rows)
