"""The explorer's tensors: real arrays lie so, and its lines add up to the traffic of a step."""
import itertools
from collections import Counter
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractMesh, AxisType

from meshbook.costs import tables
from meshbook.costs.explorer import (
    MODELS, activations, exchanges, explored, known_presets, notation, parameters
)
from meshbook.costs.plans import PRESETS, Plan, rules_of
from meshbook.costs.step import describe
from meshbook.costs.traffic import step_traffic
from meshbook.models import MiniGPT, MiniGPTConfig, ViT, ViTConfig
from meshbook.models.decoder import Decoder, DecoderConfig
from meshbook.models.expert_layers import ExpertSizes
from meshbook.sharding import axes_of, make_mesh
from meshbook.training import create_state

VIT = ViTConfig(embed=48, hidden=96, heads=4, layers=2)
GPT = MiniGPTConfig(250, tokens=24, embed=48, hidden=96, heads=4, layers=2)
DENSE = DecoderConfig(500, tokens=32, embed=48, hidden=64, heads=4, groups=2, layers=4, bias=True)
LATENT = replace(DENSE, groups=0, latent=8, rotary=4, period=2, gated=False)
EXPERTS = replace(LATENT, experts=ExpertSizes(4, 2, shared=16, capacity=1.5, biased=True))
ALONE = replace(DENSE, bias=False, experts=ExpertSizes(4, 2, capacity=1.5))
KINDS = {ViTConfig: ViT, MiniGPTConfig: MiniGPT, DecoderConfig: Decoder}
THREE = ("data_parallel", "tensor_parallel", "fully_sharded")
CASES = [
    *itertools.product((VIT, GPT), [Plan(4, model=2, rules=rules) for rules in THREE]),
    (VIT, Plan(2, model=4, rules="fully_sharded")), (GPT, Plan(8, rules="fully_sharded")),
    (DENSE, Plan(4, model=2, rules="sequence_parallel")), (DENSE, Plan(4, model=2)),
    (LATENT, Plan(4, model=2, rules="zero2")), (LATENT, Plan(4, stage=2)),
    (DENSE, Plan(2, stage=2, model=2, rules="fully_sharded")), (DENSE, Plan(2, context=4)),
    (LATENT, Plan(stage=2, model=4, rules="zero1")), (ALONE, Plan(2, expert=4)),
    (EXPERTS, Plan(2, expert=2, model=2, rules="fully_sharded_again")),
    (EXPERTS, Plan(1, expert=4, model=2, rules="zero1")), (EXPERTS, Plan(2, expert=2, stage=2))]
MESHES = [dict(zip(("batch", "model"), shape))
          for shape in ((1, 1), (8, 1), (4, 2), (2, 4), (1, 8), (16, 4), (3, 2))]
MESHES += [{"expert": 2}, {"stage": 2, "microbatches": 4, "model": 2}, {"batch": 2, "context": 4},
           {"batch": 2, "expert": 4, "stage": 2, "microbatches": 2, "schedule": "lockstep"},
           {"stage": 4, "context": 2}]
named = lambda given: given.name if isinstance(given, Plan) else type(given).__name__


def laid_out(array):
    """Shape, axes of each dimension, and each device's piece of an array."""
    rules = (*array.sharding.spec, *[None] * (array.ndim - len(array.sharding.spec)))
    (piece,) = {(each.data.shape, each.data.nbytes) for each in array.addressable_shards}
    return array.shape, tuple(map(axes_of, rules)), *piece


def arrays_of(tree):
    """How many arrays of a model have this name and lie so, whatever the number of their layer."""
    found = []
    for path, leaf in jax.tree.leaves_with_path(tree):
        words = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        name = "/".join(words[2 * (words[0] in ("blocks", "layers")):])
        found.append((name, *laid_out(leaf)))
    return Counter(found)


def in_the_table(tensors):
    """The same by the table: the shared expert's M is its model's F."""
    found = Counter()
    for each in tensors:
        key = each.name.replace("M", "F"), each.shape, each.spec, each.held, each.bytes
        found[key] += each.arrays
    return found


