"""The pictures of generation: filled columns, chances, and what a wrong call is told."""
from xml.etree import ElementTree

import numpy as np
import pytest

from meshbook.drawing import svg
from meshbook.drawing.generation import draw_cache, draw_choices

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
