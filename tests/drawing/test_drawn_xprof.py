"""XProf in pictures: bars as long as what a tool names, calls and devices on one clock."""
from xml.etree import ElementTree

import pytest

from meshbook.drawing import svg
from meshbook.drawing.xprof import draw_calls, draw_tools

FOUND = {"few": (50, 0), "all": (100, 3), "none": (0, 0), "steps": (0, 2)}


def nodes(picture, attribute):
    return [node for node in ElementTree.fromstring(picture.html).iter() if node.get(attribute)]


def test_the_bars_are_the_share_of_the_operations_and_those_with_most_come_first():
    bars = nodes(draw_tools(FOUND, (100, 3)), "data-tool")
    assert [bar.get("data-tool") for bar in bars] == ["all", "few", "steps", "none"]
    widths = [float(bar.get("width")) for bar in bars]
    assert [width / widths[0] for width in widths] == pytest.approx([1, 0.5, 0, 0])


def test_a_circle_is_filled_for_every_step_that_is_named():
    circles = nodes(draw_tools(FOUND, (100, 3)), "data-step")
    filled = [circle.get("data-step") for circle in circles if circle.get("fill") == svg.KINDS[0]]
    assert len(circles) == 12 and filled == ["all"] * 3 + ["steps"] * 2


@pytest.mark.parametrize("counts", [(101, 0), (0, 4)])
def test_more_than_there_is_cannot_be_named(counts):
    with pytest.raises(ValueError, match="expected at most .100, 3. operations and steps; odd"):
        draw_tools({"odd": counts}, (100, 3))


def test_calls_and_devices_are_on_one_clock():
    drawn = draw_calls({2: ((0.0, 10.0), (5.0, 45.0)), 3: ((10.0, 50.0), (20.0, 100.0))})
    boxes = nodes(drawn, "data-step")
    assert [box.get("data-step") for box in boxes] == ["2", "2", "3", "3"]
    starts = [float(box.get("x")) - 1 for box in boxes]
    widths = [float(box.get("width")) for box in boxes]
    assert starts == pytest.approx([0, 3.84 * 5, 3.84 * 10, 3.84 * 20], abs=0.01)
    assert widths == pytest.approx([3.84 * 10, 3.84 * 40, 3.84 * 40, 3.84 * 80], abs=0.01)
    assert "step 3: 40 ms in the call, 80 ms on the devices" in drawn.alt
