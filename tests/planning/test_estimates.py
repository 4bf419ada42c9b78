"""Estimates: what real programs hold, send and compute; a TPU's compiler comes near, or stays above."""

import re
from dataclasses import replace

import pytest
from jax.sharding import AbstractMesh

from meshbook.costs.devices import DEVICES
from meshbook.models import MiniGPTConfig, ViTConfig
from meshbook.models.decoder import DecoderConfig
from meshbook.planning import decoder_costs, decoder_memory, topologies
from meshbook.planning.estimates import PRESETS, estimate
from meshbook.planning.memory_timeline import KINDS

RECORD = {name: cell for name, cell in topologies.recorded().items()
          if cell.fits and not cell.rematerialised
          and not re.search("layout=|parts=|checkpoint=|embed=|undone=|dropout=|dtype=|loss=", name)}
V5E = DEVICES["TPU v5e"]
SMALL = ViTConfig(embed=48, hidden=96, heads=4, layers=2)


def of(name):
    """The estimate of a recorded program."""
    mesh = RECORD[name].mesh or {"batch": 1, "model": 1}
    batch = int(re.search(r"(?:none|\)) (\d+)", name)[1])
    config = MiniGPTConfig() if "model=MiniGPT" in name else ViTConfig()
    return estimate(config, "fully_sharded" if "row=" in name else "tensor_parallel", mesh, batch,
                    V5E)


@pytest.mark.parametrize("name", RECORD)
def test_a_tpus_compiler_asks_for_about_as_much(name):
    assert 0.75 < RECORD[name].peak / of(name).peak < 1.25
    assert RECORD[name].flops == pytest.approx(of(name).flops, rel=0.005)


@pytest.mark.parametrize("name", [name for name in RECORD if "row=" in name or "model=" in name])
def test_a_tpus_compiler_sends_what_is_written_and_never_less_than_the_floor(name):
    cell, found = RECORD[name], of(name)
    least = found.floors["interconnect"] * V5E.interconnect
    assert cell.traffic.wire_total >= 0.999 * least
    assert cell.traffic.along("model").bytes == pytest.approx(
        found.traffic.along("model").bytes, rel=0.001)
    if "row=" in name:  # gathered in half as many bytes, reduced in pieces
        gathered = found.traffic.along("batch", kind="all-gather").bytes
        assert cell.traffic.along("batch", kind="all-gather").bytes < 0.8 * gathered
        assert cell.traffic.along("batch", kind="reduce-scatter").bytes > 0


def test_without_a_split_model_the_axis_model_repeats_the_work():
    once, twice = (estimate(SMALL, "data_parallel", {"batch": 4, "model": ways}, 16, V5E)
                   for ways in (1, 2))
    assert twice.factor == 2 * once.factor == 2 and twice.flops == once.flops
    assert twice.traffic == once.traffic and twice.memory == once.memory
    split = estimate(SMALL, "tensor_parallel", {"batch": 4, "model": 2}, 16, V5E)
    assert split.flops < 0.6 * twice.flops and split.peak < twice.peak


def test_fully_sharded_holds_less_of_the_model_and_sends_more():
    tensor, fully = (estimate(SMALL, preset, {"batch": 8, "model": 1}, 16, V5E) for preset in PRESETS[1:])
    assert fully.memory["moments"] < tensor.memory["moments"] / 7
    assert fully.traffic.total.bytes > 1.9 * tensor.traffic.total.bytes
    assert fully.floors["interconnect"] < tensor.floors["interconnect"]  # in bfloat16, in pieces
    alone = estimate(SMALL, "fully_sharded", {"batch": 1, "model": 1}, 16, V5E)
    assert not alone.traffic and alone.memory["gathered"] == 0


@pytest.mark.parametrize("preset, mesh, batch, words", [
    ("pipeline", (4, 2), 16, "one of .*'fully_sharded'.*; found 'pipeline'"),
    ("data_parallel", (3, 1), 16, "batch=16 does not divide over mesh axis 'batch' of size 3"),
    ("tensor_parallel", (1, 8), 16, "heads=4 does not divide over mesh axis 'model' of size 8"),
    ("fully_sharded", (32, 1), 32, "embed=48 does not divide .* 'batch' of size 32: 48 = 32·1")])
def test_what_cannot_be_is_refused(preset, mesh, batch, words):
    with pytest.raises(ValueError, match=words):
        estimate(SMALL, preset, dict(zip(("batch", "model"), mesh)), batch, V5E)


