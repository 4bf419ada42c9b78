"""The decoder: each step with its parameters, and the block around those that are repeated."""
from xml.etree import ElementTree

import pytest
from boxes import drawings

from meshbook.drawing import svg
from meshbook.drawing.decoder import draw_decoder, draw_pre_norm

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


@pytest.mark.parametrize("drawing, kinds", [
    (lambda: draw_decoder(COUNTS, 3, 16, 640), (0, 2, None, 2, None, 0)),
    (lambda: draw_pre_norm(STEPS, 3, "A decoder."), (0, None, 2, None, 2, None, 0))])
def test_layers_have_the_colour_of_their_kind_and_norms_none(drawing, kinds):
    (_, _, found), = drawings(drawing())
    steps = [box for box in found if box.tag == "rect" and not box.node.get("stroke-dasharray")]
    assert [box.node.get("fill") for box in steps] == [
        "none" if kind is None else svg.KINDS[kind] for kind in kinds]
    words = [box.node for box in found if box.tag == "text" and any(map(box.overlaps, steps))]
    assert [node.get("fill") for node in words] == [
        "currentColor" if kind is None else svg.ink(svg.KINDS[kind]) for kind in kinds]


def test_sums_and_arrows_lie_between_the_steps_and_point_downwards():
    (_, _, found), = drawings(draw_pre_norm(STEPS, 3, "A decoder."))
    steps = [box for box in found if box.tag == "rect" and not box.node.get("stroke-dasharray")]
    sums = [box for box in found if box.tag == "circle"]
    assert len(sums) == 2 and all(one.bottom < other.top for one, other in zip(steps, steps[1:]))
    for each in sums:
        assert not any(step.top < each.bottom and each.top < step.bottom for step in steps)
    for line in (box.node for box in found if box.tag == "line"):
        assert float(line.get("y1")) <= float(line.get("y2"))


def test_a_missing_step_is_refused():
    with pytest.raises(ValueError, match="found .'embedding'"):
        draw_decoder({"embedding": 1}, 3, 16, 640)


STEPS = {"table": 900, "norm": 10, "attention": 400, "norm 2": 10, "MLP": 800, "last norm": 11,
         "head": 0}


def test_a_pre_norm_decoder_frames_one_layer_and_adds_to_the_stream_twice():
    drawing = draw_pre_norm(STEPS, 3, "A decoder.")
    root = ElementTree.fromstring(drawing.html)
    words = [node.text for node in root.iter() if node.tag.endswith("text")]
    numbers = [word for word in words if word.replace(",", "").isdigit()]
    assert numbers == ["900", "10", "400", "10", "800", "11", "0"]
    assert words.count("+") == 2 and "3 layers" in words
    boxes = [box for box in root if box.tag.endswith("rect")]
    (layer,) = [box for box in boxes if box.get("stroke-dasharray")]
    top = float(layer.get("y"))
    bottom = top + float(layer.get("height"))
    inside = [top < float(box.get("y")) and float(box.get("y")) + float(box.get("height")) < bottom
              for box in boxes if box is not layer]
    assert inside == [False, True, True, True, True, False, False]
    sums = [float(node.get("cy")) for node in root if node.tag.endswith("circle")]
    below = [float(box.get("y")) for box in boxes if box is not layer]
    assert below[2] < sums[0] < below[3] and below[4] < sums[1] < below[5]
    assert "attention: 400 parameters" in drawing.alt


def test_a_pre_norm_decoder_of_other_steps_is_refused():
    with pytest.raises(ValueError, match="seven steps; found table"):
        draw_pre_norm({"table": 1}, 3, "A decoder.")


def test_what_is_outside_of_the_layers_stands_in_the_stream_and_a_branch_beside_it():
    root = ElementTree.fromstring(draw_pre_norm(STEPS, 3, "A decoder.").html)
    boxes = [box for box in root if box.tag.endswith("rect") and not box.get("stroke-dasharray")]
    stream = min(float(node.get("cx")) for node in root if node.tag.endswith("circle"))
    crosses = [float(box.get("x")) < stream < float(box.get("x")) + float(box.get("width"))
               for box in boxes]
    assert crosses == [True, False, False, False, False, True, True]
