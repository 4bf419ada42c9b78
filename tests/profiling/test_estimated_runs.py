"""A compiled program's estimate as a trace: what it adds up to, and what of it is exposed."""

import gzip
import pathlib

import pytest
from meshes import abstract_mesh

from meshbook.costs.devices import DEVICES
from meshbook.drawing.profiles import draw_gantt, draw_shares
from meshbook.hlo import schedule
from meshbook.hlo.flops import work
from meshbook.profiling.estimated_runs import estimated_run
from meshbook.profiling.traces import Record, Trace

PROGRAMS = pathlib.Path(__file__).parents[1] / "support" / "programs"
V5E = DEVICES["TPU v5e"]


@pytest.fixture(scope="module")
def text():
    return gzip.decompress((PROGRAMS / "v5e-full.txt.gz").read_bytes()).decode()


@pytest.fixture(scope="module")
def run(text):
    return estimated_run(text, abstract_mesh(4, 2), V5E)


def test_exposed_is_where_nothing_else_runs():
    record = lambda device, kind, start, end: Record(device, kind, kind, start, end - start, 0)
    found = Trace([
        record(0, "compute", 0, 4), record(0, "collective", 3, 7), record(0, "copy", 6, 8),
        record(0, "collective", 9, 10), record(0, "collective", 9.5, 11),
        record(1, "collective", 2, 3), record(1, "compute", 2, 3)])
    assert found.exposed() == pytest.approx({0: 2 + 2, 1: 0})
    assert found.exposed("compute") == pytest.approx({0: 3, 1: 0})
    assert found.exposed("copy") == pytest.approx({0: 1, 1: 0})


def test_the_parts_of_a_step_add_up(run, text):
    core = [each for each in run.played if each.where == schedule.CORE]
    idle = run.step - 1e3 * sum(each.end - each.start for each in core)
    assert 0 < run.exposed()[0] <= idle * (1 + 1e-9) < run.step
    assert set(run.by_kind()) == {"compute", "collective", "copy"}
    assert run.only(step=0, device=0).records == run.records
    assert run.step == pytest.approx(max(each.end for each in run.records))
    assert run.utilisation(work(text)) == pytest.approx(
        work(text) / (run.step / 1e3) / V5E.flops)


def test_what_the_times_rest_on_is_told(run):
    parts = run.by_basis()
    assert sum(parts.values()) == pytest.approx(1) and parts.keys() <= {
        "estimate", "scaled", "memory"}
    none = {each.operation: each.cost.moved for each in run.work if each.cost.estimate is None}
    assert run.unestimated == none != {}
    assert run.raw == pytest.approx(1e3 * sum(each.cost.estimate or 0 for each in run.work))


def test_each_kind_of_exchange_has_its_own_time_and_waiting(run):
    found = run.by_exchange()
    busy = [each for each in run.played if each.where == schedule.LINKS]
    assert len(found) > 1 and found.keys() == {each.exchange for each in busy}
    for kind, (ms, exposed) in found.items():
        assert 0 <= exposed <= ms * (1 + 1e-9)
        assert ms == pytest.approx(1e3 * sum(
            each.end - each.start for each in busy if each.exchange == kind))
    waited = sum(exposed for _, exposed in found.values())
    assert waited == pytest.approx(run.exposed()[0])  # the links take one at a time


def test_operations_of_one_source_stand_together(run):
    rows = run.by_source()
    assert sum(row.ms for row in rows) == pytest.approx(sum(run.by_kind().values()))
    assert sum(row.count for row in rows) == len(run.records) > 2 * len(rows)
    names = {row.operation for row in rows}
    assert "jvp(BTF,FD->BTD)/dot_general" in names and not any("jit(step)" in x for x in names)


def test_links_that_are_lines_take_longer(run, text):
    line = estimated_run(text, abstract_mesh(4, 2), V5E, ring=False)
    assert line.step > run.step and line.raw == run.raw


def test_the_drawings_of_a_real_trace_are_those_of_an_estimate(run):
    assert "device 0" in draw_gantt(run, steps=1).html
    assert run.operations(1)[0].operation in draw_shares(run).html
