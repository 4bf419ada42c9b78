"""The fused loss in pictures: bars as long as values, every matmul once, a column for each turn."""
from xml.etree import ElementTree

import pytest

from meshbook.drawing import fused_losses, svg
from meshbook.drawing.fused_losses import draw_matmuls, draw_token, draw_turns

ALL = list(fused_losses.PRODUCTS)


def nodes(picture, attribute):
    return [node for node in ElementTree.fromstring(picture.html).iter() if node.get(attribute)]


def test_the_bars_of_a_token_are_as_long_as_its_values_and_the_label_is_marked():
    bars = nodes(draw_token({"scores": [1.0, -2.0, 0.5]}, 1), "data-value")
    heights = [float(bar.get("height")) for bar in bars]
    assert [height / heights[0] for height in heights] == pytest.approx([1, 2, 0.5], rel=1e-2)
    assert [bar.get("fill") == svg.KINDS[1] for bar in bars] == [False, True, False]
    tops = [float(bar.get("y")) for bar in bars]
    assert tops[1] == pytest.approx(tops[0] + heights[0], abs=0.02)  # below zero it hangs down


def test_a_label_that_the_vocabulary_does_not_have_is_refused():
    with pytest.raises(ValueError, match="label from 0 to 2; found 3"):
        draw_token({"scores": [1.0, -2.0, 0.5]}, 3)


def test_every_matmul_is_drawn_and_scores_computed_again_are_dashed():
    drawn = draw_matmuls({"twice": (["scores"], ALL), "once": (ALL, [])})
    boxes = nodes(drawn, "data-product")
    assert [box.get("data-product") for box in boxes] == ["scores", *ALL, *ALL]
    dashed = [box.get("stroke-dasharray") is not None for box in boxes]
    assert dashed == [False, True, False, False, False, False, False]
    assert "twice: 1 in the forward pass, 3 in the backward pass" in drawn.alt


def test_a_matmul_of_another_name_is_refused():
    with pytest.raises(ValueError, match="expected one of scores.*found 'sums'"):
        draw_matmuls({"one": (["sums"], [])})


def test_each_turn_has_a_column_and_what_comes_after_has_one():
    drawn = draw_turns(3, [("", "scores"), ("model", "largest\n8 B")], [("batch", "head")])
    axes = [box.get("data-axis") for box in nodes(drawn, "data-axis")]
    assert axes == ["none", "model"] * 3 + ["batch"]
    assert drawn.alt.startswith("A loop of 3 turns. each turn: scores, largest 8 B along model; "
                                "after the loop: head along batch")
