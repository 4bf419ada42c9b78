"""Ranges are as wide as they are, and what was found is one line through all."""
import re

import pytest

from meshbook.drawing.ranges import draw_ranges

ROWS = {"a step": (0.4, 0.5, 1.5), "another": (0.2, 1.1, 2.0)}


def test_bars_begin_and_end_where_the_ranges_do():
    picture = draw_ranges(ROWS, ("bound", "range"), "Two steps.").html
    bars = [[float(re.search(rf'\b{name}="([\d.]+)"', each)[1]) for name in ("x", "width")]
            for each in re.findall(r"<rect[^>]*data-range[^>]*>", picture)]
    (one, wide), (other, less) = bars
    scale = wide / (1.5 - 0.5)
    assert less == pytest.approx(scale * (2.0 - 1.1), abs=0.1)
    assert other - one == pytest.approx(scale * (1.1 - 0.5), abs=0.1)
    (found,) = re.findall(r'<line[^>]*x1="([\d.]+)"[^>]*stroke-dasharray="4 3"', picture)
    assert float(found) - one == pytest.approx(scale * (1 - 0.5), abs=0.1)
    assert 'aria-label="Two steps."' in picture


@pytest.mark.parametrize("rows", [{}, {"a": (0.1, 2.0, 1.0)}])
def test_what_is_no_range_is_refused(rows):
    with pytest.raises(ValueError, match="expected rows"):
        draw_ranges(rows, ("bound", "range"), "None.")
