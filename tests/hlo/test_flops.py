"""No matmul hides from `work`: what it counts, by hand, and what it refuses."""

import functools
import gzip
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshbook.hlo import opcodes
from meshbook.hlo.execution import UnknownTripCount
from meshbook.hlo.flops import work

HERE = pathlib.Path(__file__).parents[1] / "support" / "programs"
HEADER = "HloModule test\n\n"
SCALAR = "to_apply=%add"


def saved(name):
    return gzip.open(HERE / f"{name}.txt.gz", "rt").read()


def shapes(*dims, dtype=jnp.float32):
    return [jax.ShapeDtypeStruct(each, dtype) for each in dims]


def compiled(f, *arguments):
    return jax.jit(f).lower(*arguments).compile()


def text(*lines, computations=""):
    """A program of these lines, with parameters %a f32[8,4], %b f32[4,6] and %v f32[4]."""
    given = ("%a = f32[8,4]{1,0} parameter(0)", "%b = f32[4,6]{1,0} parameter(1)",
             "%v = f32[4]{0} parameter(2)")
    body = "".join(f"  {line}\n" for line in (*given, *lines))
    return f"{HEADER}{computations}ENTRY %main (a: f32[8,4]) -> f32[] {{\n{body}}}\n"


def named(path):
    return f'metadata={{op_name="jit(f)/{path}" stack_frame_id=1}}'


MATMULS = [  # with vectors, with extents of 1, batched: XLA writes these in its own ways
    ("i,i->", (100,), (100,)), ("i,ij->j", (100,), (100, 70)), ("ji,i->j", (70, 100), (100,)),
    ("i,j->ij", (70,), (100,)), ("bi,bi->b", (9, 100), (9, 100)),
    ("bij,bj->bi", (9, 30, 40), (9, 40)), ("bi,bj->bij", (9, 30), (9, 40)),
    ("bti,ij->btj", (9, 30, 40), (40, 50)), ("bti,ij->btj", (1, 1, 40), (40, 50)),
    ("bti,ij->btj", (9, 30, 1), (1, 50)), ("bti,ij->btj", (9, 30, 40), (40, 1)),
    ("bhti,bhsi->bhts", (1, 3, 1, 8), (1, 3, 16, 8)),
]


@pytest.mark.parametrize("equation,left,right", MATMULS)
def test_a_matmul_and_its_gradients_count_alike_however_xla_writes_them(equation, left, right):
    f = functools.partial(jnp.einsum, equation)
    letters = dict(zip("".join(equation.split("->")[0].split(",")), left + right))
    each = 2 * math.prod(letters.values())
    arguments = shapes(left, right)
    back = jax.eval_shape(f, *arguments)
    assert work(compiled(f, *arguments)) == each
    assert work(compiled(lambda x, y, z: jax.vjp(f, x, y)[1](z), *arguments, back)) == 2 * each


def test_a_sum_of_products_counts_once_with_whatever_op_name_is_left():
    for multiply, reduce in (("dot_general", "dot_general"), ("", "dot_general"),
                             ("", "transpose")):
        assert work(text(
            f"%w = f32[8,4]{{1,0}} broadcast(%v), dimensions={{1}}, {named('dot_general')}",
            f"%m = f32[8,4]{{1,0}} multiply(%a, %w), {named(multiply) if multiply else ''}",
            f"ROOT %r = f32[8]{{0}} reduce(%m, %zero), dimensions={{1}}, {SCALAR}, {named(reduce)}",
        )) == 2 * 8 * 4
    assert work(text(  # by stages, with moves between
        f"%m = f32[8,4]{{1,0}} multiply(%a, %a)",
        f"%s = f32[8,2]{{1,0}} reduce(%m, %zero), dimensions={{1}}, {SCALAR}",
        f"%c = bf16[8,2]{{1,0}} convert(%s)",
        f"ROOT %r = f32[8]{{0}} reduce(%c, %zero), dimensions={{1}}, {SCALAR}, "
        f"{named('dot_general')}")) == 2 * 8 * 4
    assert work(text(  # a product and a sum of the Python program
        f"%m = f32[8,4]{{1,0}} multiply(%a, %a), {named('mul')}",
        f"ROOT %r = f32[8]{{0}} reduce(%m, %zero), dimensions={{1}}, {SCALAR}, "
        f"{named('reduce_sum')}")) == 0
    assert work(text(  # where a shard begins
        f"%p = u32[1]{{0}} constant({{3}})",
        f"ROOT %m = u32[1]{{0}} multiply(%p, %p), {named('dot_general')}",
        f"%d = f32[8,6]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}}, {named('dot_general')}",
    )) == 2 * 8 * 6 * 4


