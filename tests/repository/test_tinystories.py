"""The recorded run on TinyStories: its data, its parts, and that it goes on where it stopped."""
import json
import time
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import tinystories
from meshbook.data import grammar, stories, tokens, vocabulary
from meshbook.models import MiniGPTConfig
from meshbook.planning import recorded_learning

TEXTS = list(grammar.stories(0, 60))
ENCODING = vocabulary.learn(TEXTS, 300)
CONFIG = MiniGPTConfig(ENCODING.n_vocab, tokens=64, embed=8, hidden=16, heads=2, layers=1)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stories")
    valid = TEXTS[40:] + TEXTS[40:42]  # two of them stand there twice
    for name, texts in (("train", TEXTS[:40]), ("valid", valid)):
        tokens.write_tokens(texts, ENCODING, folder / name)
    return stories.Stories(*(tokens.read_tokens(folder / name, ENCODING)
                             for name in ("train", "valid")), ENCODING, "some", True)


def texts(some):
    return [ENCODING.decode(some.ids[a + 1:b].tolist())
            for a, b in zip(some.starts[:-1], some.starts[1:])]


def test_stories_that_validate_are_in_training_in_no_copy(data):
    whole = tinystories.split(data, held=5)
    assert texts(whole.validation) == TEXTS[40:45]
    assert texts(whole.train) == TEXTS[:40] + TEXTS[45:]
    assert texts(tinystories.split(data, held=99).validation) == texts(data.validation)
    for some in (whole.train, whole.validation):
        assert some.ids[0] == some.ids[-1] == ENCODING.eot_token
        assert some.starts[-1] == len(some.ids) - 1
    assert whole.train.sha256 not in (whole.validation.sha256, data.train.sha256)


def test_a_run_goes_on_where_it_stopped(data, tmp_path, monkeypatch):
    later, look, passed = time.time() + 600, tinystories.look, [0.0]
    run = lambda name: tinystories.train(data, CONFIG, 6, 2, later, tmp_path / name)
    without_time = lambda looks: [
        {name: value for name, value in each.items() if name != "seconds"} for each in looks]
    looks, losses = run("whole")
    assert [each["step"] for each in looks] == [0, 2, 4, 6]
    assert list(losses) == [1, 2, 3, 4, 5, 6]
    assert looks[-1]["validation"] < looks[0]["validation"]
    seconds = [each["seconds"] for each in looks]
    assert seconds == sorted(seconds) and seconds[0] == 0 < seconds[1]
    assert all(len(each["samples"]) == len(tinystories.PROMPTS) for each in looks)

    def slow_look(state, data):
        passed[0] = 600.0 * (int(state.step) == 2)  # after the first part, time is up
        return look(state, data)

    with monkeypatch.context() as patched:
        patched.setattr(tinystories, "time", SimpleNamespace(time=lambda: time.time() + passed[0]))
        patched.setattr(tinystories, "look", slow_look)
        begun, some = run("parts")
    assert without_time(begun) == without_time(looks[:2])
    assert some == {step: losses[step] for step in (1, 2)}
    parts, found = run("parts")
    assert found == losses and without_time(parts) == without_time(looks)
    assert parts[:2] == begun and run("parts") == (parts, found)  # nothing is left to do


def test_a_look_that_was_lost_is_taken_again(data, tmp_path):
    later = time.time() + 600
    looks, losses = tinystories.train(data, CONFIG, 2, 2, later, tmp_path)
    (tmp_path / "looks.json").write_text(json.dumps(looks[:1]))  # killed between save and look
    again, found = tinystories.train(data, CONFIG, 2, 2, later, tmp_path)
    assert found == losses and again[-1]["validation"] == looks[-1]["validation"]
    assert again[-1]["seconds"] == pytest.approx(looks[-1]["seconds"], abs=0.5)


def test_losses_are_smoothed_without_one_being_lost():
    losses = {step: float(step % 7) for step in range(1, 1001)}
    smooth = tinystories.smoothed(losses, 150)
    assert len(smooth) <= 150 and smooth[-1][0] == 1000
    sizes = np.diff([0, *(step for step, _ in smooth)])
    total = sum(sizes * [loss for _, loss in smooth])
    assert total == pytest.approx(sum(losses.values()), rel=1e-3)
    assert tinystories.smoothed({1: 2.0}) == [[1, 2.0]]


def test_a_record_is_read_again_by_the_pages(tmp_path):
    record = {"stories": {"a": [1, 2]}, "training": {"looks": [{"step": 0}], "text": "né"}}
    tinystories.write(record, tmp_path / "tinystories.json")
    for part, content in record.items():
        assert recorded_learning.tinystories(part, tmp_path) == content
