"""The work of loops, branches, products and convolutions, each in a program of its own."""
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshbook.hlo.flops import work
from meshbook.proofs import UnknownTripCount


def compiled(f, *shapes):
    return jax.jit(f).lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).compile()


def test_a_loops_condition_is_asked_once_more_than_its_body_runs():
    state = "%p = (s32[], f32[4,4]) parameter(0)"
    square = ("%x = f32[4,4] get-tuple-element(%p), index=1\n"
              "  %d = f32[4,4] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}")
    text = (f"HloModule m\n\n%body (p: s32[]) -> s32[] {{\n  ROOT {state}\n}}\n\n"
            f"%cond (p: s32[]) -> pred[] {{\n  {state}\n  {square}\n"
            "  ROOT %true = pred[] constant(true)\n}\n\n"
            f"ENTRY %main (p: s32[]) -> s32[] {{\n  {state}\n  ROOT %loop = (s32[], f32[4,4]) "
            'while(%p), condition=%cond, body=%body, '
            'backend_config={"known_trip_count":{"n":"3"}}\n}\n')
    assert work(text) == 4 * 2 * 4**3


def test_nested_loops_multiply():
    def f(x):
        inner = lambda x: jax.lax.fori_loop(2, 12, lambda i, y: jnp.tanh(y @ y), x)
        return jax.lax.scan(lambda x, _: (inner(x), None), x, length=3)[0]

    program = compiled(f, (16, 16))
    assert work(program) == 30 * 2 * 16**3
    bare = re.sub(r'"known_trip_count":\{"n":"\d+"\}', '"nothing":{}', program.as_text())
    assert work(bare) == 30 * 2 * 16**3


def test_an_inner_loop_may_be_bounded_by_what_the_outer_one_hands_on():
    state = "(s32[], s32[], f32[4,4])"
    turned = f"""  %p = {state} parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=1
  %x = f32[4,4] get-tuple-element(%p), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
"""
    text = f"""HloModule m

%inner_body (p: {state}) -> {state} {{
{turned}  %y = f32[4,4] dot(%x, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  ROOT %after = {state} tuple(%next, %n, %y)
}}

%inner_condition (p: {state}) -> pred[] {{
{turned}  ROOT %goes_on = pred[] compare(%i, %n), direction=LT
}}

%outer_body (p: {state}) -> {state} {{
{turned}  %zero = s32[] constant(0)
  %given = {state} tuple(%zero, %n, %x)
  %inner = {state} while(%given), condition=%inner_condition, body=%inner_body
  %y = f32[4,4] get-tuple-element(%inner), index=2
  ROOT %after = {state} tuple(%next, %n, %y)
}}

%outer_condition (p: {state}) -> pred[] {{
{turned}  %three = s32[] constant(3)
  ROOT %goes_on = pred[] compare(%i, %three), direction=LT
}}

ENTRY %main (x: f32[4,4]) -> {state} {{
  %x = f32[4,4] parameter(0)
  %zero = s32[] constant(0)
  %five = s32[] constant(5)
  %given = {state} tuple(%zero, %five, %x)
  ROOT %outer = {state} while(%given), condition=%outer_condition, body=%outer_body
}}
"""
    assert work(text) == 3 * 5 * 2 * 4**3
    moving = text.replace("tuple(%next, %n, %y)", "tuple(%next, %i, %y)", 2).replace(
        "tuple(%next, %i, %y)", "tuple(%next, %n, %y)", 1)  # the outer one changes the bound
    with pytest.raises(UnknownTripCount, match="the loop %inner in %outer_body"):
        work(moving)


@pytest.mark.parametrize("start,goes_on,step,trips", [
    (0, lambda i: i < 7, lambda i: i + 2, 4), (9, lambda i: i > 0, lambda i: i - 3, 3),
    (1, lambda i: i <= 64, lambda i: i * 2, 7), (5, lambda i: i < 5, lambda i: i + 1, 0),
    (3, lambda i: i != 0, lambda i: i - 1, 3),
])
def test_counters_of_every_kind(start, goes_on, step, trips):
    def f(x):
        return jax.lax.while_loop(
            lambda s: goes_on(s[0]), lambda s: (step(s[0]), jnp.tanh(s[1] @ s[1])), (start, x))[1]

    text = re.sub(r'"known_trip_count":\{"n":"\d+"\}', '"nothing":{}',
                  compiled(f, (8, 8)).as_text())
    assert work(text) == trips * 2 * 8**3


def test_a_loop_that_data_ends_is_an_error_only_where_it_matters():
    def f(x):
        return jax.lax.while_loop(lambda x: x.sum() < 100, lambda x: x @ x, x)

    with pytest.raises(UnknownTripCount, match=r"loop %while.* in %main.*trip count.*condition"):
        work(compiled(f, (8, 8)))
    quiet = lambda x: jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x + 1, x)
    assert work(compiled(quiet, (8, 8))) == 0


def test_a_conditional_counts_its_largest_branch():
    def f(p, x):
        return jax.lax.cond(p[0] > 0, lambda x: x @ x, lambda x: jnp.tanh(x @ x) @ x, x)

    assert work(compiled(f, (1,), (16, 16))) == 2 * 2 * 16**3


@pytest.mark.parametrize("left,right,numbers", [
    ((4, 6, 8), (4, 8, 5), (((2,), (1,)), ((0,), (0,)))),
    ((3, 4, 5, 6), (6, 3, 7), (((0, 3), (1, 0)), ((), ()))),
    ((8, 16), (16, 8), (((1,), (0,)), ((), ()))),
])
def test_products_count_result_times_what_is_summed(left, right, numbers):
    program = compiled(lambda x, y: jax.lax.dot_general(x, y, numbers), left, right)
    result = jax.eval_shape(lambda x, y: jax.lax.dot_general(x, y, numbers),
                            *(jax.ShapeDtypeStruct(s, jnp.float32) for s in (left, right)))
    assert work(program) == 2 * result.size * np.prod([left[at] for at in numbers[0][0]])


@pytest.mark.parametrize("options", [
    dict(window_strides=(1, 1), padding="SAME"),
    dict(window_strides=(2, 2), padding=((1, 2), (0, 1))),
    dict(window_strides=(1, 1), padding=((1, 1), (1, 1)), lhs_dilation=(2, 3)),
    dict(window_strides=(1, 2), padding="VALID", rhs_dilation=(2, 2)),
    dict(window_strides=(2, 2), padding="SAME", feature_group_count=2),
    dict(window_strides=(2, 2), padding="SAME", batch_group_count=2),
])
def test_convolutions_count_the_positions_that_meet_an_element(options):
    groups, split = options.get("feature_group_count", 1), options.get("batch_group_count", 1)

    def f(x, w):
        return jax.lax.conv_general_dilated(
            x, w, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)

    program = compiled(f, (4, 11, 10, 8), (3, 3, 8 // groups, 6))
    assert work(program) == program.cost_analysis()["flops"] > 0
    assert split == 1 or work(program) < work(compiled(
        lambda x, w: jax.lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=(
            "NHWC", "HWIO", "NHWC")), (4, 11, 10, 8), (3, 3, 8, 6)))


def test_work_agrees_with_xla_where_xla_counts_all():
    program = compiled(lambda x, w: jnp.einsum("bij,jk->bik", x, w), (4, 32, 64), (64, 48))
    assert work(program) == pytest.approx(program.cost_analysis()["flops"], rel=1e-3)
