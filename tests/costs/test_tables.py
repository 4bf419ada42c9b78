"""Tables say what models are made of: their parameters are those of the models, on any mesh."""
import itertools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType
from properties import examples

from meshbook.costs import tables
from meshbook.costs.memory import kept_bytes, layers_of, step_memory
from meshbook.costs.plans import PRESETS, Plan, rules_of
from meshbook.costs.ranking import impossible
from meshbook.costs.step import describe
from meshbook.costs.traffic import step_traffic
from meshbook.costs.work import step_work
from meshbook.models import MiniGPT, MiniGPTConfig, ViT, ViTConfig
from meshbook.models.decoder import Decoder, DecoderConfig
from meshbook.models.expert_layers import ExpertSizes

DENSE = DecoderConfig(500, tokens=32, embed=48, hidden=64, heads=4, layers=4)
LATENT = replace(DENSE, latent=8, rotary=4, period=2, gated=False, bias=True)
CONFIGS = {
    "vit": ViTConfig(embed=48, hidden=64, heads=4, layers=2),
    "minigpt": MiniGPTConfig(500, tokens=32, embed=48, hidden=64, heads=4, layers=2),
    "decoder": DENSE, "groups": replace(DENSE, groups=2, bias=True), "latent": LATENT,
    "experts": replace(DENSE, experts=ExpertSizes(4, 2, shared=16, capacity=1.5)),
    "latent experts": replace(LATENT, experts=ExpertSizes(4, 3, capacity=2.0, biased=True))}
FLAGS = {"positions", "gated", "bias", "latent", "turned", "dropout", "scores", "blocks", "fused",
         "dense", "experts", "shared", "biased", "model", "exchanged"}


