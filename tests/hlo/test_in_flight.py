"""What runs while something is under way: read from schedules that are known by heart."""
import gzip
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from meshbook.hlo.in_flight import in_flight
from meshbook.sharding import make_mesh

PROGRAMS = Path(__file__).resolve().parents[1] / "support" / "programs"
SCHEDULE = """HloModule test, is_scheduled=true, num_partitions=2

%product (p.1: f32[4,4], p.2: f32[4,4]) -> f32[4,4] {
  %p.1 = f32[4,4] parameter(0)
  %p.2 = f32[4,4] parameter(1)
  ROOT %dot.1 = f32[4,4] dot(%p.1, %p.2), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: f32[4,4], w: f32[4,4]) -> f32[4,4] {
  %x = f32[4,4] parameter(0)
  %w = f32[4,4] parameter(1)
  %one-start = (f32[4,4], f32[4,4]) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
  %first = f32[4,4] dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %sum = f32[4,4] add(%x, %w)
  %second = f32[4,4] fusion(%sum, %w), kind=kOutput, calls=%product
  %one-done = f32[4,4] collective-permute-done(%one-start)
  %third = f32[4,4] dot(%one-done, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %all = f32[4,4] all-reduce(%third), channel_id=1, replica_groups={{0,1}}, \
use_global_device_ids=true, to_apply=%product
  %fourth = f32[4,4] dot(%all, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %end = f32[4,4] add(%fourth, %second)
}
"""


def test_matmuls_between_start_and_done_and_those_that_could_be():
    permute, reduce = in_flight(SCHEDULE)
    assert permute[:2] == ("one-start", "collective-permute")
    assert permute.matmuls == ("first", "second") == permute.could
    assert reduce.kind == "all-reduce" and reduce.matmuls == ()
    assert reduce.could == ("first", "second")  # not the third, which it needs; nor the fourth


def test_a_collective_that_is_done_at_once_has_nothing_beside_it():
    lines = SCHEDULE.splitlines(keepends=True)
    done = next(line for line in lines if "one-done =" in line)
    lines.remove(done)
    at = next(i for i, line in enumerate(lines) if "one-start =" in line)
    lines.insert(at + 1, done)
    permute, _ = in_flight("".join(lines))
    assert permute.matmuls == () and permute.could == ("first", "second")


def test_a_gather_that_fusions_carry_is_under_way_from_the_first_to_the_last():
    found = in_flight(gzip.open(PROGRAMS / "v5e-full.txt.gz", "rt").read())
    carried = [each for each in found if each.matmuls]
    assert carried and {each.kind for each in carried} == {"all-gather"}
    names = {each.operation: each.matmuls for each in carried}
    assert len(names["async-collective-start"]) == 4  # calls 258 to 263, without both ends
    assert len(names["async-collective-start.8"]) == 21  # calls 291 to 313
    assert {each.kind for each in found} >= {"all-gather", "all-reduce", "reduce-scatter"}


def test_a_loop_is_looked_into():
    mesh = make_mesh((8,), ("model",))

    def turn(x, _):
        other = jax.lax.ppermute(x, "model", [(i, (i + 1) % 8) for i in range(8)])
        return x @ x + other, None

    def run(x):
        return jax.lax.scan(turn, x, None, length=3)[0]

    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((32, 4)), P("model"))
        program = jax.jit(jax.shard_map(run, in_specs=P("model"), out_specs=P("model")))
        (found,) = in_flight(program.lower(x).compile())
    assert found.kind == "collective-permute" and found.matmuls == () and len(found.could) == 1
    assert found.computation != "main"


@pytest.mark.parametrize("name, count", [("cpu-data", 1), ("v5e-tensor", 13), ("v4-tensor", 13)])
def test_a_collective_without_a_start_hides_behind_nothing(name, count):
    found = in_flight(gzip.open(PROGRAMS / f"{name}.txt.gz", "rt").read())
    assert len(found) == count and not any(each.matmuls for each in found)
