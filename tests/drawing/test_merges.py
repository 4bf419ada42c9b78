"""Merges: what is drawn is what the vocabulary joins, row by row, down to the tokens."""
from xml.etree import ElementTree

import pytest

from meshbook.data import grammar, vocabulary
from meshbook.drawing.documents import visible
from meshbook.drawing.merges import draw_merges, draw_splits

LEARNED = vocabulary.learn(grammar.stories(0, 400), 512)


def elements(picture, tag):
    return [node for node in ElementTree.fromstring(picture.html).iter() if node.tag.endswith(tag)]


def drawn(word):
    return draw_merges(vocabulary.merges(LEARNED, word), LEARNED.encode_ordinary(word), "learned")


@pytest.mark.parametrize("word", [" playground", " the", "a", " zzz"])
def test_every_part_of_every_row_is_drawn_and_every_number(word):
    words = [node.text for node in elements(drawn(word), "text")]
    for parts, made in vocabulary.merges(LEARNED, word):
        for part in parts:
            words.remove(visible(part.decode()))
        if made is not None:
            words.remove(f"makes {made}")
    numbers = LEARNED.encode_ordinary(word)
    count = f"{len(numbers)} token" + "s" * (len(numbers) > 1)
    assert words == ["learned", f"{len(word)} bytes", *map(str, numbers), count]


def test_a_row_covers_the_word_without_gap_and_one_part_of_it_is_new():
    steps = vocabulary.merges(LEARNED, " playground")
    boxes = elements(drawn(" playground"), "rect")
    for row, (parts, made) in enumerate(steps):
        here, boxes = boxes[:len(parts)], boxes[len(parts):]
        ends = [(float(box.get("x")) - 1, float(box.get("width")) + 2) for box in here]
        assert ends[0][0] == 0
        assert all(x + wide == pytest.approx(after)
                   for (x, wide), (after, _) in zip(ends, ends[1:]))
        if row < len(steps) - 1:
            filled = [part for part, box in zip(parts, here) if box.get("fill") != "none"]
            assert filled == ([] if made is None else [LEARNED.decode_single_token_bytes(made)])
    assert not boxes


def test_what_is_no_text_is_drawn_as_numbers():
    assert "f0" in [node.text for node in elements(drawn("🪁"), "text")]


def test_rows_of_another_word_and_missing_numbers_are_refused():
    steps = vocabulary.merges(LEARNED, " the")
    with pytest.raises(ValueError, match="step 1 has the bytes b'other'; expected b' the'"):
        draw_merges([steps[0], ([b"other"], 300)], [300])
    with pytest.raises(ValueError):
        draw_merges(steps, [])


def test_a_text_is_split_as_each_stage_says_and_no_byte_moves():
    text = " the old mouse"
    stages = {"bytes": [bytes([b]) for b in text.encode()],
              "all": LEARNED.decode_tokens_bytes(LEARNED.encode_ordinary(text))}
    drawing = draw_splits(stages)
    boxes = [(float(box.get("x")) - 1, float(box.get("width")) + 2)
             for box in elements(drawing, "rect")]
    wide = boxes[0][1]
    for parts in stages.values():
        here, boxes = boxes[:len(parts)], boxes[len(parts):]
        assert [round(width / wide) for _, width in here] == [len(part) for part in parts]
        assert here[0][0] == 0 and here[-1][0] + here[-1][1] == pytest.approx(wide * len(text))
    assert not boxes
    words = [node.text for node in elements(drawing, "text")]
    assert f"{len(text)} tokens" in words and f"{len(stages['all'])} tokens" in words
    assert drawing.alt.endswith(" ".join(visible(part.decode()) for part in stages["all"]))


def test_a_stage_of_another_text_is_refused():
    with pytest.raises(ValueError, match="other has the bytes b'other'; expected b'one'"):
        draw_splits({"one": [b"o", b"ne"], "other": [b"other"]})
