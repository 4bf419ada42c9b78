"""Charts: bars as long as their values, limits that are seen, points where they belong."""
import re
from xml.etree import ElementTree

import pytest

from meshbook.drawing import charts

GROUPS = {"batch 1": {"a": 1.0, "b": 2.0}, "batch 2": {"a": 4.0, "b": 8.0}}


def solid(picture):
    """[(label, width)] of the filled bars."""
    return [(each["data-label"], float(each["width"])) for each in (
        node.attrib for node in ElementTree.fromstring(picture.html).iter()) if "data-label" in each]


def test_bars_are_as_long_as_their_values():
    bars = solid(charts.draw_groups(GROUPS, "GiB", "four bars"))
    assert [label for label, _ in bars] == ["a", "b", "a", "b"]
    assert [width / bars[0][1] for _, width in bars] == pytest.approx([1, 2, 4, 8], rel=1e-3)


def test_what_is_beyond_the_limit_is_hollow():
    picture = charts.draw_groups(GROUPS, "GiB", "four bars", limit=("all there is", 5.0))
    widths = [width for _, width in solid(picture)]
    assert widths[3] / widths[2] == pytest.approx(5 / 4, rel=1e-3)
    hollow = re.findall(r'<rect [^>]*width="([\d.]+)"[^>]*fill="none"[^>]*dasharray', picture.html)
    assert len(hollow) == 1 and float(hollow[0]) / widths[2] == pytest.approx(3 / 4, rel=1e-2)
    assert "all there is" in picture.html


def test_what_is_not_known_is_said_and_nothing_known_is_refused():
    assert "not known" in charts.draw_groups({"x": {"a": 1.0, "b": None}}, "s", "a bar").html
    with pytest.raises(ValueError, match="at least one known value to draw; found none"):
        charts.draw_groups({"x": {"a": None}}, "s", "nothing")


def test_words_stay_inside_and_do_not_cross_the_limit():
    picture = charts.draw_groups({"a long name of a group": {"one": 7.0, "two": 10.0}}, "GiB",
                                 "two bars", limit=("limit", 7.2))
    tree = ElementTree.fromstring(picture.html)
    width = float(tree.attrib["viewBox"].split()[2])
    (limit,) = [float(node.attrib["x1"]) for node in tree.iter() if "stroke-dasharray" in node.attrib
                and node.tag.endswith("line")]
    value = next(node for node in tree.iter() if node.text == "7 GiB")
    assert float(value.attrib["x"]) > limit
    for node in tree.iter():
        if node.text and node.attrib.get("text-anchor") == "start":
            size = float(node.attrib["font-size"])
            assert float(node.attrib["x"]) + 0.6 * size * len(node.text) <= width + 8


def test_points_lie_where_their_values_are():
    pairs = [(1.0, 1.0), (10.4, 10.0), (96.0, 100.0)]
    picture = charts.draw_agreement({"peak": {"v2": pairs}}, "GB", "three", band=0.04)
    nodes = [node.attrib for node in ElementTree.fromstring(picture.html).iter()]
    (x1, y1), (x2, y2), (x3, y3) = [(float(each["cx"]), float(each["cy"])) for each in nodes
                                    if "cx" in each]
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.02)  # factors of ten are equally wide
    (band,) = [each for each in nodes if "fill-opacity" in each and "height" in each]
    assert y2 == pytest.approx(float(band["y"]), abs=0.02)  # 4% too much: the band's upper edge
    assert y3 == pytest.approx(float(band["y"]) + float(band["height"]), abs=0.02)
    assert y1 == pytest.approx((y2 + y3) / 2, abs=0.02)


def test_points_that_no_logarithm_takes_are_refused():
    for points in ({}, {"v2": [(0.0, 1.0)]}):
        with pytest.raises(ValueError, match="positive values; found"):
            charts.draw_agreement({"peak": points}, "GB", "nothing", band=0.05)


def test_panels_share_the_sizes_and_the_colours():
    pairs = {"v2": [(1.0, 1.0)], "v5e": [(10.4, 10.0)]}
    picture = charts.draw_agreement({"live": pairs, "peak": pairs}, "GB", "two twice", band=0.1)
    points = [node.attrib for node in ElementTree.fromstring(picture.html).iter()
              if "cx" in node.attrib]
    upper, lower = points[:2], points[2:]
    for above, below in zip(upper, lower, strict=True):
        assert above["cx"] == below["cx"] and above["fill"] == below["fill"]
        assert float(below["cy"]) - float(above["cy"]) > 100
    assert upper[0]["fill"] != upper[1]["fill"]


def test_a_spread_ends_at_the_worst_and_its_bar_at_nine_in_ten():
    shares = [0.01 * n for n in range(1, 11)]
    picture = charts.draw_spreads({"v2": {"peak": shares[::-1]}, "v5e": {"peak": [0.2]}}, "two")
    bars = dict(zip(("v2", "v5e"), (width for _, width in solid(picture)), strict=True))
    assert bars["v2"] / bars["v5e"] == pytest.approx(0.09 / 0.2, rel=1e-2)
    assert "10.0% at worst" in picture.html and "20.0% at worst" in picture.html
    for nothing in ({}, {"v2": {"peak": []}}):
        with pytest.raises(ValueError, match="at least one share; found"):
            charts.draw_spreads(nothing, "nothing")


def test_a_bar_that_ends_at_the_limit_has_nothing_beyond_it():
    picture = charts.draw_groups({"x": {"a": 5.0, "b": 2.0}}, "GiB", "two bars", limit=("all", 5.0))
    assert "dasharray=\"3 2\"" not in picture.html
