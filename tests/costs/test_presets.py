"""Models by name are those of their sources, and axes of the explorer those that a model has."""
import jax.numpy as jnp
import pytest

from meshbook.costs.explorer import MODELS as EXPLORED
from meshbook.costs.plans import AXES, Plan
from meshbook.costs.presets import MODELS
from meshbook.costs.ranking import impossible
from meshbook.costs.step import describe
from meshbook.models.expert_layers import ExpertSizes

SOURCES = {  # V, T, D, F, H, G, layers: Llama Team 2024, table 3, and its configs; OLMoE, table 1
    "Llama-like, 8B": (128_256, 8192, 4096, 14_336, 32, 8, 32),
    "Llama-like, 1B": (128_256, 8192, 2048, 8192, 32, 8, 16),
    "Llama-like, 70B": (128_256, 8192, 8192, 28_672, 64, 8, 80),
    "OLMoE-like, 7B in 64 experts": (50_304, 4096, 2048, 1024, 16, 0, 16)}
NUMBERS = {"Llama-like, 8B": 8.03e9, "Llama-like, 1B": 1.236e9, "Llama-like, 70B": 70.55e9,
           "OLMoE-like, 7B in 64 experts": 6.92e9}


@pytest.mark.parametrize("name", SOURCES)
def test_a_model_that_others_published_has_their_sizes_and_computes_in_bfloat16(name):
    config = MODELS[name]
    assert (config.vocabulary, config.tokens, config.embed, config.hidden, config.heads,
            config.groups, config.layers) == SOURCES[name]
    assert config.dtype == jnp.bfloat16 and config.gated and not config.bias
    head = 0 if name == "Llama-like, 1B" else config.vocabulary * config.embed
    stored = describe(config, Plan(), 1).numbers["stored"]
    assert stored + head == pytest.approx(NUMBERS[name], rel=1e-3)


def test_experts_are_those_of_olmoe_and_of_the_code_of_jaxformer():
    assert MODELS["OLMoE-like, 7B in 64 experts"].experts == ExpertSizes(
        64, 8, capacity=1.25, auxiliary=0.01)
    jaxformer = MODELS["JAXformer, with 16 experts"]
    assert jaxformer.dtype == jnp.bfloat16 and jaxformer.experts == ExpertSizes(
        16, 2, shared=768, capacity=1.5, router="sigmoid", auxiliary=1e-4)


@pytest.mark.parametrize("name", EXPLORED)
def test_the_explorer_offers_the_axes_over_which_a_model_can_be_split(name):
    config, axes = EXPLORED[name]
    can = {axis for axis in AXES if not impossible(config, Plan(rules="tensor_parallel", **{axis: 2}), 64)}
    assert sorted(axes) == sorted(can) and list(axes) == [axis for axis in AXES if axis in axes]


@pytest.mark.parametrize("plan, words", [
    (Plan(8, rules="zero2"), "zero2"), (Plan(8, microbatches=2, rules="zero2"),
     "zero2, 2 microbatches"), (Plan(2, stage=4, rules="zero1"), "zero1, gpipe"),
    (Plan(2, context=4, rules="zero1"), "zero1, ring"),
    (Plan(4, stage=2, rules="zero1", schedule="lockstep", microbatches=3, remat="all"),
     "zero1, lockstep, 3 microbatches, remat all")])
def test_a_plan_says_what_it_has_more_than_one_of(plan, words):
    assert plan.how == words and plan.name == f"{plan.where}: {words}"
