"""The records of models that learned: what is drawn and told of them, and what they hold."""
import json
import math

import numpy as np
import pytest

from meshbook.data import tokens
from meshbook.planning import recorded_learning
from meshbook.planning.recorded_learning import (
    RESULTS, decoder_learning, draw_decoder_learning, draw_training, samples_of_decoder_learning,
    tinystories, told_of_decoder_learning, written_samples,
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


LOOKS = [{"step": step, "validation": loss, "bits per byte": loss / 4, "perplexity": 2.0,
          "samples": [f" text of {step}\n", "\0 other"], "seconds": 9.0 * step}
         for step, loss in ((0, 10.0), (20, 5.0), (40, 4.0))]
RUN = {"steps": 40, "config": {"vocabulary": 50_257}, "prompts": ["One", "Two"], "looks": LOOKS,
       "losses": [[10, 7.5], [20, 5.5], [30, 4.5], [40, 4.25]]}


@pytest.fixture
def with_stories(tmp_path):
    (tmp_path / "tinystories.json").write_text(json.dumps({"training": RUN}))
    return tmp_path


def test_without_a_record_of_tinystories_nothing_is_drawn_or_said(tmp_path, with_stories):
    assert tinystories("stories", with_stories) is None
    empty = tmp_path / "empty"
    assert tinystories("training", empty) is draw_training(empty) is None
    assert written_samples(folder=empty) == ""


def test_the_recorded_losses_are_drawn(with_stories, monkeypatch):
    drawn = []
    monkeypatch.setattr(recorded_learning, "curves", lambda *given, **more: drawn.append((given, more)))
    draw_training(with_stories)
    (((series, *_), more),) = drawn
    assert series == {"training": ((10, 20, 30, 40), (7.5, 5.5, 4.5, 4.25)),
                      "validation": ([0, 20, 40], [10.0, 5.0, 4.0])}
    assert more["marks"] == [("guessing", math.log(50_257))]


def test_the_picture_says_how_far_the_loss_fell(with_stories):
    assert "from 10.00 to 4.00 nats" in draw_training(with_stories).alt


def test_samples_are_those_of_the_looks_and_prompts_that_are_asked_for(with_stories):
    told = written_samples((0, -1), 0, with_stories)
    assert told.splitlines() == [
        "After 0 steps, validation 10.00 nats per token (2.50 bits per byte):", "One text of 0",
        "", "After 40 steps, validation 4.00 nats per token (1.00 bits per byte):",
        "One text of 40"]
    every = written_samples((0, 1, 2, 7, -1), 1, with_stories)  # 7: there is none
    assert every.count("After") == 3 and "Two· other" in every


def test_the_record_of_tinystories_in_the_repository_agrees_with_itself():
    known = tinystories("stories")
    lengths = np.repeat(np.arange(len(known["lengths"])), known["lengths"])
    assert known["shares"] == tokens.row_shares(lengths, known["T"])
    (steps,) = known["merges"].values()
    assert len({"".join(parts) for parts, _ in steps}) == 1
    assert (RESULTS / "tinystories.json").stat().st_size < 60_000
