"""Parameters, work and bytes of a step by the table, for models and meshes that nobody chose.

Not drawn is what XLA makes simpler than it is written. It removes the loop of a decoder with one
period of layers; a barrier then keeps what is made again apart from what was made before, but a
CPU's compiler removes that as well. It then merges some of both, or joins their all-reduces: with
a policy of rematerialisation there are two periods at least. It also sends once what is sent twice from one
place, as in a ring of two devices.
"""
import math
from dataclasses import replace

import jax
import numpy as np
import optax
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from planned_steps import Compiled, compiled, numbers_held
from properties import examples, shapes
from tiny_vit import normalised

from meshbook import proofs
from meshbook.costs.plans import PRESETS, Plan, rules_of
from meshbook.costs.ranking import METHODS, impossible
from meshbook.costs.step import describe
from meshbook.costs.traffic import step_traffic
from meshbook.costs.turns import SCHEDULES, turns_of
from meshbook.costs.work import step_work
from meshbook.hlo.flops import work
from meshbook.models import MiniGPT, MiniGPTConfig, ViT, ViTConfig
from meshbook.models.decoder import DecoderConfig
from meshbook.models.decoder_config import POLICIES
from meshbook.models.expert_layers import ExpertSizes
from meshbook.models.losses import language_loss
from meshbook.parallel.accumulation import in_microbatches
from meshbook.sharding import make_mesh
from meshbook.training import abstract_state, clipped, compile_step, loss_and_metrics

A_FEW = st.integers(1, 3)
MESHES = shapes(axes=2).filter(lambda shape: len(shape) == 2)


def agree(found, clip=False, has_conditionals=False):
    """What the program holds, does and sends is what the table says."""
    step, mesh, state, program = found
    assert numbers_held(state.params) == step.numbers["stored"]
    expected = step_traffic(step, clipped=clip)
    if has_conditionals:  # a branch that is not taken in every turn is read as if it were
        plan, axes = step.plan, ("all-reduce", ("stage",))
        turns = turns_of(plan.schedule, plan.stage, plan.microbatches).permutes // 2
        more = (turns - plan.microbatches) * step.config.tokens * (
            4 * 4 * step.config.embed + 3 * 4)
        expected[axes] = expected[axes]._replace(bytes=expected[axes].bytes + more)
    else:
        assert math.isclose(work(program), step_work(step).done, rel_tol=1e-9)
    proofs.assert_communicates(program, mesh, expected)


@st.composite
def layouts(draw):
    """(Plan, rows of a batch, sizes of a model's blocks that divide over it).

    A device has two of each unit at least: a product over one number is a multiplication, which a
    compiler may do in several places.
    """
    preset = draw(st.sampled_from(["data_parallel", "tensor_parallel", "fully_sharded"]))
    rows, ways = draw(MESHES)
    if preset == "data_parallel":
        rows, ways = rows * ways, 1
    parts = draw(A_FEW)
    heads = ways * draw(A_FEW)
    sizes = dict(heads=heads, embed=heads * rows * draw(st.integers(2, 4)), layers=draw(A_FEW),
                 hidden=rows * ways * draw(st.integers(2, 6)))
    plan = Plan(rows, model=ways, rules=preset, microbatches=parts)
    return plan, parts * rows * draw(A_FEW), sizes


def of_model(config, build, plan, rows, inputs, labels, loss, optimizer=optax.sgd(0.1), **more):
    """The Compiled step of a ViT or a MiniGPT; inputs, labels: shape and dtype."""
    mesh = make_mesh((plan.batch, plan.model))
    if plan.microbatches > 1:
        loss = in_microbatches(loss, plan.microbatches)
    state = abstract_state(lambda: build(config, rules_of(plan), rngs=nnx.Rngs(0)), optimizer, mesh,
                           loss=loss, **more)
    spec = jax.NamedSharding(mesh, jax.P("batch"))
    batch = {"inputs": jax.ShapeDtypeStruct(*inputs, sharding=spec),
             "labels": jax.ShapeDtypeStruct(*labels, sharding=spec)}
    program = compile_step(state, batch, jax.eval_shape(lambda: jax.random.key(0)))
    return Compiled(describe(config, plan, rows), mesh, state, program)


@examples(4)
@given(layouts(), st.integers(1, 3), st.integers(1, 4), st.integers(2, 5))
def test_a_vits_parameters_work_and_bytes_are_those_of_any_program(layout, patch, across, classes):
    plan, images, sizes = layout
    images = max(images, 2 * plan.microbatches)  # JAX finds no sharding for a single label
    config = ViTConfig(image=patch * across, patch=patch, classes=classes, **sizes)
    agree(of_model(config, ViT, plan, images, ((images, config.image, config.image, 3), np.uint8),
                   ((images,), np.int32), loss_and_metrics, prepare=normalised))


@examples(4)
@given(layouts(), st.integers(2, 9) | st.just(260), A_FEW, st.booleans())
def test_a_minigpts_parameters_work_and_bytes_are_those_of_any_program(
        layout, tokens, words, clip):
    plan, texts, sizes = layout
    config = MiniGPTConfig(128 * plan.batch * plan.model * words - 5, tokens=tokens, **sizes)
    optimizer = optax.chain(clipped(1.0), optax.sgd(0.1)) if clip else optax.sgd(0.1)
    ids = (texts, tokens), np.int32
    agree(of_model(config, MiniGPT, plan, texts, ids, ids, language_loss, optimizer), clip)


