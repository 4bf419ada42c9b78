"""Ratios on their axis: each where it is, half as far on one side as twice on the other."""

from xml.etree import ElementTree

import pytest

from meshbook.drawing.ratios import WIDE, draw_ratios


def marks(picture, attribute):
    """[(series, x)] of the elements that have an attribute."""
    return [(node.attrib[attribute], float(node.attrib.get("cx") or node.attrib["x"]))
            for node in ElementTree.fromstring(picture.html).iter() if attribute in node.attrib]


def test_ratios_stand_where_their_logarithm_is():
    picture = draw_ratios({"a": {"raw": [2.0, 0.5, 1.0], "now": [1.0]}, "b": {"raw": [4.0]}},
                          "predicted / measured", "five ratios")
    dots = marks(picture, "data-series")
    assert [name for name, _ in dots] == ["raw", "raw", "raw", "now", "raw"]
    half, one, twice, same, four = (x for _, x in dots)
    assert one == same and one - half == pytest.approx(twice - one, abs=0.02)
    assert four - one == pytest.approx(2 * (twice - one), abs=0.02)
    assert four - half < WIDE
    middles = [x + 1.5 for _, x in marks(picture, "data-median")]
    assert middles == pytest.approx([one, one, four], abs=0.02)


def test_rows_series_and_ticks_are_named():
    picture = draw_ratios({"norms": {"raw": [0.45, 2.2]}}, "predicted / measured", "two ratios")
    words = [node.text for node in ElementTree.fromstring(picture.html).iter()
             if node.tag.endswith("text")]
    assert words == ["norms", "1/2", "1", "2", "predicted / measured"]  # one series needs no key
    assert picture.alt == "two ratios"


def test_a_wide_axis_has_fewer_ticks():
    picture = draw_ratios({"a": {"raw": [0.001, 2.0]}}, "a / b", "two ratios")
    ticks = [node for node in ElementTree.fromstring(picture.html).iter()
             if node.tag.endswith("text") and node.text[0] == "1"]
    assert [node.text for node in ticks] == ["1/1024", "1/256", "1/64", "1/16", "1/4", "1"][-len(ticks):]
    places = [float(node.attrib["x"]) for node in ticks]
    assert len(ticks) >= 4 and min(b - a for a, b in zip(places, places[1:])) > 30


@pytest.mark.parametrize("rows", [{}, {"a": {"raw": []}}, {"a": {"raw": [1.0, 0.0]}}])
def test_what_has_no_logarithm_is_refused(rows):
    with pytest.raises(ValueError, match="ratios above 0"):
        draw_ratios(rows, "a / b", "none")
