"""The decoder: each step with its parameters, and the block around those that are repeated."""
from xml.etree import ElementTree

import pytest

from meshbook.drawing.decoder import draw_decoder

COUNTS = {"embedding": 1_000, "attention": 2_000, "norm": 30, "MLP": 4_000, "head": 5_000}


def test_each_step_has_its_number_in_the_order_of_the_model():
    drawing = draw_decoder(COUNTS, layers=3, width=16, vocabulary=640)
    words = [node.text for node in ElementTree.fromstring(drawing.html).iter()
             if node.tag.endswith("text")]
    numbers = [word for word in words if word.replace(",", "").isdigit()]
    assert numbers == ["1,000", "2,000", "30", "4,000", "30", "5,000"]
    assert "3 blocks" in words and "head: 640 scores" in words
    assert "causal attention: 2,000 parameters" in drawing.alt


def test_the_block_frames_attention_mlp_and_their_norms_only():
    root = ElementTree.fromstring(draw_decoder(COUNTS, 3, 16, 640).html)
    boxes = [box for box in root if box.tag.endswith("rect")]
    (block,) = [box for box in boxes if box.get("stroke-dasharray")]
    top = float(block.get("y"))
    bottom = top + float(block.get("height"))
    inside = [top < float(box.get("y")) and float(box.get("y")) + float(box.get("height")) < bottom
              for box in boxes if box is not block]
    assert inside == [False, True, True, True, True, False]
    assert sum(node.tag.endswith("polyline") for node in root) == 2  # one around each layer


def test_a_missing_step_is_refused():
    with pytest.raises(ValueError, match="found .'embedding'"):
        draw_decoder({"embedding": 1}, 3, 16, 640)
