"""Schedules as drawn: boxes where the events are, numbers that the events add up to."""

import re
from xml.etree import ElementTree

import pytest

from meshbook.drawing import schedules as drawing
from meshbook.drawing import svg
from meshbook.drawing.schedules import draw_live, draw_schedules, facts
from meshbook.parallel.schedules import (
    Costs, gpipe, interleaved, one_f_one_b, simulate, split_backward, zero_bubble
)

BY_HAND = [  # two devices, two microbatches, B before W on the second
    (0, ("F", 0), 0, 1), (0, ("F", 1), 1, 2), (1, ("F", 0), 1, 2), (1, ("B", 0), 2, 3),
    (1, ("F", 1), 3, 4), (1, ("W", 0), 4, 5), (1, ("B", 1), 5, 6), (1, ("W", 1), 6, 7),
    (0, ("BW", 0), 3, 5), (0, ("BW", 1), 6, 8)]


def boxes(picture):
    """[(device, task, start, end)] by the places of the boxes, at the scale of the longest."""
    scale, found = whole(picture) / drawing.WIDE, []
    for group in ElementTree.fromstring(picture.html).iter():
        if group.get("data-task"):
            box = next(each for each in group if each.tag.endswith("rect"))
            gap = min(0.8, 0.15 * (float(box.get("width")) + 0.8))
            start = scale * (float(box.get("x")) - drawing.LEFT)
            found.append((int(group.get("data-device")), group.get("data-task"), start,
                          start + scale * (float(box.get("width")) + gap)))
    return found


def whole(picture):
    return max(float(end) for end in re.findall(r'data-end="([\d.]+)"', picture.html))


def test_boxes_are_where_the_events_are():
    expected = [(device, f"{task[0]} {task[1]} 0", start, end)
                for device, task, start, end in BY_HAND]
    drawn = boxes(draw_schedules({"by hand": BY_HAND}))
    assert [each[:2] for each in drawn] == [each[:2] for each in expected]
    for found, right in zip(drawn, expected, strict=True):
        assert found[2:] == pytest.approx(right[2:], abs=0.03)


def test_facts_by_hand():
    makespan, bubble, live = facts(BY_HAND)
    assert makespan == 8 and bubble == pytest.approx(1 - 12 / 16)
    assert live == {0: [(0, 0), (1, 1), (2, 2), (5, 1), (8, 0)],
                    1: [(0, 0), (2, 1), (4, 2), (5, 1), (7, 0)]}
    words = "by hand: makespan 8, bubble 25.0%, at most 2, 2 microbatches live"
    assert words in draw_schedules({"by hand": BY_HAND}).alt


@pytest.mark.parametrize("schedule, chunks", [
    (gpipe(3, 5), 1), (one_f_one_b(4, 8), 1), (split_backward(one_f_one_b(4, 6)), 1),
    (interleaved(4, 8, 3), 3), (zero_bubble(4, 8), 1)])
def test_facts_are_those_of_the_simulation(schedule, chunks):
    found = simulate(schedule, Costs(1.5, 1, 0.75, 0.25))
    makespan, bubble, live = facts(found.events)
    assert (makespan, bubble) == pytest.approx((found.makespan, found.bubble))
    most = [max(count for _, count in live[device]) for device in range(len(schedule))]
    assert most == pytest.approx([count / chunks for count in found.live])
    assert all(steps[-1][1] == pytest.approx(0) for steps in live.values())


def test_schedules_share_one_scale_of_time():
    long, short = simulate(gpipe(2, 4)).events, simulate(gpipe(2, 2)).events
    drawn = boxes(draw_schedules({"long": long, "short": short}))
    assert max(end for *_, end in drawn[len(long):]) == pytest.approx(9, abs=0.03)
    assert max(end for *_, end in drawn) == pytest.approx(15, abs=0.03)


def numbers_in(picture):
    return len(re.findall(r"<g [^>]*>(?:(?!</g>).)*<text", picture.html))


def test_numbers_stand_in_all_boxes_of_a_schedule_or_in_none():
    few, many = simulate(gpipe(4, 8)).events, simulate(one_f_one_b(8, 32)).events
    assert numbers_in(draw_schedules({"few": few})) == len(few)
    assert numbers_in(draw_schedules({"many": many})) == 0
    title = "device 7: BW of microbatch 31, chunk 0, from 101 to 103"
    assert title in draw_schedules({"many": many}).html


def test_chunks_are_paler_and_a_fused_task_has_the_colour_of_w_along_its_foot():
    fills = [fill for fill, _ in drawing.colours("F")]
    assert fills[0] == svg.KINDS[0] and sorted(map(svg.luminance, fills)) == [
        svg.luminance(fill) for fill in fills]
    for _, ink in drawing.colours("B"):
        assert ink in ("#111111", "#ffffff")
    events = [(0, (kind, 0, chunk), 2 * chunk + at, 2 * chunk + at + 1)
              for chunk in range(6) for at, kind in enumerate(("F", "BW"))]
    text = draw_schedules({"six chunks": events}).html.partition(">live<")[2]
    drawn = [re.findall(r'height="([\d.]+)" fill="(#[^"]+)"', each)
             for each in text.split("</g>")[:12]]
    shades = [min(chunk, 3) for chunk in range(6)]
    assert drawn[::2] == [[("16", fills[shade])] for shade in shades]
    assert drawn[1::2] == [[("16", drawing.colours("B")[shade][0]),
                            ("4", drawing.colours("W")[shade][0])] for shade in shades]


def test_the_key_names_the_kinds_that_there_are():
    words = draw_schedules({"gpipe": simulate(gpipe(2, 2)).events}).html
    assert "BW: both gradients" in words and "W: gradient of the weights" not in words


def test_live_microbatches_are_as_high_as_they_are_many():
    two = {"GPipe": simulate(gpipe(4, 8)).events, "1F1B": simulate(one_f_one_b(4, 8)).events}
    drawn = draw_live(two)
    paths = re.findall(r'<path d="M[\d.]+ ([\d.]+)([^"]*)" data-device="(\d)" fill="([^"]+)"',
                       drawn.html)
    assert [fill for *_, fill in paths] == [svg.device_colour(each) for each in range(4)] * 2
    highs = [float(floor) - min(map(float, re.findall(r"V([\d.]+)", path)))
             for floor, path, *_ in paths]
    assert highs == pytest.approx([drawing.HIGH * count / 8 for count in
                                   (8, 8, 8, 8, 4, 3, 2, 1)], abs=0.02)
    assert "1F1B: at most 4, 3, 2, 1 on the devices in order" in drawn.alt


@pytest.mark.parametrize("events, words", [
    ([], "events that take time; found 0"), ([(0, ("F", 0), 0, 0)], "found 1 of no duration"),
    ([(0, ("X", 0), 0, 1)], "a kind of F, B, W, BW .* found .'X', 0. from 0 to 1 on device 0"),
    ([(0, ("F", 0), 0, 2), (1, ("F", 0), 2, 1)], "found .'F', 0. from 2 to 1 on device 1")])
def test_what_is_no_schedule_is_refused(events, words):
    for draw in draw_schedules, draw_live:
        with pytest.raises(ValueError, match=words):
            draw({"wrong": events})
