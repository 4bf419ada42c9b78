"""The model of peak memory: its parts, its constants, and programs that it never saw."""
import dataclasses
import re

import pytest

from meshbook import costs, topologies
from meshbook.vit import ViTConfig

SOURCE = ViTConfig()
RECORD = topologies.recorded()
CELL = r"(v\S+) (none|\((\d+), (\d+)\)) (\d+)( embed=512)?"


def unpressed(tpu):
    """{name: (config, images a device, ways, bytes held)} of a TPU's programs with nothing done twice."""
    found = {}
    for name, each in RECORD.items():
        match = re.fullmatch(CELL, name)
        if match and match[1] == tpu and each.fits and not each.rematerialised:
            size = dataclasses.replace(SOURCE, embed=512, hidden=2048) if match[6] else SOURCE
            found[name] = size, int(match[5]) // int(match[3] or 1), int(match[4] or 1), each.held
    return found


@pytest.mark.parametrize("tpu", ["v2-8", "v5e-8", "v6e-8"])
def test_the_three_smallest_on_a_mesh_predict_all_others(tpu):
    cells = unpressed(tpu)
    three = [f"{tpu} {name}" for name in ("(4, 2) 128", "(8, 1) 128", "(8, 1) 1024")]
    working, scratch = costs.fit_peak(SOURCE, [cells[name][1:] for name in three])
    assert abs(working) < 1 and abs(scratch) < 128 * 2**20  # no more than a chip's own memory
    errors = {name: costs.vit_step_peak(size, images, ways, working, scratch) / held - 1
              for name, (size, images, ways, held) in cells.items()}
    assert len(errors) >= 9 and max(map(abs, errors.values())) <= 0.05, errors


def test_without_tiles_the_model_would_be_wrong(monkeypatch):
    monkeypatch.setattr(costs, "tiled", lambda *shape: __import__("math").prod(shape))
    size, images, ways, held = unpressed("v2-8")["v2-8 (8, 1) 4096"]
    assert costs.vit_step_peak(size, images, ways, -0.25, 20e6) < 0.8 * held


def test_tiles_round_rows_to_8_and_columns_to_128():
    assert costs.tiled(65, 65) == 72 * 128 and costs.tiled(3, 8, 128) == 3 * 8 * 128
    assert costs.tiled(1, 1) == 1024


def test_splitting_divides_all_but_the_stream():
    one, two = (costs.vit_step_memory(SOURCE, 64, ways) for ways in (1, 2))
    stream = 64 * 6 * 2 * 4 * 72 * 384
    assert two["activations"] - stream == pytest.approx((one["activations"] - stream) / 2, rel=1e-2)
    assert one["inputs"] == two["inputs"] and one["moments"] == 2 * one["gradients"]


def test_a_small_batch_needs_its_gradients_and_a_large_one_its_activations():
    small, large = (costs.vit_step_memory(SOURCE, images) for images in (1, 1024))
    rest = lambda parts: sum(parts[name] for name in ("parameters", "moments", "inputs"))
    assert costs.vit_step_peak(SOURCE, 1) == rest(small) + small["gradients"]
    assert costs.vit_step_peak(SOURCE, 1024) == rest(large) + large["activations"] + large["logits"]


def test_the_fit_finds_the_constants_that_made_the_peaks():
    cells = [(images, ways, costs.vit_step_peak(SOURCE, images, ways, 0.3, -4e7))
             for images, ways in ((16, 1), (32, 2), (128, 1), (1024, 1))]
    assert costs.fit_peak(SOURCE, cells) == pytest.approx((0.3, -4e7), rel=1e-6)
