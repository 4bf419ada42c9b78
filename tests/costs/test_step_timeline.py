"""The memory of a step of the ViT and MiniGPT, block by block, and what TPUs' compilers do."""
import itertools
import re
from dataclasses import replace

import pytest

from meshbook.costs.devices import DEVICES
from meshbook.costs.machines import Machine
from meshbook.costs.memory import step_memory
from meshbook.costs.plans import Plan
from meshbook.costs.seconds import bounds
from meshbook.costs.step import describe
from meshbook.costs.timeline import KINDS, step_peak, step_timeline
from meshbook.costs.traffic import step_traffic
from meshbook.costs.work import step_work
from meshbook.models import MiniGPTConfig, ViTConfig
from meshbook.planning import topologies
from meshbook.planning.programs import step_of

CONFIGS = (
    ViTConfig(), ViTConfig(embed=1024, hidden=4096, heads=16, layers=24, classes=21_841),
    MiniGPTConfig(), MiniGPTConfig(250, tokens=24, embed=64, hidden=96, heads=4, layers=2))
of_model = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: (
    f"{type(config).__name__}-{config.embed}-{config.layers}"))
RECORD = {name: cell for name, cell in topologies.recorded().items()
          if cell.fits and not cell.rematerialised
          and not re.search("(layout|parts|checkpoint|embed|undone|dropout|dtype|loss)=", name)}


def planned(config, rows=1, ways=1, remat="none", batch=8, **plan):
    rules = "fully_sharded" if rows > 1 else "tensor_parallel"
    return describe(config, Plan(rows, model=ways, rules=rules, remat=remat, **plan), rows * batch)


@of_model
@pytest.mark.parametrize("remat", ["none", "all"])
@pytest.mark.parametrize("rows", [1, 8])
def test_activations_come_and_go_block_by_block(config, remat, rows):
    step, L = planned(config, rows, remat=remat), config.layers
    moments, found = step_timeline(step), step_memory(step)
    assert [(each.phase, each.block) for each in moments] == [
        *(("forward", i) for i in range(L + 1)), ("loss", None),
        *(("backward", i) for i in range(L, -1, -1)), ("update", None)]
    block = step_memory(planned(config, rows)).activations // L
    kept = found.activations // L
    assert found.layer == (block - kept if remat == "all" else 0)
    waits = [each.held["activations"] for each in moments]
    assert waits == [*(i * kept for i in range(L + 1)), L * kept,
                     *((i - 1) * kept + block for i in range(L, 0, -1)), 0, 0]
    for kind in ("parameters", "moments", "inputs"):
        assert len({each.held[kind] for each in moments}) == 1
    gradients = [each.held["gradients"] for each in moments]
    assert gradients == sorted(gradients) and not any(gradients[:L + 2])
    assert gradients[-1] == moments[0].held["parameters"]
    assert [bool(each.held["logits"]) for each in moments].index(True) == L + 1
    assert step_peak(step) == max(each.total for each in moments)


@of_model
def test_a_block_has_the_gradients_of_its_parameters(config):
    more = replace(config, layers=config.layers + 1)
    block = 4 * (planned(more).numbers["used"] - planned(config).numbers["used"])
    later = [each.held["gradients"] for each in step_timeline(planned(more))
             if each.phase == "backward" and each.block]
    assert {b - a for a, b in itertools.pairwise(later)} == {block}
    last = step_timeline(planned(config))[config.layers + 2]  # with the last block's activations
    whole = planned(config)
    head = sum(each.gradients for each in whole.placed[-len(whole.table.last):])
    assert last.held["gradients"] == 4 * head


def test_gathered_weights_are_halves_of_all_that_is_split_and_stay_to_the_end():
    config = ViTConfig()
    step = planned(config, rows=4, ways=2)
    gathered = [each.held["gathered"] for each in step_timeline(step)]
    assert gathered[:-1] == sorted(gathered[:-1]) and gathered[-1] == 0 < gathered[0]
    # all that has a D is split, biases of hidden units and of classes are not
    own = config.layers * (3 * config.embed + config.hidden) // 2 + config.classes
    assert max(gathered) == 2 * (step.numbers["used"] - own)
    assert not any(each.held["gathered"] for each in step_timeline(planned(config, ways=2)))


@of_model
def test_checkpoints_never_hold_more_and_each_kind_is_as_large_somewhere(config):
    for rows, ways, batch in ((1, 1, 8), (8, 1, 64), (4, 2, 8)):
        kept, less = (planned(config, rows, ways, remat, batch) for remat in ("none", "all"))
        assert step_peak(less) <= step_peak(kept)
        for step in (kept, less):
            found = step_memory(step)
            moments = step_timeline(step)
            assert {kind: max(each.held[kind] for each in moments) for kind in KINDS} == {
                kind: getattr(found, kind) for kind in KINDS} | {
                    "activations": found.activations + found.layer}


@pytest.mark.parametrize("name", RECORD)
def test_a_tpus_compiler_does_about_the_same_and_sends_no_less_than_the_bound(name):
    cell, step = RECORD[name], step_of(name, RECORD[name].mesh)
    assert 0.75 < cell.peak / step_peak(step) < 1.25
    assert step_work(step).done == pytest.approx(cell.flops, rel=0.005)
    if "row=" in name or "model=" in name:
        traffic = step_traffic(step, clipped="model=" in name)
        assert cell.traffic.along("model").bytes == pytest.approx(
            traffic.along("model").bytes, rel=0.001)
    if "row=" in name:  # gathered in half as many bytes, reduced in pieces
        gathered = traffic.along("batch", kind="all-gather").bytes
        assert 0 < cell.traffic.along("batch", kind="all-gather").bytes < 0.8 * gathered
        assert cell.traffic.along("batch", kind="reduce-scatter").bytes > 0


def test_the_bound_of_memory_counts_nothing_twice():
    """By hand: Adam's seven passes and one write of gradients, two reads of weights."""
    device = DEVICES["TPU v5e"]
    for config in (ViTConfig(), MiniGPTConfig()):
        plan = Plan(4, model=2, rules="tensor_parallel")
        step = describe(config, plan, 64)
        found = bounds(step, device, Machine(device, (2, 4)).groups(plan.sizes))
        held = step_memory(step)
        assert found["memory"] * device.bandwidth == pytest.approx(
            (7 + 1 + 2) * held.parameters + 2 * held.activations)
