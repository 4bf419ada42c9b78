"""A picture that is changed is another one; what rounding changes is the same."""
import re

import pytest
from pictures import NUMBER, is_like, marks

from meshbook.drawing import figures

PICTURE = figures.bars({"all": {"one": 3.0, "two": 40.0}, "none": {"one": 5.0}}, "ms", "Bars.").html


@pytest.mark.parametrize("change", [
    lambda html: html.replace('fill="#', 'fill="#1', 1), lambda html: html.replace("all", "each"),
    lambda html: re.sub(r"<rect[^>]*></rect>", "", html, count=1), lambda html: html + html,
    lambda html: html.replace("start", "end", 1)])
def test_another_colour_word_or_number_of_parts_is_another_picture(change):
    assert change(PICTURE) != PICTURE and not is_like(marks(change(PICTURE)), marks(PICTURE))


@pytest.mark.parametrize("at", range(len(NUMBER.findall(PICTURE))))
def test_each_number_counts(at):
    found = list(NUMBER.finditer(PICTURE))[at]
    moved = lambda by: (PICTURE[:found.start()] + f"{float(found[0]) + by:.2f}"
                        + PICTURE[found.end():])
    assert not is_like(marks(moved(1)), marks(PICTURE))
    assert is_like(marks(moved(0.01)), marks(PICTURE))


def test_pixels_of_an_image_are_left_to_other_tests():
    html = '<image href="data:image/png;base64,{}" x="3"></image>'
    assert is_like(marks(html.format("AAAA")), marks(html.format("BBBB")))