def numbers_of(config, plan):
    """How many numbers one device stores of a model's parameters, as the model itself lays them."""
    kind = {ViTConfig: ViT, MiniGPTConfig: MiniGPT, DecoderConfig: Decoder}[type(config)]
    mesh = AbstractMesh(tuple(plan.sizes.values()), tuple(plan.sizes),
                        axis_types=(AxisType.Explicit,) * len(plan.sizes))
    with jax.sharding.use_abstract_mesh(mesh):
        model = nnx.eval_shape(lambda: kind(config, rules_of(plan), rngs=nnx.Rngs(0)))
    leaves = jax.tree.leaves(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("rules", PRESETS)
def test_parameters_are_those_of_the_model(name, rules):
    config, plan = CONFIGS[name], Plan(4, model=2, rules=rules)
    if rules == "sequence_parallel" and "experts" in name:
        plan = replace(plan, rules="tensor_parallel")
    assert describe(config, plan, 8).numbers["stored"] == numbers_of(config, plan)


@examples(6)
@given(st.data())
def test_parameters_are_those_of_the_model_on_any_mesh(data):
    config = CONFIGS[data.draw(st.sampled_from(["decoder", "latent", "experts"]))]
    sizes = [data.draw(st.sampled_from([1, 2, 4])) for _ in range(2)]
    expert = data.draw(st.sampled_from([1, 2])) if config.experts else 1
    stage = data.draw(st.sampled_from([1, 2]))
    plan = Plan(sizes[0], expert, stage, 1, sizes[1], rules=data.draw(st.sampled_from(
        ["tensor_parallel", "zero1", "fully_sharded"])))
    if impossible(config, replace(plan, remat="none"), 64):
        return
    assert describe(config, plan, 64).numbers["stored"] == numbers_of(config, plan)


@pytest.mark.parametrize("config", [ViTConfig(), MiniGPTConfig(), DENSE], ids=lambda c: type(c))
def test_a_table_names_dimensions_and_flags_that_exist(config):
    table, sizes = tables.table_of(config), tables.sizes_of(config)
    rows = [*table.first, *table.layer, *table.last]
    known = set(sizes) | {"B"}
    for row in rows:
        assert set(row.shape + row.tokens + row.useful) - {"T"} <= known | {"T"}, row
        assert not row.is_product or row.summed and row.made, row
    kept = [*table.inputs, *itertools.chain(*table.working.values(), *table.kept.values())]
    assert all(set(each.letters) <= known for each in kept)
    words = {word.lstrip("-") for row in [*rows, *kept] for word in row.when.split()}
    assert words <= FLAGS
    policies = {"none", "products", "attention", "all"}
    assert {word for row in rows for word in row.again.split()} <= policies


def test_a_config_without_a_table_is_refused():
    with pytest.raises(TypeError, match="expected a config of ViTConfig, MiniGPTConfig, "
                                        "DecoderConfig; found int"):
        describe(3, Plan(), 8)


def test_moments_and_gradients_lie_where_the_rules_say():
    numbers = {rules: describe(DENSE, Plan(4, rules=rules), 8).numbers for rules in PRESETS}
    whole = numbers["data_parallel"]["used"]
    with_D = sum(each.used for each in describe(DENSE, Plan(), 8).placed if "D" in each.row.shape)
    own = whole - with_D + with_D // 4
    assert {rules: (each["stored"], each["gradients"], each["moments"])
            for rules, each in numbers.items()} == {
        "data_parallel": (whole, whole, whole), "tensor_parallel": (whole, whole, whole),
        "sequence_parallel": (whole, whole, whole), "zero1": (whole, whole, own),
        "zero2": (whole, own, own), **dict.fromkeys(
            ("fully_sharded", "fully_sharded_kept", "fully_sharded_again"), (own, own, own))}


def test_dtype_changes_no_number_of_parameters():
    narrow = replace(DENSE, dtype=jnp.bfloat16)
    assert describe(narrow, Plan(2), 8).numbers == describe(DENSE, Plan(2), 8).numbers


@pytest.mark.parametrize("period", [1, 2, 4])
def test_layers_of_every_kind_are_there_also_where_only_positions_set_them_apart(period):
    step = describe(replace(DENSE, period=period), Plan(rules="data_parallel"), 4)
    assert sum(layers_of(step).values()) == DENSE.layers
    one = describe(replace(DENSE, layers=1), Plan(rules="data_parallel"), 4)
    assert kept_bytes(step, "none") == DENSE.layers * kept_bytes(one, "none")


@pytest.mark.parametrize("table", tables.TABLES.values(), ids=[
    each.__name__ for each in tables.TABLES])
def test_what_is_kept_are_whole_arrays_of_letters_that_the_model_has(table):
    known = {*table.dims, "B"}
    kept = itertools.chain(table.inputs, *table.working.values(), *table.kept.values())
    for each in kept:
        assert each.bytes in (0, 1, 2, 4) and each.count >= 1 and set(each.letters) <= known, each
    for row in (*table.first, *table.layer, *table.last):
        assert set(row.letters) - {">"} <= known and set(row.tokens + row.useful) <= known, row
        assert row.gradients in (0, 1, 2) and row.count in (1, 2, 3), row


@pytest.mark.parametrize("what, plan", [
    ("remat is one of none, all; found 'products'", Plan(remat="products")),
    ("attention is one of scores, rows, blocks, fused, skipped; found 'flash'", Plan(attention="flash"))])
def test_a_policy_or_attention_that_there_is_not_is_refused(what, plan):
    with pytest.raises(ValueError, match=what):
        describe(ViTConfig(), plan, 8)


def test_of_dropless_experts_parameters_are_known_and_nothing_else():
    dropless = replace(DENSE, experts=ExpertSizes(4, 2))
    step = describe(dropless, Plan(), 8)
    assert step.numbers["used"] == describe(
        replace(DENSE, experts=ExpertSizes(4, 2, capacity=1.0)), Plan(), 8).numbers["used"]
    for fold in (step_work, step_traffic, step_memory):
        with pytest.raises(ValueError, match="expected a capacity above 0"):
            fold(step)
    assert "expected a capacity above 0" in impossible(dropless, Plan(), 8)
