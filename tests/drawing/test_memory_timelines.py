"""The memory of a step over time, drawn: areas as high as their bytes, a line where memory ends."""

import re
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from meshbook.drawing.memory_timelines import WORDS, binary, draw_timelines, place

GIB = 2**30


def moment(phase, block=None, **held):
    held = dict.fromkeys(WORDS, 0) | held
    return SimpleNamespace(phase=phase, block=block, held=held, total=sum(held.values()))


STEP = [moment("forward", 0, parameters=GIB), moment("forward", 1, parameters=GIB, activations=GIB),
        moment("loss", parameters=GIB, activations=GIB, logits=GIB),
        moment("backward", 1, parameters=GIB, activations=GIB, gradients=2 * GIB),
        moment("backward", 0, parameters=GIB, gradients=2 * GIB), moment("update", parameters=GIB)]


def areas(picture):
    """[(colour, bytes in GiB of each moment)] of the first panel; its axis ends at 8 GiB."""
    tree = ElementTree.fromstring(picture.html)
    for node in tree.iter():
        if node.tag.endswith("path"):
            levels = [float(y) for y in re.findall(r"V([\d.]+)h\d", node.attrib["d"])]
            floors = [float(y) for y in re.findall(r"V([\d.]+)h-", node.attrib["d"])][::-1]
            yield node.attrib["fill"], [8 * (below - above) / 80
                                        for above, below in zip(levels, floors, strict=True)]


def test_each_kind_is_as_high_as_its_bytes_at_each_moment():
    drawn = dict(areas(draw_timelines({"a step": STEP}, ("8 GiB", 8 * GIB), high=80)))
    assert list(drawn) == [WORDS[kind][1] for kind in (
        "parameters", "gradients", "activations", "logits")]
    for kind in ("parameters", "gradients", "activations", "logits"):
        columns = drawn[WORDS[kind][1]]
        assert columns == pytest.approx([each.held[kind] / GIB for each in STEP], abs=0.01)


def test_the_peak_and_the_memory_of_the_device_are_where_they_belong():
    picture = draw_timelines({"a": STEP, "b": STEP[:1] + STEP[3:]}, ("a device has 2 GiB", 2 * GIB),
                             high=80)
    tree = ElementTree.fromstring(picture.html)
    words = [node for node in tree.iter() if node.text == "peak 4 GiB"]
    assert len(words) == 2 and "a device has 2 GiB" in picture.html
    limits = [float(node.attrib["y1"]) for node in tree.iter() if "data-limit" in node.attrib]
    tops = [float(node.attrib["y"]) + 5 for node in words]
    assert [limit - top for limit, top in zip(limits, tops)] == pytest.approx([40, 40], abs=0.1)
    assert "a: at most 4 GiB, in the backward pass of block 1" in picture.alt
    assert "gathered weights" not in picture.html  # there are none


def test_the_words_of_a_peak_do_not_cross_the_line():
    tree = ElementTree.fromstring(draw_timelines(
        {"a": STEP}, ("a device has 4.2 GiB", 4.2 * GIB), high=80).html)
    (limit,) = [float(node.attrib["y1"]) for node in tree.iter() if "data-limit" in node.attrib]
    (peak,) = [float(node.attrib["y"]) for node in tree.iter() if node.text == "peak 4 GiB"]
    assert peak < limit


def test_a_kind_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="kinds of memory of parameters, .*; found {'soup'}"):
        draw_timelines({"a": [moment("loss", soup=3)]}, ("memory", 5))


def test_bytes_and_places_in_words():
    assert [binary(size) for size in (0, 1023, 1536, 9.54 * GIB, 344 * 2**20, 20 * 2**40)] == [
        "0 B", "1,023 B", "1.5 KiB", "9.54 GiB", "344 MiB", "20 TiB"]
    assert [place(each) for each in STEP[:4]] == [
        "in the forward pass of the embedding", "in the forward pass of block 1", "in the loss",
        "in the backward pass of block 1"]
