"""The life of checkpoints: lost steps are hollow, damaged ones crossed out, arrows lead on."""
from xml.etree import ElementTree

import pytest

from meshbook.drawing.lifelines import Life, draw_lives

FALLEN = Life([1, 2, 3, 4, 5, 6], [4], ended="SIGKILL", lost=True)


def nodes(picture, tag):
    return [node for node in ElementTree.fromstring(picture.html).iter() if node.tag.endswith(tag)]


def test_steps_after_the_last_save_of_a_killed_process_are_hollow():
    drawing = draw_lives({"one": FALLEN})
    assert [node.get("fill") == "none" for node in nodes(drawing, "circle")] == [False] * 4 + [
        True] * 2


def test_a_damaged_checkpoint_is_crossed_out_in_the_row_that_saved_it_last():
    lives = {"one": FALLEN, "two": Life([5, 6], [6], came_from=4),
             "three": Life([5, 6], [6], came_from=4)}
    marks = [node.text for node in nodes(draw_lives(lives, damaged=[6]), "text")
             if node.text in "✓✗"]
    assert marks == ["✓", "✓", "✗"]


def test_the_arrow_leads_from_the_checkpoint_to_the_next_step():
    drawing = draw_lives({"one": FALLEN, "two": Life([5, 6], came_from=4)})
    circles = [(float(n.get("cx")), float(n.get("cy"))) for n in nodes(drawing, "circle")]
    tip = nodes(drawing, "polygon")[0].get("points").split()[0].split(",")
    assert float(tip[1]) == circles[6][1] and 0 < circles[6][0] - float(tip[0]) < 12


def test_resuming_from_what_nobody_saved_is_refused():
    with pytest.raises(ValueError, match=r"two resumes from step 5; saved before are \[4\]"):
        draw_lives({"one": FALLEN, "two": Life([6], came_from=5)})
