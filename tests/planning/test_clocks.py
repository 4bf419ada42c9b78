"""A program's time for the record: the numbers of its run, and where there are none."""
import pytest

from meshbook.hlo.clock import cost
from meshbook.hlo.module import parse
from meshbook.planning.clocks import clocked, device_of, pairs_in_order
from meshbook.planning.programs import recorded_program
from meshbook.profiling.estimated_runs import estimated_run


def test_the_record_has_the_numbers_of_the_run():
    text, mesh = recorded_program("v5e-8 (8, 1) 1024")
    run, found = estimated_run(text, mesh, device_of("v5e-8")), clocked(text, mesh, "v5e-8")
    assert found["step"] == run.step and found["raw"] == run.raw
    assert 0 < found["exposed"] == run.exposed()[0] < run.step
    assert sum(found["bases"].values()) == pytest.approx(1)
    assert found["kinds"]["compute"] > found["kinds"]["collective"] > 0


@pytest.mark.parametrize("topology, name", [
    ("v2-8", "TPU v2"), ("v4:2x4x4", "TPU v4"), ("v5e:2x2", "TPU v5e"), ("v5p", "TPU v5p"),
    ("tpu7x:2x2x1", "TPU7x")])
def test_a_topology_is_of_chips_in_the_table(topology, name):
    assert device_of(topology).name == name


def test_a_topology_of_other_chips_is_refused():
    with pytest.raises(ValueError, match="among v2, v3, .*7x; found 'v9-8'"):
        device_of("v9-8")


def test_a_program_of_another_compiler_has_no_clock():
    text = "HloModule m\n\nENTRY %main (x: f32[8]) -> f32[8] {\n" \
           "  %x = f32[8]{0} parameter(0)\n  ROOT %y = f32[8]{0} add(%x, %x)\n}\n"
    assert clocked(text, None, "v5e-1") is None


def test_a_kernel_without_an_estimate_takes_no_less_than_its_products():
    """As libtpu's kernel of a ragged matmul, of which the rows and matrices are known."""
    program = parse("""HloModule m

ENTRY %main (r: bf16[4096,2048], w: bf16[8,2048,4096]) -> bf16[4096,4096] {
  %r = bf16[4096,2048]{1,0:T(8,128)(2,1)} parameter(0)
  %w = bf16[8,2048,4096]{2,1,0:T(8,128)(2,1)} parameter(1)
  ROOT %k = bf16[4096,4096]{1,0:T(8,128)(2,1)} custom-call(%r, %w), """
                    """custom_call_target="tpu_custom_call", """
                    """frontend_attributes={ragged_dot_tiling="128,2048,640"}
}
""")
    main, device = program.computations["main"], device_of("v5e-8")
    found = cost(program, main, main["k"], device)
    assert found.seconds == pytest.approx(2 * 4096 * 2048 * 4096 / device.flops)
    assert found.basis == "products" and found.estimate is None
    assert 0 < found.moved / device.bandwidth < found.seconds


def test_pairs_in_order_are_those_of_one_tpu_by_one_column():
    rows = [{"tpu": "a", "published ms": 1.0, "corrected ms": 1.2},
            {"tpu": "a", "published ms": 1.3, "corrected ms": 1.0},
            {"tpu": "a", "published ms": 4.0, "corrected ms": 3.0},
            {"tpu": "b", "published ms": 1.3, "corrected ms": 9.0}]
    between = lambda low, high, *columns: pairs_in_order(rows, *columns, low, high)
    assert between(1.1, 1.5, "published ms", "corrected ms") == (0, 1)
    assert between(1.1, 1.5, "corrected ms", "published ms") == (0, 1)
    assert between(1.5, 9, "published ms", "corrected ms") == (2, 2)
    assert between(1.0, 1.1, "published ms", "corrected ms") == (0, 0)
    assert pairs_in_order(iter(rows), "published ms", "corrected ms", 1.5, 9) == (2, 2)
