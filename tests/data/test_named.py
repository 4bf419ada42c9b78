"""Data by its name: one set, from one place, and never that of another kind of model."""
import pytest
from corpora import ENCODING, clear_memory, small_plan, write_inputs

from meshbook.data import grammar, stories, vocabulary
from meshbook.data.corpus import build_corpus
from meshbook.data.named import load_named
from meshbook.data.shards import Corpus


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder that MESHBOOK_DATA names, with two files of stories and a small vocabulary."""
    (tmp_path / "home" / "tinystories").mkdir(parents=True)
    for name, told in (("a.txt", "One."), ("b.txt", "Two.")):
        (tmp_path / "home" / "tinystories" / name).write_text(told, "utf8")
    learned = vocabulary.learn(list(grammar.stories(0, 50)), 300)
    monkeypatch.setattr(vocabulary, "gpt2", lambda _: learned)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MESHBOOK_DATA", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def test_digits_are_embedded_whatever_was_downloaded(home):
    found = load_named("digits", text=False)
    assert found.is_stand_in and "digits" in found.source


def test_stories_lie_where_meshbook_data_says_or_in_data(home, monkeypatch):
    found = load_named("tinystories", text=True)
    assert found.source == "TinyStories" and len(found.train) == 1
    monkeypatch.delenv("MESHBOOK_DATA")
    with pytest.raises(FileNotFoundError, match="found 0 .*"):
        load_named("tinystories", text=True)
    home.rename("data")
    assert load_named("tinystories", text=True).train.sha256 == found.train.sha256


def test_the_grammar_is_that_of_the_stand_in(home, monkeypatch):
    monkeypatch.setattr(stories, "TRAIN", 300)
    monkeypatch.setattr(stories, "VALIDATION", 30)
    assert load_named("grammar", text=True).is_stand_in


def test_pictures_lie_where_meshbook_data_says(home):
    with pytest.raises(FileNotFoundError, match=f"expected CIFAR-10 in {home}/"):
        load_named("cifar10", text=False)


@pytest.mark.parametrize("name, text, others", [
    ("digits", True, "grammar, tinystories"), ("cifar10", True, "grammar, tinystories"),
    ("grammar", False, "digits, cifar10"), ("tinystories", False, "digits, cifar10")])
def test_data_of_the_other_kind_is_refused(home, name, text, others):
    with pytest.raises(ValueError, match=f"--data {name} is not for this model: expected a folder, "
                                         f"or one of {others}"):
        load_named(name, text)


def test_a_folder_is_a_corpus_where_it_has_an_index_and_else_text_files(home, tmp_path):
    assert load_named(str(home), text=True).source == "TinyStories"
    build_corpus(small_plan(write_inputs(tmp_path / "texts")), tmp_path / "corpus", ENCODING)
    found = load_named(str(tmp_path / "corpus"), text=True)
    assert isinstance(found, Corpus) and found.source.startswith("a corpus of ")


def test_a_folder_of_pictures_is_looked_for_where_it_is_said(home, tmp_path):
    with pytest.raises(FileNotFoundError, match="expected CIFAR-10 in .*/elsewhere/"):
        load_named(str(tmp_path / "elsewhere"), text=False)


def test_a_url_is_a_corpus(home):
    clear_memory()
    with pytest.raises(FileNotFoundError, match="memory://nothing.* has no index.json"):
        load_named("memory://nothing", text=True)