@pytest.mark.parametrize("config, plan", CASES, ids=named)
def test_real_parameters_and_moments_lie_as_the_table_says(config, plan):
    mesh, step = make_mesh(tuple(plan.mesh.values()), tuple(plan.mesh)), describe(config, plan, 16)
    state = create_state(
        lambda: KINDS[type(config)](config, rules_of(plan), rngs=nnx.Rngs(0)), optax.adam(0.1),
        mesh, rows=("batch", "expert") if plan.expert > 1 else "batch")
    assert arrays_of(state.params) == in_the_table(parameters(step))
    assert arrays_of(state.opt_state["0"]["mu"]) == in_the_table(parameters(step, "moments"))


def made_by(config, plan, rows):
    """{(shape, axes)} of what products give in the traced forward pass of a model."""
    mesh = AbstractMesh(tuple(plan.mesh.values()), tuple(plan.mesh),
                        axis_types=(AxisType.Explicit,) * len(plan.mesh))
    with jax.sharding.use_abstract_mesh(mesh):
        model = nnx.eval_shape(
            lambda: KINDS[type(config)](config, rules_of(plan), rngs=nnx.Rngs(0)))
        graph, state = nnx.split(model)
        given = (rows, 32, 32, 3) if config is VIT else (rows, config.tokens)
        x = jax.ShapeDtypeStruct(given, np.float32 if config is VIT else np.int32,
                                 sharding=jax.NamedSharding(mesh, jax.P("batch")))
        return set(products(jax.make_jaxpr(
            lambda state, x: nnx.merge(graph, state)(x))(state, x).jaxpr))


def products(jaxpr):
    """(shape, axes) of each product in a program, and of each look-up and sum of look-ups."""
    for line in jaxpr.eqns:
        for inner in jaxprs_in_params(line.params):
            yield from products(inner)
        for each in line.outvars if line.primitive.name in ("dot_general", "shard_map") else ():
            rules = each.aval.sharding.spec.partitions
            yield each.aval.shape, tuple(map(axes_of, rules))


@pytest.mark.parametrize("config, plan", [
    *itertools.product((VIT, GPT), [Plan(4, model=2, rules=rules) for rules in THREE]),
    *itertools.product((DENSE, LATENT), [Plan(4, model=2, rules=rules) for rules in (
        "tensor_parallel", "sequence_parallel", "zero1", "fully_sharded_kept")])], ids=named)
def test_activations_lie_as_the_traced_model_types_them(config, plan):
    found, made = activations(describe(config, plan, 16)), made_by(config, plan, 16)
    for each in found:
        at_once = {((*each.shape[:2], several, *each.shape[2:]),
                    (*each.spec[:2], (), *each.spec[2:])) for several in (1, 2)}
        assert made & ({(each.shape, each.spec)} | at_once), notation(each)
    assert {each.part for each in found} >= {"embedding", "layers"}


def refused(config, plan, rows):
    try:
        return "", explored(config, plan, rows)
    except ValueError as error:
        return str(error), None


@pytest.mark.parametrize("config", [VIT, GPT, DENSE, LATENT, EXPERTS, ALONE], ids=named)
def test_lines_add_up_to_the_traffic_and_pieces_to_what_a_device_holds(config):
    shown = 0
    for sizes, rules, clipped in itertools.product(MESHES, PRESETS, (False, True)):
        why, step = refused(config, Plan(**sizes, rules=rules), 48)
        if why:
            continue
        shown, total = shown + 1, {}
        for each in exchanges(step, clipped):
            count, size = total.get((each.kind, each.axes), (0, 0))
            both = None if None in (count, each.count) else count + each.count
            total[each.kind, each.axes] = both, size + each.bytes
        assert total == step_traffic(step, clipped=clipped)
        for kind, numbers in (("parameters", "stored"), ("gradients", "gradients"),
                              ("moments", "moments")):
            pieces = sum(each.bytes * each.arrays for each in parameters(step, kind))
            assert pieces == 4 * step.numbers[numbers]
    assert shown > 20


