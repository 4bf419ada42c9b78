"""Tasks on lanes start as early as they may; chips are as many hops apart as the formulas say."""
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from meshbook.costs.devices import DEVICES
from meshbook.drawing import svg
from meshbook.drawing.lanes import LANES, Task, draw_lanes, schedule
from meshbook.drawing.torus import AXES, CHIP, draw_torus, hops, links
from meshbook.hlo.wire import wire_seconds

NAMES = ("batch", "model")


def nodes(picture):
    return list(ElementTree.fromstring(picture.html).iter())


def test_a_task_waits_for_its_lane_and_for_what_it_needs():
    times = schedule([Task("a", "compute", 2), Task("b", "links", 3, ("a",)),
                      Task("c", "compute", 1), Task("d", "compute", 1, ("b",)),
                      Task("e", "links", 1, ("c",))])
    assert times == {"a": (0, 2), "b": (2, 5), "c": (2, 3), "d": (5, 6), "e": (5, 6)}


def test_what_cannot_be_scheduled_is_refused():
    with pytest.raises(ValueError, match="one of compute, links; found 'disk'"):
        schedule([Task("a", "disk", 1)])
    with pytest.raises(ValueError, match="a needs b, which does not stand before it"):
        schedule([Task("a", "links", 1, ("b",)), Task("b", "compute", 1)])


def test_tasks_are_drawn_to_scale_on_their_lanes():
    tasks = [Task("layer 1", "compute", 0.002), Task("sum 1", "links", 0.001, ("layer 1",))]
    drawing = draw_lanes({"one": tasks, "other": tasks[:1]})
    boxes = [node for node in nodes(drawing) if node.get("data-task")]
    assert [(box.get("data-task"), box.get("fill")) for box in boxes] == [
        ("layer 1", LANES["compute"]), ("sum 1", LANES["links"]), ("layer 1", LANES["compute"])]
    wide = [float(box.get("width")) + 1 for box in boxes]
    assert wide == pytest.approx([200, 100, 200], abs=0.01)
    assert float(boxes[1].get("x")) == float(boxes[0].get("x")) + 200
    assert "one, links: sum 1 from 2.00 to 3.00 ms" in drawing.alt


@pytest.mark.parametrize("shape", [(4, 2), (4, 4), (2, 8), (1, 4), (16, 16)])
@pytest.mark.parametrize("ring", [False, True])
def test_a_chip_has_as_many_links_and_hops_as_the_seconds_assume(shape, ring):
    found, v5e = links(shape, ring), DEVICES["TPU v5e"]
    assert len({frozenset(pair) for pair in found}) == len(found)  # no link twice
    farthest = hops(shape, ring).max()
    seconds = wire_seconds("all-gather", shape, (1, 1), v5e, ring)  # one byte: only hops count
    assert seconds == pytest.approx(farthest * v5e.hop)
    per_chip = {place: sum(place in pair for pair in found) for place in np.ndindex(*shape)}
    each = [0 if size == 1 else 2 if ring and size > 2 else 1 for size in shape]
    assert min(per_chip.values()) == sum(each)


def test_every_link_is_drawn_in_the_colour_of_its_axis_and_no_chip_in_that_of_a_device():
    for shape, ring in (((4, 2), False), ((4, 4), True)):
        drawing = draw_torus(shape, NAMES, ring, "chips")
        drawn = [int(node.get("data-axis")) for node in nodes(drawing) if node.get("data-axis")]
        assert sorted(drawn) == sorted(links(shape, ring).values())
        for node in nodes(drawing):
            if node.get("data-axis"):
                assert node.get("stroke") == AXES[int(node.get("data-axis"))]
        chips = [node for node in nodes(drawing) if node.tag.endswith("circle")]
        assert [chip.get("fill") for chip in chips] == [CHIP] * (shape[0] * shape[1])
        assert CHIP not in {svg.device_colour(each) for each in range(8)} | {*AXES}
        numbers = re.search(r"row by row: (.*)$", drawing.alt)[1].replace(";", "").split()
        assert numbers == [str(each) for each in hops(shape, ring).flat]
        assert ("path" in drawing.html) == ring  # arcs are the links around
