"""The table of a trace's operations: times added up, the longest by name, the rest together."""

import sys

import pytest

from meshbook.profiling.traces import Gap, Record, Trace

RECORDS = (Record(0, "dot.1", "compute", 0.0, 2.0, 4), Record(1, "dot.1", "compute", 0.5, 2.0, 4),
           Record(0, "all-reduce", "collective", 2.5, 1.0, 4),
           Record(1, "add", "compute", 3.0, 0.5, 4),
           Record(0, "dot.1", "compute", 5.0, 2.0, 5), Record(0, "copy", "copy", 9.0, 0.5, None))


def test_times_are_added_up_by_operation_kind_and_device():
    made = Trace(RECORDS)
    assert made.by_operation() == {"dot.1": 6.0, "all-reduce": 1.0, "add": 0.5, "copy": 0.5}
    assert made.by_kind() == {"compute": 6.5, "collective": 1.0, "copy": 0.5}
    assert made.by_device() == {0: 5.5, 1: 2.5}
    assert made.share("collective") == 1 / 8 and made.share("sleep") == 0
    assert made.spans() == {4: (0.0, 3.5), 5: (5.0, 7.0)}
    assert made.step_times() == {4: 3.5, 5: 2.0}
    assert made.gaps() == [Gap(0, 2.0, 0.5, 4), Gap(1, 2.5, 0.5, 4), Gap(0, 3.5, 1.5, 5)]
    assert made.only(step=4, device=1).records == (RECORDS[1], RECORDS[3])
    assert Trace([]).share("compute") == 0 and Trace([]).gaps() == []
    over = Trace([Record(0, "psum", "collective", 1.0, 1.0, 0), Record(0, "add", "compute", 6, 1, 1),
                  Record(0, "dot", "compute", 0.0, 5.0, 0)])  # a stream beside another one
    assert over.gaps() == [Gap(0, 5.0, 1.0, 1)] and over.spans()[0] == (0.0, 5.0)


def test_the_table_names_the_longest_and_adds_up_the_rest():
    made = Trace(RECORDS)
    assert repr(made.operations(1)).splitlines() == [
        "operation  kind       ms  share  count",
        "dot.1      compute  6.00  75.0%      3",
        "3 others            2.00  25.0%      3"]
    assert made.operations(1)._repr_markdown_().splitlines()[1:] == [
        "| :-- | :-- | --: | --: | --: |", "| dot.1 | compute | 6.00 | 75.0% | 3 |",
        "| 3 others |  | 2.00 | 25.0% | 3 |"]
    assert [each.operation for each in made.operations(3)] == ["dot.1", "all-reduce", "add", "copy"]
    assert sum(each.share for each in made.operations(2)) == pytest.approx(1)
    assert repr(made) == repr(made.operations()) and "copy" in made._repr_markdown_()


def test_a_pandas_table_on_request(monkeypatch):
    made = Trace(RECORDS)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="expected pandas, found none"):
        made.frame()
    monkeypatch.undo()
    frame = made.frame()
    assert list(frame.columns) == ["device", "operation", "kind", "start", "duration", "step"]
    assert [tuple(row) for row in frame.astype(object).where(frame.notna(), None).to_numpy()] == [
        tuple(each) for each in RECORDS]
    assert frame.groupby("step").size().to_dict() == {4: 4, 5: 1}
    assert str(frame.step.dtype) == "Int64"  # no 4.0, although one record has no step
    assert frame.groupby("operation").duration.sum().to_dict() == pytest.approx(made.by_operation())
    assert frame[frame.device == 1].duration.sum() == pytest.approx(made.by_device()[1])
    assert made.only(device=99).frame().empty


@pytest.mark.parametrize("count", [1, 10, 11, 12, 40])
def test_a_trace_prints_its_ten_longest_operations_and_the_others_as_one(count):
    """Eleven are all named: one other would be no shorter."""
    made = Trace(Record(0, f"dot.{n}", "compute", float(n), 1.0 + n, 0) for n in range(count))
    rows = repr(made).splitlines()[1:]
    named = count if count <= 11 else 10
    assert [row.split()[0] for row in rows[:named]] == [
        f"dot.{n}" for n in reversed(range(count - named, count))]
    assert len(rows) == named + (count > 11)
    assert count <= 11 or rows[-1].startswith(f"{count - 10} others")
    assert repr(made) == repr(made.operations(10))
    assert made._repr_markdown_() == made.operations(10)._repr_markdown_()
