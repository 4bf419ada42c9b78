"""The memory of a step over time: its top is the peak, what comes goes, checkpoints keep less."""

import dataclasses
import itertools

import pytest

from meshbook.costs.devices import DEVICES
from meshbook.models import MiniGPTConfig, ViTConfig
from meshbook.planning import costs
from meshbook.planning.estimates import PRESETS, estimate
from meshbook.planning.memory_timeline import KINDS, highest, memory_timeline

CONFIGS = (
    ViTConfig(), ViTConfig(embed=64, hidden=96, heads=4, layers=1),
    ViTConfig(embed=1024, hidden=4096, heads=16, layers=24, classes=21_841),  # a head like a block
    MiniGPTConfig(), MiniGPTConfig(250, tokens=24, embed=64, hidden=96, heads=4, layers=2),
    MiniGPTConfig(embed=1536, hidden=6144, heads=12, layers=48))
MESHES = ((1, 1), (8, 1), (1, 4), (4, 2))
of_model = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: (
    f"{type(config).__name__}-{config.embed}-{config.layers}"))


def estimates(config, **more):
    for preset, (rows, across), batch in itertools.product(PRESETS, MESHES, (8, 64, 4096)):
        yield estimate(config, preset, {"batch": rows, "model": across}, batch,
                       DEVICES["TPU v5e"], **more)


@of_model
def test_the_top_of_the_curve_is_the_peak_of_the_formula(config):
    for found in estimates(config):
        assert found.peak == highest(found.timeline).total == costs.step_peak(found.memory)


@of_model
@pytest.mark.parametrize("checkpointed", [False, True])
def test_each_kind_is_as_large_somewhere_as_the_memory_says_and_nowhere_larger(
        config, checkpointed):
    for found in estimates(config, checkpointed=checkpointed):
        assert {kind: max(moment.held[kind] for moment in found.timeline)
                for kind in KINDS} == found.memory


@of_model
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("rows", [1, 8])
def test_activations_come_and_go_block_by_block(config, checkpointed, rows):
    moments = memory_timeline(config, 8, rows=rows, checkpointed=checkpointed)
    L = config.layers
    assert [(each.phase, each.block) for each in moments] == [
        *(("forward", i) for i in range(L + 1)), ("loss", None),
        *(("backward", i) for i in range(L, -1, -1)), ("update", None)]
    waits = [each.held["activations"] for each in moments]
    block, kept = costs.block_activations(config, 8), costs.block_inputs(config, 8)
    forward, backward = range(L + 1), range(L, 0, -1)
    if checkpointed:
        assert waits == [*(i * kept for i in forward), L * kept,
                         *((i - 1) * kept + block for i in backward), 0, 0]
    else:
        assert waits == [i * block for i in (*forward, L, *backward, 0, 0)]
    for kind in ("parameters", "moments", "inputs"):
        assert len({each.held[kind] for each in moments}) == 1
    gradients = [each.held["gradients"] for each in moments]
    assert gradients == sorted(gradients) and gradients[-1] == moments[0].held["parameters"]
    assert not any(gradients[: L + 2])  # none before the backward pass
    assert [bool(each.held["logits"]) for each in moments].index(True) == L + 1


def test_gathered_weights_are_halves_of_all_that_is_split_and_stay_to_the_end():
    config = ViTConfig()
    moments = memory_timeline(config, 8, ways=2, rows=4)
    gathered = [each.held["gathered"] for each in moments]
    assert gathered[:-1] == sorted(gathered[:-1]) and gathered[-1] == 0 < gathered[0]
    # all that has a D is split, biases of hidden units and of classes are not
    own = config.layers * (3 * config.embed + config.hidden) // 2 + config.classes
    assert max(gathered) == 2 * (costs.vit_parameters(config, 2) - own)
    assert not any(each.held["gathered"] for each in memory_timeline(config, 8, ways=2))


@of_model
def test_a_block_has_the_gradients_of_its_parameters(config):
    more = dataclasses.replace(config, layers=config.layers + 1)
    count = costs.gpt_parameters if hasattr(config, "vocabulary") else costs.vit_parameters
    block = 4 * (count(more) - count(config))
    later = [each.held["gradients"] for each in memory_timeline(more, 8)
             if each.phase == "backward" and each.block]
    assert {b - a for a, b in itertools.pairwise(later)} == {block}


@of_model
def test_checkpoints_never_hold_more_and_a_single_block_gains_nothing(config):
    for kept, checkpointed in zip(estimates(config), estimates(config, checkpointed=True),
                                  strict=True):
        assert checkpointed.peak <= kept.peak
        assert checkpointed.floors["memory"] < kept.floors["memory"]
        assert checkpointed[3:6] == kept[3:6]  # work and traffic are not touched
        if config.layers == 1:
            assert checkpointed.memory == kept.memory
