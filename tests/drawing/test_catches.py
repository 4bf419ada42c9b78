"""Proofs against programs: a cross where a proof failed, a dot where it passed."""
from xml.etree import ElementTree

import pytest

from meshbook.drawing.catches import draw_catches

PROOFS = {"sharded": "sharded?", "same": "same?", "divided": "divided?"}
PROGRAMS = {"one": ("kept whole", ("sharded",)), "two": ("done twice", ("divided", "same")),
            "right": ("nothing is wrong", ())}


def test_each_program_has_a_cross_for_each_proof_that_fails_and_a_dot_for_the_others():
    drawn = draw_catches(PROGRAMS, PROOFS)
    tree = list(ElementTree.fromstring(drawn.html).iter())
    crosses = [(node.get("data-caught"), float(node.get("y"))) for node in tree
               if node.get("data-caught")]
    dots = [node.get("data-passed") for node in tree if node.get("data-passed")]
    assert [proof for proof, _ in crosses] == ["sharded", "same", "divided"]
    assert crosses[0][1] < crosses[1][1] == crosses[2][1]
    assert dots == ["same", "divided", "sharded", "sharded", "same", "divided"]
    assert "two (done twice): caught by divided, same" in drawn.alt
    assert "right (nothing is wrong): caught by none" in drawn.alt


def test_a_long_story_is_broken_before_it_reaches_the_marks():
    story = "activations that are summed already are averaged once more by mistake"
    drawn = draw_catches({"an extra psum": (story, ("same",))}, PROOFS)
    lines = [node.text for node in ElementTree.fromstring(drawn.html).iter()
             if node.tag.endswith("text") and node.text in story]
    assert " ".join(lines) == story and max(map(len, lines)) <= 40


def test_a_proof_without_a_column_is_refused():
    with pytest.raises(ValueError, match=r"expected proofs among sharded, same, divided.*drawn"):
        draw_catches({"one": ("", ("drawn",))}, PROOFS)
