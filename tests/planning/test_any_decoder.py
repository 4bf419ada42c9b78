"""The formulas of a decoder's step, for sizes and meshes that nobody chose: odd ones among them.

XLA removes the loop of a decoder with one period of layers. A barrier then keeps what is made again
apart from what was made before, but a CPU's compiler removes that as well, and of the policy
"products", which makes the least again, merges some: with it there are two periods at least.
"""
import math

from hypothesis import given
from hypothesis import strategies as st
from properties import examples, shapes
from test_decoder_costs import numbers_held, step

from meshbook import proofs
from meshbook.models.decoder_config import POLICIES
from meshbook.planning.decoder_costs import (
    PRESETS, decoder_parameters, decoder_step_flops, decoder_step_traffic
)


@st.composite
def steps(draw):
    """(preset, mesh, rows of a batch, sizes and choices of a decoder that divide over it)."""
    preset = draw(st.sampled_from(sorted(PRESETS)))
    shape = rows, ways = draw(shapes(axes=2).filter(lambda shape: len(shape) == 2))
    if preset == "data_parallel":
        shape = rows, ways = rows * ways, 1
    a_few = st.integers(1, 3)
    heads, period, remat = ways * draw(a_few), 1, draw(st.sampled_from(sorted(POLICIES)))
    head_size, periods = 2 * rows * draw(a_few), draw(st.integers(1 + (remat == "products"), 3))
    sizes = dict(
        vocabulary=128 * math.lcm(rows, ways), tokens=ways * draw(st.integers(2, 7)), heads=heads,
        embed=heads * head_size, hidden=rows * ways * draw(st.integers(2, 9)),
        gated=draw(st.booleans()), bias=draw(st.booleans()), remat=remat)
    kind = draw(st.sampled_from(["plain", "groups", "latent"]))
    if kind == "groups":
        sizes |= {"groups": ways * draw(st.sampled_from(
            [n for n in (1, 2, 3) if heads // ways % n == 0]))}
    if kind == "latent":
        sizes |= {"latent": rows * ways * draw(a_few), "rotary": 2 * draw(st.integers(0, 2))}
        period = draw(st.integers(1, 2))
    sizes |= {"period": period, "layers": period * periods}
    return preset, shape, rows * draw(a_few), draw(st.booleans()), sizes


@examples(5)
@given(steps())
def test_parameters_work_and_bytes_are_those_of_any_program(drawn):
    preset, (rows, ways), batch, clip, sizes = drawn
    config, state, _, program = step.__wrapped__(
        "plain", preset, (rows, ways), batch, clip, **sizes)
    sharded = preset.startswith("fully_sharded")
    assert numbers_held(state.params) == decoder_parameters(config, ways, rows if sharded else 1)
    proofs.assert_divided(program, rows * ways, *decoder_step_flops(config, batch, ways, preset),
                          rtol=1e-9)
    proofs.assert_communicates(program, state.program.mesh, decoder_step_traffic(
        config, state.program.mesh, batch, preset, clipped=clip))