@pytest.mark.parametrize("config", [ViTConfig(), MiniGPTConfig()], ids=["ViT", "MiniGPT"])
def test_the_floor_of_memory_counts_nothing_twice(config):
    """By hand: Adam's seven passes and one write of gradients, two reads of weights."""
    found = estimate(config, "tensor_parallel", {"batch": 4, "model": 2}, 64, V5E)
    bytes_moved = found.floors["memory"] * V5E.bandwidth
    held = found.memory
    assert bytes_moved == pytest.approx(
        (7 + 1 + 2) * held["parameters"] + 2 * held["activations"])


DECODER = DecoderConfig(embed=64, hidden=128, heads=8, groups=4, layers=4, remat="attention")


def of_decoder(preset, mesh=(4, 2), config=DECODER, batch=16):
    return estimate(config, preset, dict(zip(("batch", "model"), mesh)), batch, V5E)


@pytest.mark.parametrize("preset", decoder_costs.PRESETS)
def test_a_decoders_estimate_is_that_of_its_formulas(preset):
    found = of_decoder(preset)
    mesh = AbstractMesh((4, 2), ("batch", "model"))
    assert found.traffic == decoder_costs.decoder_step_traffic(DECODER, mesh, 16, preset,
                                                               clipped=True)
    ways = 1 if preset == "data_parallel" else 2
    held = decoder_memory.decoder_step_memory(DECODER, 4, ways, 4, preset)
    assert found.peak == decoder_memory.decoder_step_peak(held)
    assert found.memory["activations"] == held["activations"] + held["layer"]
    assert found.memory.keys() == set(KINDS)
    assert [(each.phase, each.block) for each in found.timeline] == [
        *(("forward", i) for i in range(5)), ("loss", None),
        *(("backward", i) for i in range(4, -1, -1)), ("update", None)]
    assert found.flops * 8 == pytest.approx(found.useful * found.factor)


def test_each_stage_of_zero_holds_less_and_what_is_gathered_again_is_sent_again():
    names = "tensor_parallel", "zero1", "zero2", "fully_sharded_kept", "fully_sharded_again"
    plain, one, two, three, again = (
        of_decoder(name, config=replace(DECODER, remat="none", vocabulary=500)) for name in names)
    assert plain.memory["moments"] > 3.9 * one.memory["moments"] == 3.9 * two.memory["moments"]
    assert one.memory["gradients"] > 3.9 * two.memory["gradients"]
    assert two.memory["parameters"] > 3.9 * three.memory["parameters"]
    assert again.memory["gathered"] < three.memory["gathered"]
    gathers = [each.traffic.along("batch", kind="all-gather").bytes for each in (three, again)]
    assert gathers[0] < gathers[1] < 2 * gathers[0]
    assert plain.peak > one.peak > two.peak > three.peak > again.peak


def test_split_tokens_keep_less_and_send_as_much():
    tensor, sequence = (of_decoder(name, config=replace(DECODER, remat="none"))
                        for name in ("tensor_parallel", "sequence_parallel"))
    assert sequence.memory["activations"] < tensor.memory["activations"]
    assert sequence.traffic.wire("model") == pytest.approx(tensor.traffic.wire("model"), rel=0.01)


@pytest.mark.parametrize("preset, mesh, changes, words", [
    ("zero3", (4, 2), {}, "one of .*'zero2'.*; found 'zero3'"),
    ("tensor_parallel", (1, 8), {}, "groups=4 does not divide over mesh axis 'model' of size 8"),
    ("sequence_parallel", (2, 4), {"tokens": 30}, "tokens=30 does not divide .* of size 4"),
    ("zero1", (32, 1), {"embed": 48}, "embed=48 does not divide .* of size 32")])
def test_what_a_decoder_cannot_be_is_refused(preset, mesh, changes, words):
    with pytest.raises(ValueError, match=words):
        of_decoder(preset, mesh, replace(DECODER, **changes), 32)


def test_a_decoders_config_says_what_is_kept():
    with pytest.raises(ValueError, match="here remat='attention'"):
        estimate(DECODER, "zero1", {"batch": 1, "model": 1}, 16, V5E, checkpointed=True)
    with pytest.raises(ValueError, match="found 'zero1'"):
        estimate(ViTConfig(), "zero1", {"batch": 1, "model": 1}, 16, V5E)
