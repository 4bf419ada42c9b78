"""The drawing of what matmuls write: every result in its proportions, at one scale."""
import re

import jax
import jax.numpy as jnp
import pytest

from meshbook.drawing.matmul_results import draw_matmul_results

B, D = 512, 16


def compiled(function, *shapes):
    return jax.jit(function).lower(*map(jnp.ones, shapes)).compile()


def boxes(drawing):
    pattern = r'width="([\d.]+)" height="([\d.]+)"[^>]* data-shape="(\d+)x(\d+)"'
    return [tuple(map(float, each)) for each in re.findall(pattern, drawing.html)]


@pytest.fixture(scope="module")
def drawing():
    return draw_matmul_results({
        "left": compiled(lambda h_BD: h_BD @ h_BD.T @ h_BD, (B, D)),
        "right": compiled(lambda h_BD: h_BD @ (h_BD.T @ h_BD), (B, D))})


def test_each_result_is_drawn_at_the_same_scale(drawing):
    found = boxes(drawing)
    assert [each[2:] for each in found] == [(B, B), (B, D), (D, D), (B, D)]
    scale = found[0][1] / B
    for wide, high, rows, columns in found:
        assert (wide, high) == pytest.approx((columns * scale, rows * scale), abs=0.02)


def test_the_work_of_each_program_is_written_under_its_title(drawing):
    assert f"{4 * B * B * D / 1e6:.0f} MFLOP" in drawing.html
    assert f"{4 * B * D * D / 1e6:.0f} MFLOP" in drawing.alt


def test_a_program_without_a_matrix_is_refused():
    with pytest.raises(ValueError, match="'nothing'"):
        draw_matmul_results({"nothing": compiled(jnp.sin, (4,))})
