"""The timeline of microbatches: heights are the peaks, and each has its part of the batch."""
from xml.etree import ElementTree

import pytest

from meshbook.drawing.microbatches import draw_microbatches


def nodes(picture, tag):
    return [node for node in ElementTree.fromstring(picture.html).iter() if node.tag.endswith(tag)]


def heights(polygon):
    ys = [float(pair.split(",")[1]) for pair in polygon.get("points").split()]
    return max(ys) - min(ys)


def test_heights_are_to_scale_and_widths_fill_the_step():
    drawing = draw_microbatches({"one": (1, 8e9), "four": (4, 2e9)}, 64)
    areas = nodes(drawing, "polygon")
    assert len(areas) == 2 * (1 + 4)
    assert [round(heights(areas[0]) / heights(each), 2) for each in areas] == [1] * 2 + [4] * 8
    words = [node.text for node in nodes(drawing, "text")]
    assert words.count("16") == 4 and "64 examples" in words


def test_microbatches_that_do_not_divide_the_batch_are_refused():
    with pytest.raises(ValueError, match="3 microbatches do not divide a batch of 64"):
        draw_microbatches({"three": (3, 1)}, 64)
