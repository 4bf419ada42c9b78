"""The drawing of a step's memory: the areas are the bytes, the marks are where they should be."""

import itertools
import re

import pytest

from meshbook.drawing import svg
from meshbook.drawing.memory_stacks import (
    COLOURS, LEFT, WIDE, columns_of, draw_memory, ticks,
)
from meshbook.hlo.memory_kinds import KINDS, StepMemory, kinds_over_time
from meshbook.planning.programs import recorded_program

EMPTY = {kind: [0] * 10 for kind in KINDS}
SMALL = StepMemory(EMPTY | {"parameters": [100] * 10,
                            "activations": [0, 100, 200, 300, 400, 300, 200, 100, 0, 0],
                            "logits and loss": [0] * 4 + [2] + [0] * 5}, 5, range(10))
FLAT = StepMemory(EMPTY | {"parameters": [100] * 10, "other": [50] * 10}, 2, range(10))


def areas(drawing):
    """[(fill, the heights of the roof, of the ground)] of a drawing, in the order of drawing."""
    found = re.findall(r'<path d="([^"]*)" fill="([^"]*)"', drawing.html)
    return [(fill, [float(y) for y in re.findall(r"V([\d.]+)h1", path)],
             [float(y) for y in re.findall(r"V([\d.]+)h-1", path)][::-1]) for path, fill in found]


def test_the_areas_are_the_bytes_of_each_kind_on_each_other():
    step = kinds_over_time(recorded_program("v2-8 (8, 1) 512 row=fully_sharded")[0])
    drawn = areas(draw_memory({"a step": step}, high=100))
    assert [fill for fill, *_ in drawn] == [
        COLOURS[kind] for kind in KINDS if any(step.kinds[kind])]
    columns = columns_of(step.total, step.busy, WIDE)
    scale = 100 / max(step.total)
    for (fill, roof, floor) in drawn:
        (kind,) = (kind for kind in KINDS if COLOURS[kind] == fill)
        for at, place in enumerate(columns):
            assert floor[at] - roof[at] == pytest.approx(scale * step.kinds[kind][place], abs=0.02)
    for (_, roof, _), (_, _, floor) in itertools.pairwise(drawn):
        assert roof == floor
    ground = drawn[0][2]
    assert ground[0] - min(drawn[-1][1]) == pytest.approx(100, abs=0.02)


def test_all_panels_have_the_scale_of_the_highest():
    drawn = areas(draw_memory({"one": FLAT, "other": SMALL}, high=100))
    of_parameters = [floor[0] - roof[0] for fill, roof, floor in drawn
                     if fill == COLOURS["parameters"]]
    assert of_parameters == pytest.approx([100 * 100 / 502] * 2, abs=0.02)


def test_the_turn_and_the_peak_are_marked():
    drawing = draw_memory({"small": SMALL, "flat": FLAT})
    turns = re.findall(r'<line (?=[^>]*dasharray)[^>]*x1="([\d.]+)"', drawing.html)
    assert [float(x) for x in turns] == [LEFT + WIDE // 2, LEFT + WIDE * 2 // 10]
    assert re.findall(r">(peak [^<]*)<", drawing.html) == ["peak 502 B", "peak 150 B"]
    for words in ("forward pass", "backward pass, update"):
        assert drawing.html.count(words) == 2


def test_the_key_has_what_can_be_seen():
    shown = re.findall(r"<text [^>]*>([a-z ]+)</text>", draw_memory({"small": SMALL}).html)
    assert "parameters" in shown and "activations" in shown
    assert "logits and loss" not in shown and "moments" not in shown
    alt = draw_memory({"small": SMALL}).alt
    assert "small, at most 502 B, of which parameters 100 B, activations 400 B" in alt


def test_colours_differ_and_text_reads_on_a_phone():
    assert len(set(COLOURS.values())) == len(KINDS) == len(COLOURS)
    drawing = draw_memory({"small": SMALL}).html
    assert float(re.search(r'viewBox="0 0 (\S+)', drawing)[1]) <= 400
    assert min(map(float, re.findall(r'font-size="([\d.]+)"', drawing))) >= 11
    assert set(re.findall(r'<text [^>]*fill="([^"]*)"', drawing)) == {"currentColor"}
    assert set(re.findall(r'fill="(#\w+)"', drawing)) <= {*svg.SERIES, *svg.KINDS}


@pytest.mark.parametrize("count", [3, 10, 25])
def test_a_column_shows_the_most_of_its_places(count):
    total = [5, 1, 7, 2, 9, 3, 4, 8, 6, 0]
    found = columns_of(total, range(10), count)
    assert len(found) == count and max(total[at] for at in found) == 9
    assert found == sorted(found)


@pytest.mark.parametrize("length", [0.003, 0.7, 1, 4.2, 19, 350, 98_765])
def test_the_axis_has_a_few_round_numbers(length):
    found = ticks(length)
    assert 3 <= len(found) <= 6 and found[0] == 0 and length / 2 < found[-1] <= length
    assert f"{found[1]:.6e}"[:8] in ("1.000000", "2.000000", "5.000000")
