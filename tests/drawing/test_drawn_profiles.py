"""Drawings of profiles and of memory: what is drawn is what was read."""

import re

import jax
import jax.numpy as jnp
import pytest

from meshbook.drawing import profiles, svg
from meshbook.drawing.profiles import KINDS, ROLES, WIDE, draw_buffers, draw_gantt, draw_shares
from meshbook.hlo.liveness import live_bytes
from meshbook.profiling.traces import Record, Trace

RECORDS = [record for step in range(4) for record in (
    Record(0, "dot.1", "compute", 8.0 * step, 3.0, step),
    Record(1, "dot.1", "compute", 8.0 * step, 2.0, step),
    Record(0, "psum.2", "collective", 8.0 * step + 4.0, 2.0, step),
    Record(1, "psum.2", "collective", 8.0 * step + 3.0, 3.0, step),
    Record(1, "copy.3", "copy", 8.0 * step + 6.0, 1.0, step))]
RUN = Trace(RECORDS)


def runs(drawing):
    """{kind: [(x, y, width)]} of what the lanes show, in pixels from the lanes' left end."""
    found = {}
    for path, kind in re.findall(r'<path d="([^"]*)"[^>]* data-kind="([^"]*)"', drawing.html):
        found.setdefault(kind, []).extend(
            (float(x) - 62, float(y), int(wide))
            for x, y, wide in re.findall(r"M(\S+) (\S+?)h(\d+)v", path))
    return found


def test_the_lanes_show_every_operation_where_and_as_long_as_it_ran():
    drawn, scale = runs(draw_gantt(RUN, 1)), WIDE / 7.0
    above, below = sorted({y for lane in drawn.values() for _, y, _ in lane})
    expected = {"compute": [(above, 0, 3), (below, 0, 2)], "copy": [(below, 6, 1)],
                "collective": [(above, 4, 2), (below, 3, 3)]}
    assert {kind: [(y, pytest.approx(scale * start, abs=1), pytest.approx(scale * long, abs=1.1))
                   for y, start, long in lanes] for kind, lanes in expected.items()} == {
        kind: [(y, x, wide) for x, y, wide in lanes] for kind, lanes in drawn.items()}


@pytest.mark.parametrize("long, wide", [(0.25, 0), (0.5, 0), (0.75, 1), (1.0, 1), (1.75, 2)])
def test_a_pixel_that_is_idle_for_half_its_time_or_more_stays_blank(long, wide):
    """Over 400 pixels of 1 ms each."""
    ends = [Record(0, "a", "compute", at, 1.0, 0) for at in (0.0, WIDE - 1.0)]
    drawn = runs(draw_gantt(Trace([*ends, Record(0, "b", "copy", 8.0, long, 0)]), 1))
    assert [(x, width) for x, _, width in drawn["compute"]] == [(0, 1), (WIDE - 1, 1)]
    assert [(x, width) for x, _, width in drawn.get("copy", [])] == [(8, wide)] * (wide > 0)


def test_the_steps_are_from_the_middle_and_the_words_say_what_the_lanes_show():
    drawing = draw_gantt(RUN)
    assert "step 1" in drawing.html and "step 2" in drawing.html and "step 3" not in drawing.html
    assert drawing.alt.startswith("2 steps of a run, 15 ms, a lane for each of 2 devices")
    assert "device 0: compute 40%, collective 27%, copy 0%; device 1: compute 27%" in drawing.alt
    assert ">40%<" in drawing.html and svg.device_colour(1) in drawing.html
    for steps in (0, 5):
        with pytest.raises(ValueError, match=f"expected 1 to 4 steps.*found {steps}"):
            draw_gantt(RUN, steps)


def test_a_pixel_has_the_colour_of_what_took_most_of_it_and_a_gap_stays_blank():
    crowded = [Record(0, "a", kind, at + begin, long, 0) for at in range(700)
               for kind, begin, long in (("compute", 0.0, 0.6), ("collective", 0.6, 0.3))]
    drawn = runs(draw_gantt(Trace([*crowded, Record(0, "b", "copy", 1050.0, 350.0, 0)]), 1))
    assert drawn["compute"][0][0] == 0 and drawn["copy"] == [(300, drawn["copy"][0][1], 100)]
    blank = [x for lanes in drawn.values() for x, _, wide in lanes if 201 < x + wide and x < 299]
    assert not blank
    shown = {kind: sum(wide for _, _, wide in lanes) for kind, lanes in drawn.items()}
    assert shown["compute"] > shown.get("collective", 0) and sum(shown.values()) <= 301
    assert len(draw_gantt(Trace(crowded), 1).html) < 20_000  # however many operations ran


