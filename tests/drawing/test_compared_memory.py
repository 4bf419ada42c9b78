"""A step's memory twice: areas as high as the program's bytes, dots as high as the formula's."""

import re
from xml.etree import ElementTree

import pytest

from meshbook.costs.timeline import Moment
from meshbook.drawing.compared_memory import HIGH, WIDE, draw_compared
from meshbook.hlo.memory_kinds import KINDS, StepMemory
from meshbook.planning.recorded_timelines import SAME_KINDS, Comparison

MB = 10**6


def step(**kinds):
    return {kind: kinds.get(kind.replace(" ", "_"), [0] * 8) for kind in KINDS}


PROGRAM = StepMemory(step(parameters=[100 * MB] * 8,
                          activations=[0, 100 * MB, 200 * MB, 200 * MB, 100 * MB, 0, 0, 0],
                          weight_gradients=[0, 0, 0, 0, 50 * MB, 100 * MB, 100 * MB, 0]),
                     turn=4, busy=range(8))
MOMENTS = [Moment("forward", 0, {"parameters": 100 * MB}),
           Moment("loss", None, {"parameters": 100 * MB, "activations": 300 * MB}),
           Moment("update", None, {"parameters": 200 * MB})]
BOTH = Comparison(MOMENTS, [1, 3, 7], PROGRAM)


def elements(picture, tag):
    return [node for node in ElementTree.fromstring(picture.html).iter() if node.tag.endswith(tag)]


def test_dots_and_areas_are_as_high_as_the_bytes():
    picture = draw_compared({"a step": BOTH}, SAME_KINDS)
    dots = [node for node in elements(picture, "circle") if "data-moment" in node.attrib]
    base = max(float(y) for node in elements(picture, "path")
               for y in re.findall(r"V([\d.]+)h", node.attrib["d"]))
    scale = HIGH / (400 * MB)  # the formula is highest
    assert [(base - float(dot.attrib["cy"])) / scale / MB for dot in dots] == pytest.approx(
        [100, 400, 200], abs=1)
    roofs = [[(base - float(y)) / scale / MB for y in re.findall(r"V([\d.]+)h\d", each.attrib["d"])]
             for each in elements(picture, "path") if "h1" in each.attrib["d"]]
    per = WIDE // 8
    assert [max(roof) for roof in roofs] == pytest.approx([100, 300, 300], abs=1)
    assert roofs[1][per * 2 + 1] == pytest.approx(300, abs=1)  # the third operation
    assert roofs[2][per * 5 + 1] == pytest.approx(200, abs=1)  # gradients beside the parameters


def test_a_dot_stands_above_its_place_in_the_program():
    picture = draw_compared({"a step": BOTH, "again": BOTH}, SAME_KINDS)
    dots = [float(node.attrib["cx"]) for node in elements(picture, "circle")
            if "data-moment" in node.attrib]
    assert len(dots) == 6
    for first, loss, update in (dots[:3], dots[3:]):
        assert [loss - first, update - first] == pytest.approx([WIDE * 2 / 8, WIDE * 6 / 8])
    words = [node.text for node in elements(picture, "text")]
    assert words.count("peak 300 MB, formula +33%") == 2
    assert "a step: the program holds at most 300 MB, the formula differs from that by +33%" in (
        picture.alt)


def test_other_groups_than_three_are_refused():
    with pytest.raises(ValueError, match="expected 3 groups of kinds"):
        draw_compared({"a step": BOTH}, {"all": KINDS})
