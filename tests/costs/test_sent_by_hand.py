"""What a step sends beside sums of its products, line by line, against numbers made by hand."""
from dataclasses import replace

import pytest

from meshbook.costs.plans import Plan
from meshbook.costs.step import describe
from meshbook.costs.transfers import (
    LOADS, in_layers, of_context, of_experts, of_scalars, of_stages)
from meshbook.models.decoder import DecoderConfig
from meshbook.models.expert_layers import ExpertSizes

# 4 heads of 12, keys of 2 of them; 8 rows of 32 tokens; numbers of 2 bytes
GROUPED = DecoderConfig(500, tokens=32, embed=48, hidden=64, heads=4, groups=2, layers=4)
EXPERTS = replace(GROUPED, experts=ExpertSizes(4, 2, capacity=1.0))


def lines(of, config, plan, *more, rows=8):
    """(when, kind, axes, count, bytes) of each line that is sent."""
    found = of(describe(config, plan, rows), *more)
    return [(each.when, each.kind, each.axes, each.count, each.bytes) for each in found]


def test_without_the_axis_nothing_travels_along_it():
    plan = Plan(2)
    assert not lines(of_context, GROUPED, plan, 2) and not lines(of_stages, GROUPED, plan, 2)
    assert not lines(of_experts, GROUPED, plan, 2, True)


@pytest.mark.parametrize("ways", [2, 4])
@pytest.mark.parametrize("remat", ["none", "products", "all"])
def test_a_ring_carries_keys_and_values_round_and_back(ways, remat):
    plan = Plan(2, context=ways, method="ring", remat=remat)
    keys = 4 * (32 // ways) * 2 * 12  # of a device's 4 rows
    around, again = 2 * (ways - 1), 1 + (remat != "none")
    axes, turns = ("context",), 4 * around  # of four layers, for keys and for values
    assert lines(of_context, GROUPED, plan, 2) == [
        ("forward", "collective-permute", axes, turns, turns * 2 * keys),
        ("backward", "collective-permute", axes, turns * again, turns * again * 2 * keys),
        ("backward", "collective-permute", axes, turns, turns * 4 * keys)]


def test_gathered_keys_are_those_of_all_devices_and_their_gradients_are_float32():
    plan = Plan(2, context=4, method="gather")
    keys = 4 * 8 * 2 * 12
    assert lines(of_context, GROUPED, plan, 2) == [
        ("forward", "all-gather", ("context",), 4 * 2, 4 * 2 * 4 * 2 * keys),
        ("backward", "all-gather", ("context",), 4 * 2, 4 * 2 * 4 * 2 * keys),
        ("backward", "reduce-scatter", ("context",), 4 * 2, 4 * 2 * 4 * keys)]


def test_ulysses_trades_tokens_for_heads_both_ways():
    plan = Plan(2, context=2, method="ulysses", remat="none")
    both = 2 * 4 * 16 * (4 + 2) * 12  # bytes of queries and keys, or of results and values
    assert lines(of_context, GROUPED, plan, 2) == [
        ("forward", "all-to-all", ("context",), 4 * 4, 4 * 2 * both),
        ("backward", "all-to-all", ("context",), 4 * 4, 4 * 2 * both)]


@pytest.mark.parametrize("remat", ["none", "all"])
def test_tokens_travel_to_experts_and_back(remat):
    plan = Plan(2, expert=4, remat=remat)
    slots = 1 * 32 * 2 // 4  # of a row and an expert: each token has two, each expert a quarter
    size = 4 * slots * 48  # of a row, for all experts
    again = remat != "none"
    *there, loads = lines(of_experts, EXPERTS, plan, 2, True)
    assert there == [("forward", "all-to-all", ("expert",), 8, 8 * 2 * size),
                     ("backward", "all-to-all", ("expert",), 8 * again, 8 * again * 2 * size),
                     ("backward", "all-to-all", ("expert",), 8, 8 * 2 * size)]
    assert loads == ("forward", "all-reduce", ("batch", "expert"), None,
                     4 * 4 * (LOADS + again) * 4)
    assert lines(of_experts, EXPERTS, plan, 2, False)[-1][-1] == 0


@pytest.mark.parametrize("schedule, turns", [("gpipe", 5), ("lockstep", 6), ("one_f_one_b", 14)])
def test_stages_hand_on_one_microbatch_in_each_turn(schedule, turns):
    plan = Plan(2, stage=2, microbatches=4, schedule=schedule)
    one = 2 * (8 // 2 // 4) * 32 * 48
    forward, back, *ends = lines(of_stages, GROUPED, plan, 2)
    assert forward == ("forward", "collective-permute", ("stage",), turns, turns * one)
    assert back == ("backward", "collective-permute", ("stage",), turns, turns * one)
    assert [(kind, size) for _, kind, _, _, size in ends] == [
        ("all-reduce", 4 * one), ("all-reduce", 4 * 48), ("all-reduce", 4 * one)]
    assert in_layers(describe(GROUPED, plan, 8)) == (5 if schedule == "gpipe" else 4)


def test_of_split_gradients_norms_are_summed_only_for_clipping():
    step = Plan(4, rules="fully_sharded")
    plain, clipped = (lines(of_scalars, GROUPED, step, clip) for clip in (False, True))
    assert clipped[:len(plain)] == plain and len(clipped) == len(plain) + 1
    when, kind, axes, _, size = clipped[-1]
    assert (when, kind, axes) == ("update", "all-reduce", ("batch",)) and size % 4 == 0 < size
