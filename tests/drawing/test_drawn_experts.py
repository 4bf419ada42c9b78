"""Drawn tokens stand in the slots that they got, and loads are drawn before and after dropping."""
import re

import pytest

from meshbook.drawing import svg
from meshbook.drawing.experts import draw_dispatch, draw_dropping, draw_loads

SENT = [[(0, True), (1, True)], [(0, True)], [(0, False), (1, True)]]


def test_a_choice_is_a_line_to_a_slot_or_to_a_cross():
    drawn = draw_dispatch([0, 0, 1], SENT, [0, 1], 3, "three tokens").html
    routes = re.findall(r'data-route="(\d),(\d)" data-kept="(\w+)"', drawn)
    assert routes == [("0", "0", "True"), ("0", "1", "True"), ("1", "0", "True"),
                      ("2", "0", "False"), ("2", "1", "True")]
    tokens = [int(n) for n in re.findall(r'data-token="(\d)"', drawn)]
    assert sorted(tokens) == [0, 0, 0, 1, 1, 2, 2]  # once at home, and once in each slot


def test_an_expert_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="expected experts 0 to 1; found 2"):
        draw_dispatch([0], [[(2, True)]], [0, 1], 1, "one token")


def test_the_line_of_an_expert_has_the_colour_of_its_device_and_rises_with_its_load():
    drawn = draw_loads({"loads": [[1, 1], [2, 0]]}, [0, 10], [3, 5], "two experts").html
    lines = re.findall(r'points="([^"]*)"[^>]*stroke="(#\w+)" data-expert', drawn)
    assert [colour for _, colour in lines] == [svg.device_colour(3), svg.device_colour(5)]
    (up, down) = ([float(point.split(",")[1]) for point in points.split()] for points, _ in lines)
    assert up[1] < up[0] == down[0] < down[1]  # y grows downwards


def test_loads_of_other_experts_or_steps_are_refused():
    for loads in ([[1, 1, 1], [1, 1, 1]], [[1, 1]]):
        with pytest.raises(ValueError, match="loads: expected 2 rows of 2 loads"):
            draw_loads({"loads": loads}, [0, 10], [0, 1], "two experts")


def test_what_was_dropped_is_hollow():
    drawn = draw_dropping({"now": ([1.5, 0.5], [1.25, 0.5])}, [0, 1], "two experts").html
    assert re.findall(r'data-kept="([\d.]+)"', drawn) == ["1.250", "0.500"]
    assert re.findall(r'data-dropped="([\d.]+)"', drawn) == ["0.250"]


def test_more_after_dropping_than_before_is_refused():
    with pytest.raises(ValueError, match="now, expert 1: expected a load of at most 0.5 after"):
        draw_dropping({"now": ([1.5, 0.5], [1.25, 0.75])}, [0, 1], "two experts")
