"""Boxes in rows: as many as there are items, each in the colour of its state."""

from xml.etree import ElementTree

import pytest

from meshbook.drawing.strips import draw_strips

STATES = {"read": "#0072b2", "not read": None}
ROWS = {"first": [("a", "read"), ("b", "read"), ("c", "not read")],
        "second": [("d", "not read")] * 40}


def boxes(picture):
    return [node.attrib for node in ElementTree.fromstring(picture.html).iter()
            if "data-state" in node.attrib]


def test_every_item_is_a_box_in_the_colour_of_its_state():
    found = boxes(draw_strips(ROWS, STATES, "Two rows."))
    assert [each["data-state"] for each in found] == ["read"] * 2 + ["not read"] * 41
    assert [each["fill"] for each in found[:3]] == ["#0072b2", "#0072b2", "none"]
    assert len({each["y"] for each in found if each["data-state"] == "read"}) == 1
    right = max(float(each["x"]) + float(each["width"]) for each in found)
    assert right <= 396


def test_the_words_are_in_the_box_or_left_out_and_the_alt_text_counts():
    picture = draw_strips(ROWS, STATES, "Two rows.")
    words = [node.text for node in ElementTree.fromstring(picture.html).iter()
             if node.tag.endswith("text")]
    assert words.count("a") == 1 and words.count("d") == 40
    assert "too long" not in draw_strips({"": [("too long", "read")]}, STATES, "One.").html
    assert picture.alt == "Two rows. first: 2 read, 1 not read; second: 40 not read"
    mixed = draw_strips({"": [("", "read"), ("", "not read")] * 4}, STATES, "One row.")
    assert mixed.alt == "One row. 4 read, 4 not read, mixed"


@pytest.mark.parametrize("count", [2, 10, 15, 20, 30, 60])
@pytest.mark.parametrize("digits", [1, 2, 3])
def test_the_words_of_neighbours_never_touch(count, digits):
    picture = draw_strips({"": [("8" * digits, "read")] * count}, STATES, "One row.")
    places = [float(node.attrib["x"]) for node in ElementTree.fromstring(picture.html).iter()
              if node.text == "8" * digits]
    assert len(places) in (0, count)
    wide = 6.0 * digits  # of a line of this size
    assert all(b - a >= wide + 1.9 for a, b in zip(places, places[1:], strict=False))


@pytest.mark.parametrize("rows", [{}, {"a": []}, {"a": [("x", "lost")]}])
def test_no_boxes_and_unknown_states_are_refused(rows):
    with pytest.raises(ValueError, match="expected boxes with states of read, not read"):
        draw_strips(rows, STATES, "None.")
