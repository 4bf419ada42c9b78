"""The formulas of pipelines, contexts and experts, for sizes and meshes that nobody chose.

XLA removes loops of one turn, and sends once what is then sent twice from one place: so in a ring
of two devices, and of a decoder of one layer whose products are kept. Neither is drawn.
"""
from hypothesis import given
from hypothesis import strategies as st
from properties import examples, shapes
from test_context_costs import step as context_step
from test_decoder_costs import numbers_held
from test_expert_steps import step as expert_step
from test_pipeline_costs import step as pipeline_step

from meshbook import proofs
from meshbook.models.decoder_config import POLICIES
from meshbook.models.expert_layers import ExpertSizes
from meshbook.planning.context_costs import METHODS, context_step_traffic
from meshbook.planning.expert_costs import expert_decoder_parameters
from meshbook.planning.expert_steps import expert_step_traffic
from meshbook.planning.pipeline_costs import (
    SCHEDULES, pipeline_step_traffic, stage_parameters, turns_of
)

A_FEW = st.integers(1, 3)
MESHES = shapes(axes=2).filter(lambda shape: len(shape) == 2)


@st.composite
def decoders(draw, heads=A_FEW, vocabulary=1):
    """Sizes of a decoder, its heads in groups or not; layers and tokens are still to be chosen."""
    groups, each = draw(heads), draw(A_FEW)
    return dict(vocabulary=128 * vocabulary, heads=groups * each, groups=groups,
                embed=groups * each * 2 * draw(A_FEW), hidden=draw(st.integers(2, 20)),
                bias=draw(st.booleans()), gated=draw(st.booleans()))


@examples(2)
@given(st.data())
def test_a_pipelines_parameters_and_bytes_are_those_of_any_program(data):
    across, p = shape = data.draw(MESHES.filter(lambda shape: shape != (1, 1)))
    schedule, m = data.draw(st.sampled_from(SCHEDULES)), data.draw(st.integers(1, 5))
    sizes = data.draw(decoders(vocabulary=p)) | {
        "layers": p * data.draw(st.integers(1, 2)), "tokens": data.draw(st.integers(2, 9))}
    config, state, mesh, program = pipeline_step.__wrapped__(schedule, shape, m, **sizes)
    assert numbers_held(state.params) == stage_parameters(config, p)
    expected = pipeline_step_traffic(config, dict(mesh.shape), m * across, schedule, m)
    if schedule != "gpipe" and p > 1:  # a branch that is not taken in every turn is read as if
        turns, axes = turns_of(schedule, p, m).permutes // 2, ("all-reduce", ("stage",))
        more = (turns - m) * config.tokens * (4 * 4 * config.embed + 3 * 4)
        expected[axes] = expected[axes]._replace(bytes=expected[axes].bytes + more)
    proofs.assert_communicates(program, mesh, expected)


@examples(3)
@given(st.data())
def test_a_contexts_bytes_are_those_of_any_program(data):
    method, remat = (data.draw(st.sampled_from(sorted(names))) for names in (METHODS, POLICIES))
    across, ways = shape = data.draw(MESHES.filter(
        lambda shape: method != "ring" or shape[1] != 2))
    rows, heads = across * data.draw(st.integers(1, 2)), A_FEW.map(
        lambda n: n * (ways if method == "ulysses" else 1))
    sizes = data.draw(decoders(heads)) | {
        "layers": data.draw(st.integers(1 + (remat == "products"), 3)), "remat": remat,
        "tokens": 2 * ways * data.draw(A_FEW)}
    config, mesh, program = context_step.__wrapped__(method, shape, rows, **sizes)
    proofs.assert_communicates(program, mesh, context_step_traffic(
        config, dict(mesh.shape), rows, method))


@examples(3)
@given(st.data())
def test_the_parameters_and_bytes_of_experts_are_those_of_any_program(data):
    across, ways = shape = data.draw(MESHES)
    count, period = ways * data.draw(A_FEW), data.draw(st.integers(1, 2))
    active = data.draw(st.integers(1, min(count, 3)))
    tokens = data.draw(st.integers(2, 9))
    experts = ExpertSizes(
        count, active, shared=data.draw(st.sampled_from([0, 3, 8])),
        capacity=data.draw(st.floats(0.3, 3.0)), auxiliary=data.draw(st.sampled_from([0.0, 0.01])))
    rows = across * ways * data.draw(st.integers(1, 2))
    sizes = data.draw(decoders()) | {
        "layers": period * data.draw(st.integers(1, 2)), "period": period, "experts": experts,
        "tokens": tokens, "remat": data.draw(st.sampled_from(sorted(POLICIES)))}
    config, state, mesh, program = expert_step.__wrapped__(shape, rows, **sizes)
    assert numbers_held(state.params) == expert_decoder_parameters(config, 1, ways)
    proofs.assert_communicates(program, mesh, expert_step_traffic(config, dict(mesh.shape), rows))
