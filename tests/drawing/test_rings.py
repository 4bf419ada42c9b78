"""A drawn ring has the pieces where they are multiplied, and lines along which they travel."""
import re

import pytest

from meshbook.drawing.rings import draw_ring

RING = [[(0,), (1,), (2,)], [(2,), (0,), (1,)], [(1,), (2,), (0,)]]


def test_every_piece_stands_in_its_step_and_row():
    drawn = draw_ring({"a ring": RING}, "three devices").html
    found = re.findall(r'data-place="(\d),(\d)" data-piece="(\d)"', drawn)
    assert found == [(str(at), str(device), str(pieces[0])) for at, step in enumerate(RING)
                     for device, pieces in enumerate(step)]


def test_a_line_leads_from_the_neighbour_that_had_the_piece():
    drawn = draw_ring({"a ring": RING}, "three devices").html
    moves = re.findall(r'data-from="(\d)" data-to="(\d)"', drawn)
    assert moves == [("2", "0"), ("0", "1"), ("1", "2")] * 2


def test_pieces_from_both_neighbours_share_a_cell():
    both = [[(0,), (1,), (2,)], [(2, 1), (0, 2), (1, 0)]]
    drawn = draw_ring({"both": both}, "three devices").html
    assert set(re.findall(r'data-from="(\d)" data-to="(\d)"', drawn)) == {
        (str(one), str(other)) for one in range(3) for other in range(3) if one != other}


def test_a_step_of_other_devices_is_refused():
    with pytest.raises(ValueError, match="a ring, step 1: expected what each of 3 devices"):
        draw_ring({"a ring": [RING[0], RING[1][:2]]}, "three devices")
