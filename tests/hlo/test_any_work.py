"""The work of any product and convolution, plain, in loops, under remat, against a formula."""
import itertools
import math

import jax
import jax.numpy as jnp
from hypothesis import assume, given
from hypothesis import strategies as st
from properties import examples

from meshbook.hlo.flops import work

LETTERS = "abcdefgh"


def compiled(f, *shapes, dtype=jnp.float32):
    return jax.jit(f).lower(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)).compile()


@st.composite
def einsums(draw):
    """(an equation of letters in any order, {letter: size}): batch, summed, left's, right's."""
    kinds = ["summed", *draw(st.lists(st.sampled_from(["batch", "summed", "left", "right"]),
                                      max_size=4))]
    letters = {kind: [LETTERS[at] for at, each in enumerate(kinds) if each == kind]
               for kind in ("batch", "summed", "left", "right")}
    among = lambda *chosen: "".join(draw(st.permutations(
        [letter for kind in chosen for letter in letters[kind]])))
    left, right = among("batch", "summed", "left"), among("batch", "summed", "right")
    sizes = {letter: draw(st.sampled_from([2, 3, 4, 5, 7])) for letter in LETTERS[:len(kinds)]}
    return f"{left},{right}->{among('batch', 'left', 'right')}", sizes


def sides(equation, sizes):
    """The shapes of left and right."""
    left, right = equation.split("->")[0].split(",")
    return [tuple(sizes[letter] for letter in side) for side in (left, right)]


@examples(25)
@given(einsums(), st.sampled_from([jnp.float32, jnp.bfloat16]), st.integers(1, 4))
def test_any_einsum_in_any_loop_is_two_flops_for_each_combination_of_letters(
        drawn, dtype, turns):
    equation, sizes = drawn
    left, right = sides(equation, sizes)
    one = 2 * math.prod(sizes.values())
    run = lambda x, y: jnp.einsum(equation, x, y)
    assert work(compiled(run, left, right, dtype=dtype)) == one
    scanned = lambda xs, y: jax.lax.scan(lambda carry, x: (carry, run(x, y)), 0, xs)[1]
    assert work(compiled(scanned, (turns, *left), right, dtype=dtype)) == turns * one


@examples(12)
@given(einsums(), st.integers(2, 4))
def test_the_gradients_of_any_einsum_are_twice_its_work(drawn, turns):
    """One product each for left and right, in a loop too; a factor keeps both from being zero."""
    equation, sizes = drawn
    left, right = sides(equation, sizes)
    one = 2 * math.prod(sizes.values())

    def loss(xs, y):
        turn = lambda total, x: (total + jnp.sin(jnp.einsum(equation, x, y)).sum(), None)
        return jax.lax.scan(turn, 0.0, xs)[0]

    program = compiled(jax.grad(loss, (0, 1)), (turns, *left), right)
    assert work(program) == 3 * turns * one


@examples(8)
@given(st.lists(st.integers(2, 9), min_size=3, max_size=5), st.integers(2, 9), st.integers(2, 4),
       st.booleans())
def test_layers_that_are_made_again_do_all_but_their_last_product_once_more(
        widths, rows, turns, again):
    """Turns of a scan, each of several products, the last back to the first width."""
    widths = [*widths, widths[0]]
    shapes = list(itertools.pairwise(widths))

    def layer(x, weights):
        for w in weights:
            x = jnp.tanh(x @ w)
        return x

    def loss(weights, x):
        each = jax.checkpoint(layer) if again else layer
        return jax.lax.scan(lambda x, w: (each(x, w), None), x, weights)[0].sum()

    program = compiled(lambda x, *weights: jax.grad(loss, (0, 1))(weights, x), (rows, widths[0]),
                       *((turns, *shape) for shape in shapes))
    products = [2 * rows * a * b for a, b in shapes]
    assert work(program) == turns * (3 * sum(products) + again * sum(products))


@st.composite
def convolutions(draw):
    """(extents of an input, of a kernel, options of jax.lax.conv_general_dilated).

    Of features there are two at least: a product of single numbers is none, and is refused.
    """
    dims = draw(st.integers(1, 2))
    several = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(dims))
    kernel, options = several(1, 3), dict(
        window_strides=several(1, 3), lhs_dilation=several(1, 2), rhs_dilation=several(1, 2),
        padding=tuple(zip(several(0, 2), several(0, 2))),
        feature_group_count=draw(st.sampled_from([1, 1, 2, 3])))
    return several(5, 8), kernel, options


def met(length, kernel, stride, spread, step, padding):
    """Pairs of (place of the window, place in it) that meet an element, along one extent."""
    filled = length * spread - spread + 1
    total, reach = filled + sum(padding), (kernel - 1) * step + 1
    found = 0
    for start in range(0, total - reach + 1, stride):
        for at in range(kernel):
            place = start + at * step - padding[0]
            found += 0 <= place < filled and place % spread == 0
    return found


@examples(15)
@given(convolutions(), st.integers(1, 3), st.integers(2, 3), st.integers(2, 3))
def test_any_convolution_counts_what_a_loop_over_its_windows_meets(
        drawn, images, features, made):
    inputs, kernel, options = drawn
    each = zip(inputs, kernel, *(options[name] for name in (
        "window_strides", "lhs_dilation", "rhs_dilation", "padding")), strict=True)
    assume(pairs := math.prod(met(*one) for one in each))  # where nothing is met, it is refused
    groups, space = options["feature_group_count"], "HW"[:len(inputs)]
    numbers = (f"N{space}C", f"{space}IO", f"N{space}C")
    run = lambda x, w: jax.lax.conv_general_dilated(x, w, dimension_numbers=numbers, **options)
    program = compiled(run, (images, *inputs, groups * features),
                       (*kernel, features, groups * made))
    assert work(program) == 2 * pairs * images * features * groups * made