@st.composite
def decoders(draw):
    """(config, plan, rows, whether gradients are clipped) of a decoder without experts."""
    preset = draw(st.sampled_from(sorted(PRESETS)))
    rows, ways = draw(MESHES)
    if preset == "data_parallel":
        rows, ways = rows * ways, 1
    heads, period, remat = ways * draw(A_FEW), 1, draw(st.sampled_from(sorted(POLICIES)))
    head_size, periods = 2 * rows * draw(A_FEW), draw(st.integers(1 + (remat != "none"), 3))
    sizes = dict(
        vocabulary=128 * math.lcm(rows, ways), tokens=ways * draw(st.integers(2, 7)), heads=heads,
        embed=heads * head_size, hidden=rows * ways * draw(st.integers(2, 9)),
        gated=draw(st.booleans()), bias=draw(st.booleans()))
    kind = draw(st.sampled_from(["plain", "groups", "latent"]))
    if kind == "groups":
        sizes |= {"groups": ways * draw(st.sampled_from(
            [n for n in (1, 2, 3) if heads // ways % n == 0]))}
    if kind == "latent":
        sizes |= {"latent": rows * ways * draw(A_FEW), "rotary": 2 * draw(st.integers(0, 2))}
        period = draw(st.integers(1, 2))
    config = DecoderConfig(**sizes, period=period, layers=period * periods)
    return config, Plan(rows, model=ways, rules=preset, remat=remat), rows * draw(A_FEW), draw(
        st.booleans())


@examples(5)
@given(decoders())
def test_a_decoders_parameters_work_and_bytes_are_those_of_any_program(drawn):
    *_, clip = drawn
    agree(compiled.__wrapped__(*drawn), clip)


@st.composite
def of_odd_sizes(draw, heads=A_FEW, **sizes):
    """A small decoder, its heads in groups or not."""
    groups, each = draw(heads), draw(A_FEW)
    return DecoderConfig(**dict(
        vocabulary=128, heads=groups * each, groups=groups, embed=groups * each * 2 * draw(A_FEW),
        hidden=draw(st.integers(2, 20)), bias=draw(st.booleans()),
        gated=draw(st.booleans())) | sizes)


@examples(2)
@given(st.data())
def test_a_pipelines_parameters_and_bytes_are_those_of_any_program(data):
    across, p = data.draw(MESHES.filter(lambda shape: shape[1] > 1))
    schedule, m = data.draw(st.sampled_from(SCHEDULES)), data.draw(st.integers(1, 5))
    plan = Plan(across, stage=p, rules="data_parallel", schedule=schedule, microbatches=m)
    config = data.draw(of_odd_sizes(vocabulary=128 * p, layers=p * data.draw(st.integers(1, 2)),
                                    tokens=data.draw(st.integers(2, 9))))
    if impossible(config, plan, m * across):
        return
    agree(compiled.__wrapped__(config, plan, m * across), has_conditionals=schedule != "gpipe")


@examples(3)
@given(st.data())
def test_a_contexts_bytes_are_those_of_any_program(data):
    method, remat = (data.draw(st.sampled_from(sorted(names)))
                     for names in ({*METHODS, "gather"}, POLICIES))
    across, ways = data.draw(MESHES.filter(lambda shape: method != "ring" or shape[1] != 2))
    config = data.draw(of_odd_sizes(
        A_FEW.map(lambda n: n * (ways if method == "ulysses" else 1)),
        layers=data.draw(st.integers(1 + (remat != "none"), 3)),
        tokens=2 * ways * data.draw(A_FEW)))
    plan = Plan(across, context=ways, rules="data_parallel", method=method, remat=remat)
    step, mesh, state, program = compiled.__wrapped__(
        config, plan, across * data.draw(st.integers(1, 2)))
    assert numbers_held(state.params) == step.numbers["stored"]
    proofs.assert_communicates(program, mesh, step_traffic(step))


@examples(3)
@given(st.data())
def test_the_parameters_and_bytes_of_experts_are_those_of_any_program(data):
    across, ways = data.draw(MESHES)
    count, period = ways * data.draw(A_FEW), data.draw(st.integers(1, 2))
    experts = ExpertSizes(
        count, data.draw(st.integers(1, min(count, 3))),
        shared=data.draw(st.sampled_from([0, 3, 8])),
        capacity=data.draw(st.floats(0.3, 3.0)), auxiliary=data.draw(st.sampled_from([0.0, 0.01])))
    config = data.draw(of_odd_sizes(
        period=period, layers=period * data.draw(st.integers(1, 2)), experts=experts,
        tokens=data.draw(st.integers(2, 9))))
    plan = Plan(across, expert=ways, rules="data_parallel",
                remat=data.draw(st.sampled_from(sorted(POLICIES))))
    step, mesh, state, program = compiled.__wrapped__(
        config, plan, across * ways * data.draw(st.integers(1, 2)))
    assert numbers_held(state.params) == step.numbers["stored"]
    proofs.assert_communicates(program, mesh, step_traffic(step))
    wrong = describe(config, replace(plan, rules="zero1"), step.rows)
    assert across == 1 or step_traffic(wrong) != step_traffic(step)
