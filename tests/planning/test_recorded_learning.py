"""The record of the decoder against MiniGPT: what is drawn and told of it, and what it holds."""
import json
import math

import pytest

from meshbook.planning import recorded_learning
from meshbook.planning.recorded_learning import (
    decoder_learning, draw_decoder_learning, samples_of_decoder_learning, told_of_decoder_learning,
)

MODELS = {
    "MiniGPT": {"parameters": 1000, "flops per token": 2e6, "finals": [[0.001, 4.5], [0.003, 4.0]],
                "looks": [[0, 7.0], [10, 5.0], [20, 4.0]], "sample": "One\n day", "accepted": 0.5},
    "decoder": {"parameters": 990, "flops per token": 3e6, "finals": [[0.001, 3.0], [0.003, 3.5]],
                "looks": [[0, 7.0], [10, 4.0], [20, 3.0]], "sample": "Two\0", "accepted": 0.75},
}
RECORD = {"source": "some stories", "vocabulary": 300, "tokens": 40_000, "steps": 20,
          "bytes per token": 4.0, "models": MODELS}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "decoder_learning.json").write_text(json.dumps({"grammar": RECORD}))
    return tmp_path


def test_without_a_record_nothing_is_drawn_or_told(tmp_path, folder):
    for corpus, where in ("grammar", tmp_path / "empty"), ("tinystories", folder):
        assert decoder_learning(corpus, where) is draw_decoder_learning(corpus, where) is None
        assert told_of_decoder_learning(corpus, where) == ""
        assert samples_of_decoder_learning(corpus, where) == ""


def test_both_curves_are_drawn_over_tokens(folder, monkeypatch):
    drawn = []
    monkeypatch.setattr(recorded_learning, "curves", lambda *given: drawn.append(given))
    draw_decoder_learning("grammar", folder)
    ((lines, *_, alt),) = drawn
    assert lines == {"MiniGPT": ([0.02, 0.04], [5.0, 4.0]), "decoder": ([0.02, 0.04], [4.0, 3.0])}
    assert "4.000 with MiniGPT and 3.000 with decoder" in alt and "40,000 tokens" in alt


def test_what_is_told_has_sizes_ends_and_both_rates(folder):
    first, *lines = told_of_decoder_learning("grammar", folder).splitlines()
    assert first == "some stories: 300 tokens in the vocabulary, 40,000 read in 20 steps"
    assert [line.split()[:2] for line in lines[::2]] == [["MiniGPT", "1,000"], ["decoder", "990"]]
    assert "3.00 MFLOP" in lines[2] and "75% accepted" in lines[2]
    assert f"3.000 nats, {3 / math.log(2) / 4:.3f} bits per byte" in lines[2]
    assert lines[3].strip() == "by highest learning rate: 3.000 at 0.001, 3.500 at 0.003"


def test_samples_are_printable(folder):
    assert samples_of_decoder_learning("grammar", folder).splitlines() == [
        "MiniGPT:", "One day", "", "decoder:", "Two·"]


@pytest.mark.parametrize("corpus", ["grammar", "tinystories"])
def test_the_record_of_the_repository_agrees_with_itself(corpus):
    found = decoder_learning(corpus)
    models = found["models"]
    theirs, ours = models["MiniGPT"], models["decoder"]
    assert 0 <= theirs["parameters"] - ours["parameters"] <= 0.02 * theirs["parameters"]
    assert ours["looks"][-1][1] < theirs["looks"][-1][1]
    assert theirs["sizes"]["tokens"] * found["rows"] * found["steps"] == found["tokens"]
    for model in models.values():
        assert model["looks"][-1] == [found["steps"], min(loss for _, loss in model["finals"])]
        assert dict(map(tuple, model["finals"]))[model["peak"]] == model["looks"][-1][1]
        assert model["losses"][-1][0] == found["steps"]
    assert [peak for peak, _ in theirs["finals"]] == [peak for peak, _ in ours["finals"]]