@pytest.mark.parametrize("config, embedding, layers, head", [
    (VIT, {"w_patch_XD", "b_patch_D", "class_D", "position_TD"}, {"norm1", "attention", "mlp"},
     {"norm/scale_D", "norm/bias_D", "w_head_DC", "b_head_C"}),
    (GPT, {"token_VD", "position_TD"}, {"norm1", "attention", "mlp"}, {"w_head_DV", "b_head_V"}),
    (DENSE, {"token_VD"}, {"norm1", "attention", "mlp"}, {"norm/scale_D", "norm/shift_D"}),
    (EXPERTS, {"token_VD"}, {"norm1", "attention", "mlp"}, {"norm/scale_D", "norm/shift_D"})],
    ids=named)
def test_each_parameter_is_in_the_part_that_uses_it(config, embedding, layers, head):
    found = {}
    for each in parameters(describe(config, Plan(4, model=2), 8)):
        found.setdefault(each.part, set()).add(each.name)
    assert (found["embedding"], found["head"]) == (embedding, head)
    kinds = {part: {name.partition("/")[0] for name in names}
             for part, names in found.items() if part.startswith("layers")}
    assert kinds["layers"] == layers | {"norm2"}
    assert set(kinds) == {"layers"} | ({"layers with experts"} if config is EXPERTS else set())
    assert kinds.get("layers with experts", {"experts"}) >= {"experts"}


def test_a_part_is_called_by_what_sets_its_layers_apart():
    parts = lambda config: list(describe(config, Plan(), 8).layers.items())
    assert parts(DENSE) == [("layers", 4)] and parts(ALONE) == [("layers with experts", 4)]
    assert parts(LATENT) == [("layers", 2), ("layers without positions", 2)]
    assert parts(EXPERTS) == [("layers", 2), ("layers with experts", 2)]
    sent = exchanges(describe(LATENT, Plan(2, stage=2, model=2, microbatches=2), 8), clipped=True)
    assert {each.part for each in sent} == set(tables.ALL_PARTS) - {"layers with experts"}
    order = [tables.ALL_PARTS.index(each.part) for each in sent]
    assert order == sorted(order)


def test_a_tensor_is_written_as_in_the_book():
    step = describe(ViTConfig(), Plan(4, model=2, rules="fully_sharded"), 64)
    found = {notation(each): each for each in parameters(step) + activations(step)}
    assert "mlp/w_in[D_batch, F_model]" in found
    each = found["attention/w_qkv[D_batch, S, H_model, K]"]
    assert each.held == (96, 3, 4, 48) and each.bytes == 4 * 96 * 3 * 4 * 48 and each.arrays == 6
    assert found["attention/w_qkv makes [B_batch, T, H_model, K]"].held == (16, 65, 4, 48)
    step = describe(EXPERTS, Plan(2, expert=2, stage=2, model=1, rules="tensor_parallel"), 64)
    found = {notation(each) for each in parameters(step) + activations(step)}
    assert {"token[V_stage_model, D]", "experts/w_in[L_stage, E_expert, D, S, F_model]",
            "attention/w_out makes [B_batch_expert, T, D]"} <= found


@pytest.mark.parametrize("config, plan, words", [
    (VIT, Plan(3), "rows of a microbatch=16 does not divide over 3 devices"),
    (VIT, Plan(2, rules="zero1"), "zero1 has a program for the decoder only"),
    (DENSE, Plan(2, rules="zero2", microbatches=2), "bytes of microbatches are known with "
     "data_parallel, fully_sharded, tensor_parallel, zero1"),
    (DENSE, Plan(stage=2, rules="fully_sharded_again"), "bytes in stages are known with "
     "data_parallel, tensor_parallel, zero1, fully_sharded; found fully_sharded_again"),
    (ALONE, Plan(expert=2, rules="zero2"), "bytes with experts are known with data_parallel, ")])
def test_what_is_not_known_is_said(config, plan, words):
    assert refused(config, plan, 16)[0].startswith(words)


def test_the_form_has_models_and_axes_for_which_there_are_plans():
    for config, axes in MODELS.values():
        for axis in set(axes) - {"batch"}:
            assert refused(config, Plan(**{axis: 2}, rules="tensor_parallel"), 64)[0] == ""
        for axis in {"expert", "stage", "context"} - set(axes):
            assert refused(config, Plan(**{axis: 2}, rules="tensor_parallel"), 64)[0]
        assert known_presets(config, Plan())[1][:2] == THREE[:2]
