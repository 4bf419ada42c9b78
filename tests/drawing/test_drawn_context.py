"""Who looks at which block of keys: colours, steps, and what is pale."""
import re

import pytest

from meshbook.drawing import svg
from meshbook.drawing.context import draw_meetings

MEETINGS = [(0, 0, 0, 0), (1, 1, 1, 0), (1, 0, 1, 1), (0, 1, 0, 1)]


def test_a_block_has_its_devices_colour_and_is_pale_where_nothing_is_seen():
    drawn = draw_meetings({"a ring": MEETINGS}, 2, "Two devices")._repr_html_()
    cells = re.findall(r'fill="(#\w+)"[^>]*data-device="(\d)" data-step="(\d)"([^>]*)', drawn)
    assert [(int(device), int(step)) for _, device, step, _ in cells] == [
        (device, step) for _, _, device, step in MEETINGS]
    assert all(colour == svg.device_colour(int(device)) for colour, device, *_ in cells)
    assert ["opacity" in rest for *_, rest in cells] == [False, False, False, True]
    inks = [ink for ink, word in re.findall(r'<text [^>]*fill="([^"]*)"[^>]*>([^<]*)<', drawn)
            if word.isdigit()]  # of the page where the cell lets it through
    assert inks == [svg.ink(colour) if "opacity" not in rest else "currentColor"
                    for colour, *_, rest in cells]


def test_each_panel_has_words():
    drawn = draw_meetings({"one": MEETINGS, "other": MEETINGS[:2]}, 2, "Two devices")
    assert drawn.alt == "one. Two devices; other. Two devices"


@pytest.mark.parametrize("wrong", [MEETINGS + MEETINGS[:1], [(0, 2, 0, 0)]])
def test_a_block_that_is_met_twice_or_is_none_is_refused(wrong):
    with pytest.raises(ValueError, match="each of 2 x 2 blocks at most once"):
        draw_meetings({"a ring": wrong}, 2, "Two devices")
