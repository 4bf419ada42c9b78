"""Words in the colour of their fact, and targets that are the next inputs."""
from xml.etree import ElementTree

import pytest

from meshbook.drawing import svg
from meshbook.drawing.documents import colour_of
from meshbook.drawing.sentences import draw_facts, draw_targets

WORDS = "Now Anna reads her book and she smiles".split()
FACTS = [None, "person", "tense", "person", None, None, "person", "tense"]


def nodes(picture, tag):
    return [node for node in ElementTree.fromstring(picture.html).iter() if node.tag.endswith(tag)]


def test_each_word_has_the_colour_of_its_fact_and_the_key_names_it():
    drawing = draw_facts(WORDS, FACTS)
    boxes = [box for box in nodes(drawing, "rect") if box.get("data-fact")]
    assert [box.get("data-fact") for box in boxes] == [fact for fact in FACTS if fact]
    colours = {"person": svg.SERIES[0], "tense": svg.SERIES[1]}
    assert all(box.get("fill") == colours[box.get("data-fact")] for box in boxes)
    assert [text.text for text in nodes(drawing, "text")] == ["person", "tense", *WORDS]
    assert "person decides Anna, her, she; tense decides reads, smiles" in drawing.alt


def test_no_word_leaves_the_picture_and_none_covers_another():
    drawing = draw_facts(WORDS * 9, ["fact"] * len(WORDS * 9))
    boxes = [[float(box.get(side)) for side in ("x", "y", "width")]
             for box in nodes(drawing, "rect") if box.get("data-fact")]
    assert max(x + wide for x, _, wide in boxes) <= 400 and len({y for _, y, _ in boxes}) > 2
    for (x, y, wide), (after, below, _) in zip(boxes, boxes[1:]):
        assert after >= x + wide if below == y else (after == 0 and below > y)


def test_another_number_of_facts_is_refused():
    with pytest.raises(ValueError, match="for each of 8 words; found 1"):
        draw_facts(WORDS, ["person"])


def test_a_target_is_the_next_input():
    drawing = draw_targets(["<end>", "By", " the", " sea"], 3)
    _, _, *words = [text.text for text in nodes(drawing, "text")]
    assert words == ["<end>", "By", "By", "·the", "·the", "·sea"]
    fills = [box.get("fill") for box in nodes(drawing, "rect")]
    assert fills == [colour_of(i) for i in (0, 1, 1, 2, 2, 3)]
    assert drawing.alt.endswith("<end> predicts By, By predicts ·the, ·the predicts ·sea")


@pytest.mark.parametrize("count", [0, 2])
def test_a_last_input_without_a_target_is_refused(count):
    with pytest.raises(ValueError, match=f"expected 1 to 1 inputs of 2 tokens; found {count}"):
        draw_targets(["a", "b"], count)
