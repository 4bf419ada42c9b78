"""The pictures of generation: filled columns, chances, and what a wrong call is told."""
from xml.etree import ElementTree

import numpy as np
import pytest

from meshbook.drawing import svg
from meshbook.drawing.generation import draw_cache, draw_choices, draw_intervals

WORDS = ["By", " the", " sea", " lived"]


def nodes(picture, tag):
    return [node for node in ElementTree.fromstring(picture.html).iter() if node.tag.endswith(tag)]


def first(count):
    return np.arange(len(WORDS)) < count


def test_new_columns_are_coloured_old_ones_pale_and_others_empty():
    drawing = draw_cache(WORDS, {"prefill": first(2), "decode 1": first(3)}, 1000)
    fills = [node.get("fill") for node in nodes(drawing, "rect")]
    prefill, decode = svg.KINDS[0], svg.KINDS[2]
    assert fills == [prefill, prefill, "none", "none",
                     "currentColor", "currentColor", decode, "none"]
    words = [node.text for node in nodes(drawing, "text")]
    assert "2.0 kB" in words and "3.0 kB" in words
    assert "decode 1: 1 new, 3 filled" in drawing.alt


def test_a_phase_about_other_columns_is_refused():
    with pytest.raises(ValueError, match="decode is about 3 columns; there are 4 words"):
        draw_cache(WORDS, {"decode": np.ones(3, bool)}, 1)


def test_bars_are_as_long_as_the_chances_and_absent_where_there_is_none():
    drawing = draw_choices(["a", "b"], {"all": [0.75, 0.25], "one": [1.0, 0.0]})
    widths = [float(node.get("width")) for node in nodes(drawing, "rect")]
    assert len(widths) == 3 and np.isclose(widths[0] / widths[1], 3, rtol=1e-3)
    words = [node.text for node in nodes(drawing, "text")]
    assert "75%" in words and "100%" in words and "–" in words


def test_another_number_of_chances_is_refused():
    with pytest.raises(ValueError, match="all has 1 chances; there are 2 tokens"):
        draw_choices(["a", "b"], {"all": [1.0]})


@pytest.mark.parametrize("number", [0.0, 0.1, 0.49, 0.5, 0.51, 0.74, 0.76, 0.99])
def test_the_token_into_whose_part_the_number_falls_is_outlined(number):
    chances = {"all": [0.5, 0.25, 0.25], "some": [0.0, 0.75, 0.25]}
    drawing = draw_intervals(["a", "b", "c"], chances, number)
    for way, p_V in chances.items():
        last = [i for i, p in enumerate(p_V) if p and sum(p_V[:i]) <= number][-1]
        assert f"{way}: {'abc'[last]!r}" in drawing.alt
    outlined = [node for node in nodes(drawing, "rect") if node.get("stroke") == "currentColor"]
    (line,) = nodes(drawing, "line")
    assert len(outlined) == 2
    for box in outlined:
        left = float(box.get("x"))
        assert left <= float(line.get("x1")) + 0.01 <= left + float(box.get("width")) + 0.02


def test_parts_are_as_wide_as_the_chances_and_fill_the_strip():
    drawing = draw_intervals(["a", "b", "c"], {"all": [0.5, 0.3, 0.2]}, 0.6)
    widths = [float(node.get("width")) for node in nodes(drawing, "rect")]
    assert np.allclose(np.divide(widths, sum(widths)), [0.5, 0.3, 0.2], atol=1e-3)


@pytest.mark.parametrize("p_V", [[0.5, 0.4], [1.0]])
def test_chances_that_do_not_fill_the_strip_are_refused(p_V):
    with pytest.raises(ValueError, match="all: expected 2 chances with the sum 1; found"):
        draw_intervals(["a", "b"], {"all": p_V}, 0.5)
