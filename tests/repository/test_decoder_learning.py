"""The decoder against MiniGPT: equal tokens, no more parameters, and a whole small comparison."""
import jax
import pytest

from benchmarks import decoder_learning as learning
from benchmarks import tinystories
from meshbook.data import grammar, stories, tokens, vocabulary
from meshbook.planning import recorded_learning

TEXTS = list(grammar.stories(0, 60))
ENCODING = vocabulary.learn(TEXTS, 300)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stories")
    for name, texts in (("train", TEXTS[:40]), ("validation", TEXTS[40:])):
        tokens.write_tokens(texts, ENCODING, folder / name)
    return stories.Stories(*(tokens.read_tokens(folder / name, ENCODING)
                             for name in ("train", "validation")), ENCODING, "some", True)


@pytest.mark.parametrize("corpus, size", [("grammar", 640), ("tinystories", learning.VOCABULARY)])
def test_the_decoder_has_no_more_parameters_at_the_sizes_that_are_trained(corpus, size):
    with jax.set_mesh(learning.make_mesh((1, 1))):
        models = {name: {"parameters": sum(x.size for x in jax.tree.leaves(jax.eval_shape(
            lambda make=make: learning.nnx.state(make(), learning.nnx.Param))))}
            for name, make in learning.makers(corpus, size).items()}
    learning.check(models)


@pytest.mark.parametrize("ours", [101, 97])
def test_more_parameters_or_far_fewer_are_refused(ours):
    with pytest.raises(ValueError, match=f"the decoder has {ours} parameters; expected at most "
                                         "MiniGPT's 100, and at most 2% fewer"):
        learning.check({"MiniGPT": {"parameters": 100}, "decoder": {"parameters": ours}})


def test_a_small_comparison_is_recorded_and_read_again(data, tmp_path, monkeypatch):
    small = dict(tokens=32, embed=16, heads=2)
    monkeypatch.setitem(learning.SIZES, "grammar", (
        4, 4, dict(hidden=32, layers=1, **small), dict(hidden=74, layers=2, **small)))
    monkeypatch.setattr(learning, "PARTS", 2)
    monkeypatch.setattr(learning, "JUDGED", 2)
    monkeypatch.setattr(learning, "load", lambda corpus, folder: data)
    record = tmp_path / "decoder_learning.json"
    learning.main(["grammar", "--record", str(record)])
    found = recorded_learning.decoder_learning("grammar", tmp_path)
    assert found["tokens"] == 4 * 4 * 32 and list(found["models"]) == ["MiniGPT", "decoder"]
    for model in found["models"].values():
        assert model["looks"][0][1] > model["looks"][-1][1]
        assert [peak for peak, _ in model["finals"]] == list(learning.PEAKS)
        assert model["sample"].startswith("By the sea") and 0 <= model["accepted"] <= 1
        assert model["flops per token"] > 6 * 16 * found["vocabulary"]
    assert "by highest" in recorded_learning.told_of_decoder_learning("grammar", tmp_path)


def test_texts_come_back_from_their_tokens_and_none_of_validation_trains(data, monkeypatch):
    assert learning.texts_of(data.train, ENCODING) == TEXTS[:40]
    monkeypatch.setattr(stories, "load_tinystories", lambda folder: data)
    read = learning.load("tinystories", "folder", 280)
    assert read.encoding.n_vocab == 280 and read.source == data.source
    held = tinystories.split(data)
    for name in ("train", "validation"):
        assert learning.texts_of(getattr(read, name), read.encoding) == learning.texts_of(
            getattr(held, name), ENCODING)
