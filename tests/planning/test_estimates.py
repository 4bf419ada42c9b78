"""Estimates: what real programs hold, send and compute; a TPU's compiler comes near, or stays above."""

import re

import pytest

from meshbook.models import MiniGPTConfig, ViTConfig
from meshbook.planning import topologies
from meshbook.planning.devices import DEVICES
from meshbook.planning.estimates import PRESETS, estimate

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
