"""Host and device in a loop: who waits for whom, and what is drawn of it."""
from xml.etree import ElementTree

import pytest

from meshbook.drawing.pacing import WIDE, Loop, busy, draw_pacing, times


def test_a_loss_read_at_once_makes_the_host_wait_for_the_device():
    found = times(Loop(2, 3, 0), 3)
    assert found["host"] == [(0, 2), (5, 7), (10, 12)]
    assert found["device"] == [(2, 5), (7, 10), (12, 15)]


def test_a_loss_read_late_lets_the_host_prepare_the_next_batch_meanwhile():
    found = times(Loop(2, 3, 1), 4)
    assert found["host"] == [(0, 2), (2, 4), (5, 7), (8, 10)]
    assert found["device"] == [(2, 5), (5, 8), (8, 11), (11, 14)]


def test_the_slower_of_the_two_sets_the_pace():
    assert busy(Loop(2, 3, 1)) == 1 and busy(Loop(2, 3, 0)) == pytest.approx(3 / 5)
    assert busy(Loop(10, 6, 1)) == pytest.approx(0.6)
    assert busy(Loop(10, 3, 1)) == pytest.approx(0.3)


@pytest.mark.parametrize("wrong", [(0, 1, 0), (1, 0, 0), (1, 1, -1)])
def test_a_loop_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match="expected times above 0"):
        times(Loop(*wrong), 3)


def test_what_is_drawn_is_what_was_computed_on_one_axis():
    loops = {"at once": Loop(2, 3, 0), "late": Loop(2, 3, 1)}
    drawn = draw_pacing(loops, 4)
    boxes = [node for node in ElementTree.fromstring(drawn.html).iter() if node.get("data-lane")]
    expected = [(lane, step, end - start) for loop in loops.values()
                for lane, spans in times(loop, 4).items()
                for step, (start, end) in enumerate(spans, 1)]
    found = [(node.get("data-lane"), int(node.get("data-step")),
              (float(node.get("width")) + 1) * 20 / WIDE) for node in boxes]
    assert [each[:2] for each in found] == [each[:2] for each in expected]
    assert [each[2] for each in found] == pytest.approx([each[2] for each in expected], abs=0.01)
    assert "at once: device busy 60%" in drawn.alt and "late: device busy 100%" in drawn.alt
