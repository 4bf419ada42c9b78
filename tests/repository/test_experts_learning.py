"""Experts against a dense decoder: equal active parameters, and a whole small comparison."""
import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks import decoder_learning, experts_learning
from meshbook.data import grammar, stories, tokens, vocabulary
from meshbook.planning import recorded_learning
from meshbook.planning.recorded_learning import draw_experts_learning, told_of_experts_learning

TEXTS = list(grammar.stories(0, 60))
ENCODING = vocabulary.learn(TEXTS, 300)


@pytest.fixture
def data(tmp_path):
    for name, texts in (("train", TEXTS[:40]), ("validation", TEXTS[40:])):
        tokens.write_tokens(texts, ENCODING, tmp_path / name)
    return stories.Stories(*(tokens.read_tokens(tmp_path / name, ENCODING)
                             for name in ("train", "validation")), ENCODING, "some", True)


@pytest.mark.parametrize("corpus", experts_learning.PLANS)
def test_a_token_uses_as_many_parameters_at_the_sizes_that_are_trained(corpus):
    both = experts_learning.configs(corpus, 2048)
    assert both["dense"].experts is None and both["experts"].experts == (
        experts_learning.PLANS[corpus].experts)


def test_more_active_parameters_are_refused(monkeypatch):
    plan = experts_learning.PLANS["grammar"]
    many = plan._replace(experts=dataclasses.replace(plan.experts, active=8))
    monkeypatch.setitem(experts_learning.PLANS, "grammar", many)
    with pytest.raises(ValueError, match="parameters with experts; expected at most the dense"):
        experts_learning.configs("grammar", 640)


def test_a_small_comparison_is_recorded_and_read_again(data, tmp_path, monkeypatch):
    plan = experts_learning.PLANS["grammar"]
    small = plan._replace(rows=4, dense=24, hidden=8,
                          shared=dict(tokens=16, embed=16, heads=2, layers=1))
    monkeypatch.setitem(experts_learning.PLANS, "grammar", small)
    monkeypatch.setattr(experts_learning, "MOST_APART", 0.2)
    monkeypatch.setattr(experts_learning, "load", lambda corpus, folder, size: data)
    monkeypatch.setattr(experts_learning, "ProcessPoolExecutor",
                        lambda jobs, **_: ThreadPoolExecutor(jobs))
    monkeypatch.setattr(decoder_learning, "PARTS", 2)
    assert told_of_experts_learning("grammar", tmp_path) == ""
    assert draw_experts_learning("grammar", tmp_path) is None
    record = tmp_path / "experts_learning.json"
    experts_learning.main(["grammar", "--steps", "4", "--seeds", "3", "--peaks", "0.01",
                           "--record", str(record)])
    found = json.loads(record.read_text("utf8"))["grammar"]
    assert found["tokens"] == 4 * 4 * 16 and list(found["models"]) == ["dense", "experts"]
    for model in found["models"].values():
        ends = [looks[-1][1] for looks in model["looks"]]
        assert model["finals"] == [[0.01, ends]] and len(ends) == 1
        assert all(looks[0][1] > looks[-1][1] for looks in model["looks"])
    dense, experts = found["models"].values()
    assert dense["used"] == dense["parameters"] and experts["used"] < experts["parameters"]
    drawn = []
    monkeypatch.setattr(recorded_learning, "curves", lambda *given: drawn.append(given))
    draw_experts_learning("grammar", tmp_path)
    assert list(drawn[0][0]) == ["dense", "experts"]
    assert drawn[0][0]["dense"][1][-1] == dense["looks"][0][-1][1]
    assert f"{dense['used']:,} of" in told_of_experts_learning("grammar", tmp_path)
