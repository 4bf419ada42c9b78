import numpy as np
import pytest

from meshbook.drawing import charts, figures, svg
from meshbook.drawing.svg import readable


def test_numbers_are_read_with_commas_and_no_more_digits_than_matter():
    assert [readable(value) for value in (1892.4, 100, 99.96, 34, 6.0, 0.2084, 0)] == [
        "1,892", "100", "100", "34", "6", "0.208", "0"]
    assert readable(-1234.5) == "-1,234"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float64("nan")])
def test_what_is_not_finite_is_not_drawn(value):
    with pytest.raises(ValueError, match="finite"):
        figures.bars({"right": 1.0, "wrong": value}, "ms", "Two bars.")
    with pytest.raises(ValueError, match="finite"):
        charts.draw_groups({"a": {"right": 1.0, "wrong": value}}, "ms", "Two bars.")


def test_a_rectangle_of_a_negative_size_is_not_drawn():
    assert svg.rectangle(0, 0, 0, 0).startswith("<rect")
    for size in (-1, 2), (2, -0.01):
        with pytest.raises(ValueError, match="expected a rectangle of a width and a height from 0"):
            svg.rectangle(0, 0, *size)
    with pytest.raises(ValueError, match="from 0"):
        figures.bars({"a": {"part": 3.0, "rest": -1.0}}, "ms", "")
