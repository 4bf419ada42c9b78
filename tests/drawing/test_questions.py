"""What proofs compare: every question has its two boxes beside each other, in order."""
from xml.etree import ElementTree

import pytest

from meshbook.drawing.questions import draw_questions

ROWS = [("1. Is it sharded?", "the slices", "the rules,\nby letter"),
        ("2. Is it the same?", "losses", "losses on one device")]


def test_found_is_left_of_expected_and_questions_go_down():
    place = {node.text: (float(node.get("x")), float(node.get("y")))
             for node in ElementTree.fromstring(
                 draw_questions(("found", "expected"), ROWS).html).iter()
             if node.tag.endswith("text")}
    for question, found, expected in ROWS:
        assert place[found][0] < place[expected.split("\n")[0]][0]
        assert place[question][1] < place[found][1]
    assert place["found"][0] == place["losses"][0]
    assert place["by letter"][1] > place["the rules,"][1]
    assert place["losses"][1] == place["losses on one device"][1] > place["by letter"][1]


def test_it_is_told_in_words():
    assert draw_questions(("found", "expected"), ROWS[:1]).alt == (
        "found against expected. 1. Is it sharded?: the slices equals the rules, by letter")


def test_more_lines_than_a_box_has_are_refused():
    with pytest.raises(ValueError, match="room for two lines"):
        draw_questions(("a", "b"), [("q", "1\n2\n3", "x")])
