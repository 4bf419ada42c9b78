"""Operations of a step with their times, FLOPs and bytes: complete, and each at its own name."""

import gzip
import pathlib

import pytest
from meshes import abstract_mesh

from meshbook.costs.devices import DEVICES
from meshbook.hlo import flops, memory, module
from meshbook.planning.programs import recorded_program
from meshbook.profiling.estimated_runs import estimated_run
from meshbook.profiling.op_stats import op_stats

PROGRAMS = pathlib.Path(__file__).parents[1] / "support" / "programs"
V5E = DEVICES["TPU v5e"]


def program(name, *shape):
    text = gzip.decompress((PROGRAMS / f"v5e-{name}.txt.gz").read_bytes()).decode()
    return text, abstract_mesh(*shape)


SAVED = {"data": lambda: program("data", 8, 1), "full": lambda: program("full", 4, 2),
         "loops": lambda: recorded_program("v5e-8 (8, 1) 256 model=MiniGPT")}


@pytest.mark.parametrize("name", SAVED)
def test_the_parts_add_up_to_the_step(name):
    text, mesh = SAVED[name]()
    run = estimated_run(text, mesh, V5E)
    found = op_stats(run, text, lambda span: span.op_name.rpartition("/")[2])
    assert sum(each.flops for each in found) == flops.work(text)
    assert sum(each.ms for each in found) + found.waiting == pytest.approx(run.step)
    assert 0 <= found.waiting < run.step == found.step
    assert sum(each.count for each in found) == len(run.work)
    assert [each.ms for each in found] == sorted((each.ms for each in found), reverse=True)


def test_one_operation_has_its_own_flops_and_bytes():
    text, mesh = program("data", 8, 1)
    run, parsed = estimated_run(text, mesh, V5E), module.parse(text)
    entry = parsed.computations[parsed.entry]
    found = {each.name: each for each in op_stats(run, text, lambda span: span.operation)}
    assert len(found) == len({each.operation for each in run.work})
    for each in found.values():
        if each.name in entry.instructions:
            assert each.bytes == memory.moved(parsed, entry, entry[each.name])
        assert each.at_peak == pytest.approx(1e3 * each.flops / V5E.flops)
        assert each.ms >= 0.999 * each.at_peak
        assert each.intensity == pytest.approx(each.flops / each.bytes if each.bytes else 0)
        assert each.bound == ("compute" if each.intensity > V5E.flops / V5E.bandwidth
                              else "memory")
    assert any(each.flops for each in found.values())
    assert any(not each.flops for each in found.values())


def test_it_prints_as_a_table_with_the_waiting_last():
    text, mesh = program("data", 8, 1)
    found = op_stats(estimated_run(text, mesh, V5E), text, lambda span: span.kind)
    lines = repr(found).splitlines()
    assert lines[0].split()[:3] == ["operations", "ms", "share"]
    assert lines[1].startswith("compute") and lines[-1].startswith("waiting")
    assert f"{found.waiting / found.step:.1%}" in lines[-1]
    assert found._repr_markdown_().count("|\n") == len(found) + 2


def test_the_run_of_another_program_is_refused():
    text, mesh = program("full", 4, 2)
    other, _ = program("data", 8, 1)
    with pytest.raises(ValueError, match="expected the program of the run; found one without %"):
        op_stats(estimated_run(text, mesh, V5E), other, lambda span: span.kind)


def test_each_matmul_is_found_where_it_is():
    text, _ = program("data", 8, 1)
    parsed = module.parse(text)
    found = flops.by_instruction(text)
    assert sum(found.values()) == flops.work(text)  # without loops each runs once
    for (computation, name), done in found.items():
        assert done > 0 and name in parsed.computations[computation].instructions
