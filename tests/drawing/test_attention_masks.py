"""Attention masks: what is filled is what is True."""
from xml.etree import ElementTree

import numpy as np
import pytest

from meshbook.drawing.attention_masks import GAP, SIDE, TOP, draw_attention_masks

CAUSAL = np.tri(6, dtype=bool)
STORIES = np.array([1, 1, 2, 2, 2, 3])
APART = CAUSAL & (STORIES[:, None] == STORIES)


def filled(drawing, number, length):
    """The mask that picture `number` shows, read from its rectangles."""
    mask, left, size = np.zeros((length, length), bool), number * (SIDE + GAP), SIDE / length
    for box in ElementTree.fromstring(drawing.html).iter():
        if box.get("shape-rendering"):
            x, y, wide = (float(box.get(side)) for side in ("x", "y", "width"))
            if left <= x < left + SIDE:
                first, row = round((x - left) / size), round((y - TOP) / size)
                mask[row, first:first + round(wide / size)] = True
    return mask


def test_what_is_filled_is_the_mask_and_its_share_is_written():
    drawing = draw_attention_masks({"causal": CAUSAL, "apart": APART})
    assert np.array_equal(filled(drawing, 0, 6), CAUSAL)
    assert np.array_equal(filled(drawing, 1, 6), APART)
    assert drawing.alt == "causal: 58% of all pairs. apart: 28% of all pairs"


def test_a_row_with_gaps_is_drawn_with_its_gaps():
    mask = np.array([[1, 0, 1], [0, 1, 0], [0, 0, 0]], bool)
    assert np.array_equal(filled(draw_attention_masks({"any": mask}), 0, 3), mask)


def test_a_mask_that_is_not_square_is_refused():
    with pytest.raises(ValueError, match=r"odd: expected a mask of T·T, found shape \(2, 3\)"):
        draw_attention_masks({"odd": np.ones((2, 3), bool)})
