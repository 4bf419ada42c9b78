"""The parts of a file: where each begins is what those before it take."""
import itertools
from xml.etree import ElementTree

import pytest

from meshbook.drawing.file_parts import Part, draw_file

PARTS = {"header": Part(512, "who wrote it"), "tokens": Part(6_000, "3,000 of them", ["7", "8"]),
         "starts": Part(80, "10 of them", [f"{n}" for n in range(1_000, 1_100)])}


def texts(drawing):
    return [node.text for node in ElementTree.fromstring(drawing.html).iter()
            if node.tag.endswith("text")]


def test_each_part_begins_where_the_one_before_ends():
    words = texts(draw_file(PARTS, "a file"))
    places = itertools.accumulate((part.size for part in PARTS.values()), initial=0)
    assert [word for word in words if word in {"0", "512", "6,512", "6,592"}] == [
        f"{place:,}" for place in places]
    assert "tokens: 6,000 bytes" in words and "3,000 of them" in words


def test_elements_are_shown_in_order_as_far_as_there_is_room():
    words = texts(draw_file(PARTS, "a file"))
    shown = [word for word in words if word in PARTS["starts"].elements]
    assert 3 < len(shown) < 20 and shown == PARTS["starts"].elements[:len(shown)]
    assert words.count("…") == 2


def test_a_part_without_bytes_is_refused():
    with pytest.raises(ValueError, match="rest: expected a size of at least 1 byte, found 0"):
        draw_file({"rest": Part(0, "nothing")}, "a file")