def test_zeros_that_are_folded_into_padding_count_as_in_the_matmul():
    """The head reads one token of 65, so 64 rows of the gradient are 0, and v5e pads with them.

    Two matmuls forward, three backward: the input has no gradient.
    """
    program = saved("v5e-first-token")
    assert "window={size=1 pad=0_64}" in program
    assert work(program) == 5 * 2 * 128 * 65 * 256 * 1024
    padded = "ROOT %c = f32[9,65,7] convolution(%x, %k), window={size=1 pad=0_64}, dim_labels=%s, "
    given = "%x = f32[9,1,5] parameter(3)", "%k = f32[5,7,1] parameter(4)"
    line = padded.replace("%s", "b0f_io0->b0f")
    assert work(text(*given, line + named("dot_general"))) == 2 * 9 * 65 * 5 * 7
    assert work(text(*given, line + named("conv_general_dilated"))) == 2 * 9 * 5 * 7
    window = line.replace("size=1 pad=0_64", "size=3 pad=1_65")
    wide = given[0], "%k = f32[5,7,3] parameter(4)"  # no extent of a matmul
    assert work(text(*wide, window + named("dot_general"))) == 2 * 9 * 2 * 5 * 7


def test_a_convolution_counts_the_elements_that_its_window_meets():
    f = functools.partial(jax.lax.conv, window_strides=(1, 1), padding="SAME")
    for image, kernel in (((2, 3, 8, 8), (4, 3, 3, 3)), ((1, 1, 8, 8), (1, 1, 8, 8)),
                          ((1, 1, 2, 2), (1, 1, 3, 3)), ((2, 3, 1, 1), (4, 3, 3, 3))):
        program = compiled(f, *shapes(image, kernel))  # CPU turns some, and their op_name is lost
        assert work(program) == program.cost_analysis()["flops"]


ROWS = ("rhs_contracting_dims={1}, lhs_ragged_dims={0}, rhs_group_dims={0}", "[8,4]", "[3,4,6]",
        "[8,6]", "lhs_contracting_dims={1}")
SUM = ("rhs_contracting_dims={0}, lhs_ragged_dims={0}", "[8,4]", "[8,6]", "[3,4,6]",
       "lhs_contracting_dims={0}")
BATCH = ("rhs_contracting_dims={1}, rhs_batch_dims={0}, lhs_ragged_dims={0}, lhs_batch_dims={0}",
         "[5,8,4]", "[5,4,6]", "[5,8,6]", "lhs_contracting_dims={2}")


def ragged(dims, left, right, result, summed):
    return text(f"%x = f32{left} parameter(3)", f"%w = f32{right} parameter(4)",
                "%g = s32[3] parameter(5)", f"ROOT %r = f32{result} ragged-dot(%x, %w, %g), "
                f"{summed}, {dims}")


@pytest.mark.parametrize("case,flops", [
    (ROWS, 2 * 8 * 4 * 6), (SUM, 2 * 8 * 4 * 6), (BATCH, 2 * 5 * 8 * 4 * 6)])
def test_each_element_of_a_ragged_matmul_meets_one_group(case, flops):
    assert work(ragged(*case)) == flops


@pytest.mark.parametrize("was,now", [
    ("lhs_ragged_dims={0}", "lhs_ragged_dims={0,1}"), ("lhs_ragged_dims={0}, ", ""),
    ("rhs_group_dims={0}", "rhs_group_dims={}")])
def test_a_ragged_matmul_that_cannot_be_derived_is_refused(was, now):
    program = ragged(*ROWS)
    assert was in program
    with pytest.raises(ValueError, match="cannot count the ragged-dot %r in %main"):
        work(program.replace(was, now))


def test_ragged_matmuls_on_two_backends():
    """CPU multiplies rows by all G; v5e does so only for the gradient of the matrices."""
    each = 2 * 512 * 256 * 1024
    assert work(saved("v5e-ragged")) == (1 + 1 + 4) * each
    rows = shapes((512, 256), (4, 256, 1024)) + shapes((4,), dtype=jnp.int32)
    assert work(compiled(jax.lax.ragged_dot, *rows)) == 4 * each


