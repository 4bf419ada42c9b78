"""Checkpoints in pictures: bytes to scale, the stages in order, digits and differences as given."""
from xml.etree import ElementTree

import pytest

from meshbook.drawing import checkpoints, svg


def nodes(picture, attribute):
    return [node for node in ElementTree.fromstring(picture.html).iter() if node.get(attribute)]


def texts(picture):
    return [node.text for node in ElementTree.fromstring(picture.html).iter()
            if node.tag.endswith("text")]


def test_the_bars_of_a_checkpoint_are_as_long_as_its_bytes():
    drawn = checkpoints.draw_checkpoint(
        "run/4", {"parameters": (16, 3000), "moments": (32, 6000)}, {"step": "4"})
    one, two = (float(node.get("width")) for node in nodes(drawn, "data-part"))
    assert two == pytest.approx(2 * one)
    assert {"16 arrays, 3.0 kB", "32 arrays, 6.0 kB", "step", "4"} <= set(texts(drawn))


def test_each_stage_says_whether_training_waits_and_what_is_left():
    stages = [("copy", True, [4]), ("write", False, [4]), ("rename", False, [4, 8])]
    drawn = checkpoints.draw_saving(stages)
    boxes = nodes(drawn, "data-waits")
    assert [box.get("data-waits") for box in boxes] == ["True", "False", "False"]
    assert [box.get("fill") for box in boxes] == [svg.KINDS[1], "none", "none"]
    assert [word for word in texts(drawn) if word in ("4", "8")] == ["4", "4", "4", "8"]
    assert drawn.alt.endswith("copy, while training waits: leaves 4; write: leaves 4; "
                              "rename: leaves 4 and 8")


def test_a_stage_that_leaves_nothing_says_so():
    assert "write: leaves nothing" in checkpoints.draw_saving([("write", False, [])]).alt


def test_only_digits_that_differ_are_filled_and_the_byte_is_where_it_is():
    drawn = checkpoints.draw_flip(1000, 250, {"before": "0123abcd", "now": "0f23abc0"})
    filled = [node for node in ElementTree.fromstring(drawn.html).iter()
              if node.get("fill") == svg.KINDS[1] and not node.get("data-byte")]
    assert len(filled) == 2 and "now: 0f23abc0..., 2 of 8 digits differ" in drawn.alt
    (mark,) = nodes(drawn, "data-byte")
    assert float(mark.get("x")) + 1.5 == pytest.approx(checkpoints.WIDE / 4, abs=0.5)


def test_hashes_that_cannot_be_compared_are_refused():
    with pytest.raises(ValueError, match=r"hashes of one length.*lengths \[4, 8\]"):
        checkpoints.draw_flip(10, 5, {"before": "0123", "now": "01234567"})
    with pytest.raises(ValueError, match="byte 10"):
        checkpoints.draw_flip(10, 10, {"before": "0123"})


def test_a_difference_has_few_characters():
    written = {0: "0", 8e-8: "8e-08", 4.9e-5: "5e-05", 5e-5: "0.01%", 3e-4: "0.03%",
               2e-3: "0.20%", 2.1e-3: "0.2%", 0.013: "1.3%"}
    assert {value: checkpoints.difference(value) for value in written} == written


def test_differences_are_written_and_only_a_zero_is_empty():
    drawn = checkpoints.draw_differences({"same": [0, 0], "moved": [0, 8e-8], "lost": [3e-4, 0.03]}, 5)
    cells = [node for node in ElementTree.fromstring(drawn.html).iter() if node.get("fill-opacity")]
    shades = [float(node.get("fill-opacity")) for node in cells]
    assert shades[:3] == [0, 0, 0] and 0 < shades[3] < shades[4] < shades[5] <= 1
    assert texts(drawn)[:2] == ["step 5", "6"]
    assert {"8e-08", "0.03%", "3.0%"} <= set(texts(drawn)) and "moved: 0, 8e-08" in drawn.alt
