"""Measures side by side: in each column the bars are in proportion to its values."""
from xml.etree import ElementTree

import pytest

from meshbook.drawing.measures import VALUE, WIDTH, draw_measures

ROWS = {"one": {"kB\nheld": 975.0, "MFLOP": 31.7, "sent": 0}, "two": {
    "kB\nheld": 379.0, "MFLOP": 41.2, "sent": 557}}


def test_bars_are_in_proportion_within_a_column():
    nodes = ElementTree.fromstring(draw_measures(ROWS, "Two.").html).iter()
    bars = {}
    for node in nodes:
        if node.get("data-measure"):
            bars.setdefault(node.get("data-measure"), []).append(float(node.get("width")))
    assert bars.keys() == {"kB held", "MFLOP", "sent"}
    longest = {max(column) for column in bars.values()}
    assert len(longest) == 1
    for measure, column in bars.items():
        values = [row.get(measure, row.get(measure.replace(" ", "\n"))) for row in ROWS.values()]
        assert column == pytest.approx([each / max(values) * max(column) for each in values],
                                       abs=0.01)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_columns_share_what_the_names_leave_of_the_width_evenly(count):
    titles = "abcdefgh"[:count]
    rows = {"one": dict.fromkeys(titles, 8), "another": dict.fromkeys(titles, 4)}
    drawn = draw_measures(rows, "Two.")
    bars = [node for node in ElementTree.fromstring(drawn.html).iter() if node.get("data-measure")]
    starts = [float(bar.get("x")) for bar in bars[::2]]
    pitch = (WIDTH - starts[0]) / count
    assert starts == pytest.approx([starts[0] + pitch * at for at in range(count)], abs=0.01)
    assert [float(bar.get("width")) for bar in bars[::2]] == pytest.approx(
        [pitch - VALUE - 8] * count, abs=0.01)


def test_it_is_told_with_its_numbers():
    assert draw_measures(ROWS, "Two.").alt == (
        "Two. one: kB held 975, MFLOP 31.7, sent 0; two: kB held 379, MFLOP 41.2, sent 557")


@pytest.mark.parametrize("rows", [{}, {"a": {"x": 1}, "b": {"y": 1}}, {"a": {"x": -1}}])
def test_rows_that_cannot_be_compared_are_refused(rows):
    with pytest.raises(ValueError, match="expected rows of the same measures"):
        draw_measures(rows, "None.")