def test_scaled_matmuls_count_as_matmuls():
    assert work(text("%s = f8e8m0fnu[8,1] parameter(3)", "%t = f8e8m0fnu[1,6] parameter(4)",
                     "ROOT %d = f32[8,6]{1,0} scaled-dot(%a, %b, %s, %t), "
                     "lhs_contracting_dims={1}, rhs_contracting_dims={0}")) == 2 * 8 * 6 * 4


D = 16
ONE = 2 * D**3


def routed(p, x):
    with jax.named_scope("router"):
        return jax.lax.cond(p[0] > 0, lambda x: jnp.tanh(x @ x) @ x, lambda x: x @ x, x)


def chosen(i, x):
    with jax.named_scope("expert"):
        branches = [lambda x: x, lambda x: x @ x, lambda x: jnp.tanh(x @ x) @ x]
        return jax.lax.switch(i, branches, x)


def looped(p, x):
    return jax.lax.scan(lambda x, _: (chosen(p[0].astype(int), routed(p, x)), None), x, length=5)[0]


PX = shapes((1,), (D, D))


def test_conditionals_count_by_their_shares():
    program = compiled(routed, *PX)
    assert work(program) == 2 * ONE
    assert work(program, taken={"router": (0.75, 0.25)}) == 1.25 * ONE  # (false, true)
    assert work(program, taken={"router": (1, 0)}) == ONE
    name = re.search(r"%(\S+) = \S+ conditional\(", program.as_text())[1]
    assert work(program, taken={name: (0, 1)}) == 2 * ONE
    gradient = compiled(jax.grad(lambda x, p: routed(p, x).sum()), *PX[::-1])
    assert work(gradient, taken={"router": (0, 1)}) > work(gradient, taken={"router": (1, 0)}) > 0


def test_shares_work_in_loops_and_for_each_of_several_conditionals():
    program = compiled(looped, *PX)
    assert work(program) == 5 * (2 + 2) * ONE
    taken = {"router": (0.5, 0.5), "expert": (0.25, 0.25, 0.5)}
    assert work(program, taken=taken) == 5 * (1.5 + 1.25) * ONE
    assert work(program, taken={"expert": (1, 0, 0)}) == 5 * 2 * ONE


def test_true_and_false_branches_are_in_the_same_order():
    computations = "".join(
        f"%{name} (q: f32[8,4]) -> f32[8,4] {{\n  %q = f32[8,4] parameter(0)\n{line}}}\n\n"
        for name, line in (("yes", "  %k = f32[4,4] constant({...})\n  ROOT %d = f32[8,4] dot(%q, "
                                   "%k), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"),
                           ("no", "")))
    program = text("%p = pred[] parameter(3)", "ROOT %c = f32[8,4] conditional(%p, %a, %a), "
                   "true_computation=%yes, false_computation=%no", computations=computations)
    assert work(program, taken={"c": (0.75, 0.25)}) == 0.25 * 2 * 8 * 4 * 4


def test_a_loop_that_data_ends_may_hold_a_matmul_that_is_never_taken():
    program = compiled(lambda p, x: jax.lax.while_loop(
        lambda x: x.sum() < 9, lambda x: jax.lax.cond(p[0] > 0, lambda x: x @ x, jnp.sin, x), x),
        *PX)
    assert work(program, taken={"cond": (1, 0)}) == 0
    with pytest.raises(UnknownTripCount):
        work(program)


@pytest.mark.parametrize("taken,message", [
    ({"rooter": (0.5, 0.5)}, r"'rooter'.*the program has %\S+ \(jit\(looped\).*router/cond\), 2"),
    ({"": (0.5, 0.5)}, "expected keys that name a conditional; found ''"),
    ({"router": (0.5, 0.25, 0.25)}, "expected 2 shares.*3 branches"),
    ({"router": (0.5, 0.6)}, "sum to 1.1"), ({"router": (-0.5, 1.5)}, "from 0 to 1"),
    ({"router": (1, 0), "router/cond": (1, 0)}, "another one.*'router/cond'"),
])
def test_shares_that_do_not_fit_are_refused(taken, message):
    with pytest.raises(ValueError, match=message):
        work(compiled(looped, *PX), taken=taken)


