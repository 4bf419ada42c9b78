"""Hidden and exposed communication of recorded programs, and what could be hidden."""

import gzip
import pathlib

import pytest
from meshes import abstract_mesh

from meshbook.costs.devices import DEVICES
from meshbook.hlo import schedule
from meshbook.planning.programs import recorded_program
from meshbook.profiling import overlap
from meshbook.profiling.estimated_runs import EstimatedRun, estimated_run

PROGRAMS = pathlib.Path(__file__).parents[1] / "support" / "programs"
V5E = DEVICES["TPU v5e"]
MESHES = {"full": abstract_mesh(4, 2), "data": abstract_mesh(8, 1), "tensor": abstract_mesh(4, 2)}


def program(name):
    text = gzip.decompress((PROGRAMS / f"v5e-{name}.txt.gz").read_bytes()).decode()
    return text, MESHES[name]


def span(where, start, end):
    return schedule.Span(where, "collective" if where == schedule.LINKS else "compute", where,
                         start / 1e3, end / 1e3, "", None)


def test_hidden_is_what_lies_beside_work_or_copies():
    run = EstimatedRun([span(schedule.CORE, 0, 4), span(schedule.LINKS, 3, 8),
                        span(schedule.COPIES, 3.5, 5), span(schedule.CORE, 7, 9),
                        span(schedule.LINKS, 9, 10)], V5E)
    first, second = overlap.exchanges(run)
    assert (first.hidden, first.exposed) == pytest.approx((3, 2))
    assert (second.start, second.end, second.hidden, second.exposed) == pytest.approx((9, 10, 0, 1))


@pytest.mark.parametrize("name", MESHES)
def test_exposed_time_is_that_of_the_trace(name):
    run = estimated_run(*program(name), V5E)
    found = overlap.exchanges(run)
    assert sum(each.exposed for each in found) == pytest.approx(run.exposed()[0])
    assert sum(each.end - each.start for each in found) == pytest.approx(
        run.by_kind()["collective"])
    assert all(0 <= each.hidden <= each.end - each.start + 1e-9 for each in found)


def test_gradients_that_are_sent_when_ready_are_hidden_but_for_the_last():
    text, mesh = program("data")
    run = estimated_run(text, mesh, V5E)
    one = max(overlap.exchanges(run), key=lambda each: each.end - each.start)
    parts = overlap.sent_when_ready(run, text, mesh, one.operation)
    ready = [each.ready for each in parts]
    assert ready == sorted(ready) and 0 < ready[0] < ready[-1] <= one.start + 1e-9
    for before, after in zip(parts, parts[1:]):
        assert after.start == pytest.approx(max(after.ready, before.end))
        assert after.end > after.start
    assert all(each.start >= each.ready for each in parts)


def test_a_whole_loop_counts_for_what_depends_on_it():
    text, mesh = recorded_program("v5e-8 (8, 1) 256 model=MiniGPT")
    run = estimated_run(text, mesh, V5E)
    one, = overlap.exchanges(run)
    parts = overlap.sent_when_ready(run, text, mesh, one.operation)
    loops = [1e3 * each.end for each in run.work if "/while/" in each.op_name and
             "dot_general" in each.op_name]
    head = max(parts, key=lambda each: (each.bytes, -each.ready))
    assert head.ready == pytest.approx(max(loops), rel=0.01)  # the head's gradient, of all chunks


def test_only_a_collective_of_the_entry_has_parts():
    text, mesh = program("data")
    run = estimated_run(text, mesh, V5E)
    for name in ("nowhere", run.work[0].operation):
        with pytest.raises(ValueError, match=f"expected a collective .* found '{name}'"):
            overlap.sent_when_ready(run, text, mesh, name)


def test_what_depends_on_what_follows_the_dataflow():
    text = """HloModule m, is_scheduled=true
ENTRY %main (a: f32[8]) -> (f32[8], f32[8]) {
  %a = f32[8]{0} parameter(0)
  %b = f32[8]{0} negate(%a)
  %c = f32[8]{0} negate(%b)
  %d = f32[8]{0} negate(%a)
  ROOT %t = (f32[8]{0}, f32[8]{0}) tuple(%c, %d)
}
"""
    assert overlap.depends(text, "c", "b") and overlap.depends(text, "c", "a")
    assert not overlap.depends(text, "d", "b") and not overlap.depends(text, "b", "c")
    assert not overlap.depends(text, "c", "c")
    with pytest.raises(ValueError, match="found 'e'"):
        overlap.depends(text, "e", "a")