def test_two_operations_at_a_time_hide_nothing_of_the_rest_of_their_lane():
    lane = [Record(0, "a", "compute", 0.0, 7.0, 0), Record(0, "b", "collective", 8.0, 92.0, 0)]
    beside = Record(0, "c", "copy", 1.0, 2.0, 0)
    alone, both = (runs(draw_gantt(Trace(each), 1)) for each in (lane, [*lane, beside]))
    assert both == alone and set(alone) == {"compute", "collective"}


def test_shares_are_bars_by_length_in_the_colour_of_their_kind():
    drawing = draw_shares(RUN, 1)
    bars = re.findall(r'width="(\S+)" height="9" fill="(\S+)"[^>]* data-kind="(\w*)"', drawing.html)
    assert [bar[1:] for bar in bars] == [(KINDS["compute"], "compute"), (svg.SERIES[4], "")]
    assert float(bars[0][0]) / float(bars[1][0]) == pytest.approx(20 / 24, abs=1e-3)
    assert "dot.1 (compute) 45.5%; 2 others 54.5%" in drawing.alt
    assert "45.5%  ·  20.0 ms  ·  × 8" in drawing.html


def test_long_names_are_shortened_and_stay_beside_their_numbers():
    name = "broadcast_multiply_reduce_select_fusion_with_a_very_long_name.clone.12345"
    drawing = draw_shares(Trace([Record(0, name, "compute", 0.0, 1.0, 0)]))
    (shown,) = re.findall(r">(broadcast[^<]*)<", drawing.html)
    assert shown.endswith("…") and name.startswith(shown[:-1]) and len(shown) > 20
    assert svg.text_width(shown, 12) + svg.text_width("100.0%  ·  1.0 ms  ·  × 1") < WIDE + 62
    assert name in drawing.alt


A, B = jnp.ones((64, 64)), jnp.ones((2048, 64))


@pytest.fixture(scope="module")
def memory():
    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return x.sum()

    return live_bytes(jax.jit(jax.grad(loss)).lower([A] * 6, B).compile())


def test_the_areas_are_the_live_bytes_and_the_line_is_the_peak(memory):
    drawing = draw_buffers(memory)
    paths = re.findall(r'<path d="([^"]*)" fill="([^"]*)"', drawing.html)
    assert [fill for _, fill in paths] == list(ROLES.values())
    roofs = [[float(y) for y in re.findall(r"V([\d.]+)h1", path)] for path, _ in paths]
    assert all(len(roof) == WIDE for roof in roofs)
    ground = max(float(y) for y in re.findall(r"V([\d.]+)h-1", paths[0][0]))
    count, parts = len(memory.schedule), list(memory.by_role().values())
    for pixel in range(0, WIDE, 7):
        place = pixel * count // WIDE
        heights = [sum(part[place] for part in parts[: level + 1]) for level in range(3)]
        drawn = [(ground - roof[pixel]) / 150 * memory.peak for roof in roofs]
        assert drawn == pytest.approx(heights, abs=0.001 * memory.peak)
    (line,) = re.findall(r'<line [^>]*stroke-dasharray[^>]*>', drawing.html)
    x = float(re.search(r'x1="(\S+)"', line)[1]) - 62
    assert x == pytest.approx(WIDE * (memory.at + 0.5) / count, abs=0.01)
    assert min(roofs[-1]) == roofs[-1][int(x)] == pytest.approx(ground - 150, abs=0.02)


def test_the_largest_buffers_are_named_alike_ones_together(memory):
    drawing = draw_buffers(memory, top=2)
    live = [each for each in memory.largest() if each.shape.dims == B.shape]
    assert len(live) > 4 and f"{memory.peak / 1e6:.2f} MB" in drawing.alt
    assert len(re.findall(r"<text [^>]*>(?:\d+ × )?f32\[\d+,64\]<", drawing.html)) == 2
    groups = profiles._alike(memory.largest())
    assert sum(size for _, _, size in groups) == memory.peak
    assert [size for _, _, size in groups] == sorted((g[2] for g in groups), reverse=True)


@pytest.mark.parametrize("room, end, expected", [
    (200, True, "short"), (24, True, "shor…"), (24, False, "…hort")])
def test_a_text_is_shortened_to_its_room(room, end, expected):
    words = "short" if room == 200 else "shorter" if end else "veryshort"
    assert profiles._shortened(words, room * 1.5, 12, end) == expected


def test_colours_of_kinds_and_roles_differ_and_no_text_stands_on_them(memory):
    assert len(set(KINDS.values())) == len(KINDS) and len(set(ROLES.values())) == len(ROLES)
    assert not set(KINDS.values()) & set(svg.DEVICES)
    for drawing in (draw_gantt(RUN), draw_shares(RUN), draw_buffers(memory)):
        fills = set(re.findall(r'<text [^>]*fill="([^"]*)"', drawing.html))
        assert fills == {"currentColor"}
        assert float(re.search(r'viewBox="0 0 (\S+)', drawing.html)[1]) <= 520