def test_shares_of_a_program_without_conditionals_are_refused():
    with pytest.raises(ValueError, match="the program has no conditional"):
        work(compiled(jnp.dot, *shapes((D, D), (D, D))), taken={"router": (0.5, 0.5)})


@pytest.mark.parametrize("opcode", ["block-dot", "dot-start", "scan"])
def test_an_opcode_that_is_not_known_is_refused(opcode):
    assert not opcodes.plain(opcode) and not opcodes.walked(opcode)
    with pytest.raises(ValueError, match=f"opcode {opcode} of %r in %main"):
        work(text(f"ROOT %r = f32[8,6] {opcode}(%a, %b)"))


@pytest.mark.parametrize("target", [
    "tpu_custom_call", "__cudnn$fmhaSoftmax", "__onednn$convolution", "__triton", "my_kernel",
    "TopKMatmul", ""])
def test_a_custom_call_that_is_not_known_is_refused(target):
    with pytest.raises(ValueError, match=f"custom call %r in %main.*'{re.escape(target)}'"):
        work(text(f'ROOT %r = f32[8,6] custom-call(%a, %b), custom_call_target="{target}"'))


def test_solvers_sorting_random_bits_and_callbacks_are_no_matmuls():
    def f(x):
        x = jnp.sort(x) + jax.random.normal(jax.random.key(0), x.shape) + jax.lax.top_k(x, D)[0]
        x = jnp.linalg.inv(x) + jnp.linalg.cholesky(x) + jnp.fft.fft(x).real
        return jax.pure_callback(np.sin, x, x) + jnp.cumsum(jax.scipy.special.erf(x), 0)

    assert work(compiled(f, *shapes((D, D)))) == 0


def test_an_asynchronous_call_is_walked_where_it_starts():
    inner = ("%inner (p: f32[8,4], q: f32[4,6]) -> f32[8,6] {\n  %p = f32[8,4] parameter(0)\n"
             "  %q = f32[4,6] parameter(1)\n  ROOT %d = f32[8,6] dot(%p, %q), "
             "lhs_contracting_dims={1}, rhs_contracting_dims={0}\n}\n\n")
    for start, done in (("async-start", "async-done"), ("call-start", "call-done")):
        assert work(text(
            f"%s = ((f32[8,4], f32[4,6]), f32[8,6], u32[]) {start}(%a, %b), calls=%inner",
            f"%u = ((f32[8,4], f32[4,6]), f32[8,6], u32[]) async-update(%s), calls=%inner",
            f"ROOT %r = f32[8,6] {done}(%u), calls=%inner", computations=inner)) == 2 * 8 * 6 * 4


@pytest.mark.parametrize("path", ["dot_general", "conv_general_dilated"])
def test_what_is_left_of_a_matmul_of_which_nothing_was_counted_is_refused(path):
    with pytest.raises(ValueError, match=f"counted nothing for .*{path}, of which %r in %main"):
        work(text(f"ROOT %r = f32[8,4]{{1,0}} add(%a, %a), {named(path)}"))
    hidden = ("%inner (p: f32[8,4]) -> f32[8] {\n  %p = f32[8,4] parameter(0)\n"
              f"  ROOT %s = f32[8] reduce(%p, %p), dimensions={{1}}, {SCALAR}\n}}\n\n")
    with pytest.raises(ValueError, match=f"{path}, of which %r .*found fusion"):
        work(text(f"ROOT %r = f32[8] fusion(%a), kind=kLoop, calls=%inner, {named(path)}",
                  computations=hidden))


def test_what_only_moves_elements_may_bear_a_matmuls_name():
    assert work(text(f"%c = f32[8,4]{{0,1}} copy(%a), {named('dot_general')}",
                     f"ROOT %t = f32[4,8]{{1,0}} transpose(%c), {named('dot_general')}")) == 0
    index = [f"%i = s32[1] constant({{3}}), {named('conv_general_dilated')}",
             f"%j = s32[1] multiply(%i, %i), {named('conv_general_dilated')}",
             f"%k = s32[] bitcast(%j), {named('conv_general_dilated')}"]
    assert work(text(*index, "ROOT %d = f32[2,4] dynamic-slice(%a, %k, %k), "
                     f"dynamic_slice_sizes={{2,4}}, {named('conv_general_dilated')}")) == 0
