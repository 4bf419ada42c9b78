"""A tree: every name has a box, every branch a line, every leaf its words."""
import re
from xml.etree import ElementTree

import pytest

from meshbook.drawing.trees import draw_tree

TREE = {"run": {"step 0": {"crop": "0a1b", "drop": {"first": "2c3d", "second": "4e5f"}},
                "step 1": {"crop": "6071"}}}


def test_boxes_lines_and_words_are_those_of_the_tree():
    drawn = draw_tree(TREE, ["run", "step", "use", "place"], "Keys of a run")
    tree = list(ElementTree.fromstring(drawn.html).iter())
    boxes = [node.text for node in tree if node.get("data-node")]
    assert sorted(boxes) == sorted(
        ["run", "step 0", "step 1", "crop", "crop", "drop", "first", "second"])
    assert sum(node.tag.endswith("path") for node in tree) == 7
    words = {node.text for node in tree if node.get("font-family") == "monospace"}
    assert words == {"0a1b", "2c3d", "4e5f", "6071"} and drawn.alt == "Keys of a run"


def test_a_parent_stands_between_its_children_and_no_two_boxes_overlap():
    drawn = draw_tree(TREE, ["run", "step", "use", "place"], "Keys of a run")
    place = {name: (float(x), float(y)) for x, y, name in re.findall(
        r'<text x="([\d.]+)" y="([\d.]+)"[^>]*data-node="([^"]+)"', drawn.html)}
    assert place["drop"][1] == pytest.approx(
        (place["first"][1] + place["second"][1]) / 2, abs=0.02)
    assert place["run"][0] < place["step 0"][0] < place["drop"][0] < place["first"][0]
    assert place["second"][1] - place["first"][1] >= 20


def test_a_tree_that_does_not_fit_its_headings_is_refused():
    with pytest.raises(ValueError, match="expected a tree of 1 to 2 levels, found 4"):
        draw_tree(TREE, ["run", "step"], "Keys")
    with pytest.raises(ValueError, match="found 0"):
        draw_tree({}, ["run"], "Keys")
