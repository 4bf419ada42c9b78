"""Communication beside work, as drawn: lanes that hold what the runs hold."""

import re

import pytest

from meshbook.costs.devices import DEVICES
from meshbook.drawing import overlap as drawing
from meshbook.drawing.overlap import draw_overlap, draw_sent_when_ready
from meshbook.hlo import schedule
from meshbook.profiling.estimated_runs import EstimatedRun
from meshbook.profiling.overlap import Part

SPANS = [(schedule.CORE, 0, 4), (schedule.LINKS, 2, 3), (schedule.LINKS, 4, 6),
         (schedule.CORE, 6, 8)]


@pytest.fixture
def run():
    kinds = {schedule.CORE: "compute", schedule.LINKS: "collective"}
    return EstimatedRun([schedule.Span(f"{where}{start}", kinds[where], where, start / 1e3,
                                       end / 1e3, "", None) for where, start, end in SPANS],
                        DEVICES["TPU v5e"])


def drawn(picture, lane, length, first=0):
    """[(start, end, opacity)] of a lane's rectangles, in ms."""
    found = re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)"[^>]*'
                       rf'fill-opacity="([\d.]+)" data-lane="{lane}"', picture.html)
    scale = length / drawing.WIDE
    return [(first + scale * (float(x) - drawing.LEFT),
             first + scale * (float(x) + float(wide) - drawing.LEFT), float(opacity))
            for x, wide, opacity in found]


def close(found, expected):
    return found == [pytest.approx(each, abs=0.01) for each in expected]


def test_lanes_hold_the_work_and_the_communication(run):
    picture = draw_overlap({"mine": run})
    assert close(drawn(picture, "core", 8), [(0, 4, 1), (6, 8, 1)])
    assert close(drawn(picture, "links", 8), [(2, 3, drawing.FAINT), (4, 6, 1)])
    assert "mine: 8.0 ms, 2.00 exposed, 1.00 hidden" in picture.alt


@pytest.mark.parametrize("pause, parts", [(125, 1), (249, 1), (250, 2), (500, 2)])
def test_a_pause_of_a_pixel_is_drawn_and_a_shorter_one_is_not(pause, parts):
    """Over 330 pixels that are 250 ms each."""
    spans = [(0, 1000), (1000 + pause, 2000 + pause)]
    run = EstimatedRun([schedule.Span("", "compute", schedule.CORE, start / 1000, end / 1000, "",
                                      None) for start, end in spans], DEVICES["TPU v5e"])
    found = drawn(draw_overlap({"mine": run}, window=(0.0, 250.0 * drawing.WIDE)), "core",
                  250.0 * drawing.WIDE)
    expected = [(start, end, 1) for start, end in spans] if parts == 2 else [(0, 2000 + pause, 1)]
    assert found == [pytest.approx(each, abs=3) for each in expected]


def test_runs_share_one_scale(run):
    short = EstimatedRun(run.played[:2], run.device)
    picture = draw_overlap({"one": run, "two": short})
    assert close(drawn(picture, "core", 8), [(0, 4, 1), (6, 8, 1), (0, 4, 1)])


def test_a_window_shows_its_part(run):
    picture = draw_overlap({"mine": run}, window=(3, 7))
    assert close(drawn(picture, "core", 4, 3), [(3, 4, 1), (6, 7, 1)])
    assert close(drawn(picture, "links", 4, 3), [(4, 6, 1)])
    with pytest.raises(ValueError, match="found 9 to 10 ms"):
        draw_overlap({"mine": run}, window=(9, 10))


def test_parts_are_drawn_when_they_are_sent(run):
    parts = [Part(8, 1, 1, 3), Part(8, 2, 3, 5), Part(8, 4, 5, 6)]
    picture = draw_sent_when_ready(run, parts)
    assert close(drawn(picture, "when ready", 8), [(1, 3, 1), (3, 5, 1), (5, 6, 1)])
    assert close(drawn(picture, "compiled", 8), [(2, 3, 1), (4, 6, 1)])
    assert "2.00 ms longer than the last of them takes to make" in picture.alt
