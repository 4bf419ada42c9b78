"""Memory traffic, against counting by hand and against XLA's own count."""

import gzip
import pathlib

import jax
import jax.numpy as jnp
import pytest

from meshbook.hlo.memory import memory_traffic

PROGRAMS = pathlib.Path(__file__).parents[1] / "support" / "programs"
M, K, N = 64, 128, 256


def compiled(function, *shapes):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(function).lower(*arguments).compile()


def test_a_product_reads_two_arrays_and_writes_one():
    program = compiled(jnp.matmul, (M, K), (K, N))
    assert memory_traffic(program) == 4 * (M * K + K * N + M * N)


def test_what_is_fused_is_read_and_written_once():
    program = compiled(lambda x_MK: jnp.sin(x_MK) * 2 + jnp.exp(x_MK), (M, K))
    assert memory_traffic(program) == 4 * 2 * M * K


def test_of_an_array_that_is_sliced_the_slice_counts():
    program = compiled(lambda x_MK: jnp.sin(x_MK[3:5]), (M, K))
    assert memory_traffic(program) == 4 * 2 * 2 * K


def test_a_slice_in_a_fusion_in_a_fusion_counts_as_one():
    """As a TPU's compiler writes a product with one of many matrices."""
    program = """HloModule nested

%slice (p: f32[9,8,8], i: s32[]) -> f32[8,8] {
  %p = f32[9,8,8]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %one = f32[1,8,8]{2,1,0} dynamic-slice(%p, %i, %zero, %zero), dynamic_slice_sizes={1,8,8}
  ROOT %b = f32[8,8]{1,0} bitcast(%one)
}

%product (q: f32[8,8], r: f32[9,8,8], j: s32[]) -> f32[8,8] {
  %q = f32[8,8]{1,0} parameter(0)
  %r = f32[9,8,8]{2,1,0} parameter(1)
  %j = s32[] parameter(2)
  %f = f32[8,8]{1,0} fusion(%r, %j), kind=kLoop, calls=%slice
  ROOT %d = f32[8,8]{1,0} dot(%q, %f), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: f32[8,8], ws: f32[9,8,8], n: s32[]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  %ws = f32[9,8,8]{2,1,0} parameter(1)
  %n = s32[] parameter(2)
  ROOT %y = f32[8,8]{1,0} fusion(%x, %ws, %n), kind=kOutput, calls=%product
}
"""
    assert memory_traffic(program) == 3 * 4 * 8 * 8 + 4
    whole = program.replace("dot(%q, %f)", "dot(%q, %f), metadata={op_name=\"x\"}").replace(
        "%one = f32[1,8,8]{2,1,0} dynamic-slice(%p, %i, %zero, %zero), dynamic_slice_sizes={1,8,8}",
        "%one = f32[1,8,8]{2,1,0} custom-call(%p, %i)")
    assert memory_traffic(whole) == (2 + 9) * 4 * 8 * 8 + 4


def loop(turns):
    def run(x_TMK, w_KN):
        return jax.lax.scan(lambda carry, x_MK: (carry, x_MK @ w_KN), 0, x_TMK)[1]

    return compiled(run, (turns, M, K), (K, N))


def test_a_loop_counts_every_turn_and_of_its_stacks_a_slice():
    eight, sixteen = memory_traffic(loop(8)), memory_traffic(loop(16))
    product = 4 * (M * K + K * N + M * N)
    copies = 2 * 4 * M * K + 2 * 4 * M * N  # a slice out of one stack, a result into another
    zeros = 4 * M * N  # which the other stack is filled with first
    turn = (sixteen - eight) / 8
    assert product <= turn <= product + copies + zeros + 100  # and the loop's counter


def test_xla_counts_a_loop_once_and_this_does_not():
    program = loop(16)
    assert memory_traffic(program) > 5 * program.cost_analysis()["bytes accessed"]


@pytest.mark.parametrize("depth", (1, 3))
def test_without_loops_it_is_what_xla_says(depth):
    def loss(weights, x_MK):
        for w_KK in weights:
            x_MK = jax.nn.relu(x_MK @ w_KK)
        return (x_MK**2).sum()

    arguments = [jax.ShapeDtypeStruct((K, K), jnp.float32)] * depth, jax.ShapeDtypeStruct(
        (M, K), jnp.float32)
    program = jax.jit(jax.grad(loss)).lower(*arguments).compile()
    assert memory_traffic(program) == pytest.approx(
        program.cost_analysis()["bytes accessed"], rel=0.05)


@pytest.mark.parametrize("path", sorted(PROGRAMS.glob("*.gz")), ids=lambda path: path.name)
def test_every_compilers_text_is_read(path):
    """At least all weights' gradients are written, and all weights read twice."""
    weights = 4 * 3 * (4 * 256 * 256 + 2 * 256 * 1024)
    assert memory_traffic(gzip.open(path, "rt").read()) > 3 * weights / 8


def test_an_update_is_seen_behind_a_bitcast():
    program = """HloModule updated

%update (p: f32[9,64], one: f32[1,64], i: s32[]) -> f32[9,8,8] {
  %p = f32[9,64]{1,0} parameter(0)
  %one = f32[1,64]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  %new = f32[9,64]{1,0} dynamic-update-slice(%p, %one, %i, %zero)
  ROOT %b = f32[9,8,8]{2,1,0} bitcast(%new)
}

ENTRY %main (p: f32[9,64], one: f32[1,64], i: s32[]) -> f32[9,8,8] {
  %p = f32[9,64]{1,0} parameter(0)
  %one = f32[1,64]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %f = f32[9,8,8]{2,1,0} fusion(%p, %one, %i), kind=kLoop, calls=%update
}
"""
    assert memory_traffic(program) == 4 * (64 + 64 + 1)  # of one row: read, written; and where
