"""Pictures of processes, of their rows, and of steps beside saves."""
import pytest

from meshbook.drawing.hosts import draw_beside, draw_processes, draw_shares


def test_every_device_of_every_process_is_drawn_once():
    html = draw_processes([2, 2, 4]).html
    assert [html.count(f'data-device="{device}"') for device in range(9)] == [1] * 8 + [0]
    assert "process 2" in html and "process 3" not in html


@pytest.mark.parametrize("counts", [[], [2, 0]])
def test_no_process_and_no_device_are_refused(counts):
    with pytest.raises(ValueError, match="at least one process with at least one device each"):
        draw_processes(counts)


def test_rows_are_filled_where_they_were_loaded():
    picture = draw_shares({"process 0": [0, 1], "process 1": [2, 3]}, 4)
    assert picture.html.count('data-loaded="True"') == 4
    assert picture.html.count('data-loaded="False"') == 4
    assert "process 1: 2, 3" in picture.alt


def test_steps_within_a_save_are_counted():
    picture = draw_beside([1.0, 2.0, 3.0, 4.0], [(1.5, 3.5)])
    assert "2 steps end while" in picture.alt and picture.html.count("data-step") == 4
    assert picture.html.count("data-save") == 1
