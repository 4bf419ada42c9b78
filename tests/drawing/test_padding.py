"""Padding: a matrix and its tiles are drawn to scale, and take what the formula of costs says."""
import re
from xml.etree import ElementTree

import pytest

from meshbook.costs.tiles import tiled
from meshbook.drawing.padding import draw_padding

MATRICES = {"scores": (65, 65), "residual": (65, 384), "full": (128, 384)}


def filled(picture):
    nodes = ElementTree.fromstring(picture.html).iter()
    return {node.get("data-matrix"): (float(node.get("height")), float(node.get("width")))
            for node in nodes if node.get("data-matrix")}


def test_what_is_used_is_drawn_to_one_scale():
    drawn = filled(draw_padding(MATRICES))
    scale = drawn["full"][1] / 384
    for title, shape in MATRICES.items():
        assert drawn[title] == pytest.approx([scale * size for size in shape])


def test_the_tiles_take_what_the_memory_formula_counts():
    for title, (rows, columns) in MATRICES.items():
        (words,) = re.findall(rf"{title}: (.*?) used", draw_padding({title: (rows, columns)}).alt)
        high, wide, share = map(int, re.fullmatch(r".* in (\d+) x (\d+): (\d+)%", words).groups())
        assert high * wide == tiled(rows, columns)
        assert share == round(100 * rows * columns / tiled(rows, columns))


def test_the_grid_has_a_line_around_every_tile():
    nodes = ElementTree.fromstring(draw_padding({"a": (65, 65)}).html).iter()
    assert sum(node.tag.endswith("line") for node in nodes) == (72 // 8 + 1) + (128 // 128 + 1)


def test_an_empty_matrix_is_refused():
    with pytest.raises(ValueError, match="at least one row and one column"):
        draw_padding({"none": (0, 4)})
