"""Stories: two sets that share none, tokens that are kept, files that are missing or odd."""
import os
from pathlib import Path

import numpy as np
import pytest

from meshbook.data import grammar, stories, vocabulary
from meshbook.data.vocabulary import END

DATA = os.environ.get("MESHBOOK_DATA")
REAL = DATA and Path(DATA, "tinystories").is_dir()


def texts_of(some, encoding):
    """The stories of a set, decoded."""
    return [encoding.decode(some.ids[a + 1:b].tolist())
            for a, b in zip(some.starts[:-1], some.starts[1:])]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache of its own, so that nothing of an earlier run is used."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.delenv("MESHBOOK_DATA", raising=False)
        patch.setattr(stories, "TRAIN", 3000)
        patch.setattr(stories, "VALIDATION", 300)
        yield folder


@pytest.fixture(scope="module")
def stand_in(cache):
    return stories.load()


def test_the_stand_in_is_the_grammars(stand_in):
    told = list(grammar.stories(stories.SEED, 3300))
    assert texts_of(stand_in.train, stand_in.encoding) == told[:3000]
    assert texts_of(stand_in.validation, stand_in.encoding) == told[3000:]
    assert all(map(grammar.accepts, told[:200]))
    assert stand_in.is_stand_in and "stand-in" in stand_in.source


def test_training_and_validation_share_no_story(stand_in):
    one, other = (set(texts_of(part, stand_in.encoding))
                  for part in (stand_in.train, stand_in.validation))
    assert len(one) == 3000 and len(other) == 300 and not one & other


def test_common_words_are_one_token(stand_in):
    assert stand_in.encoding.n_vocab == stories.SIZE
    assert max(np.diff(stand_in.train.starts)) <= 100
    words = {word for text in grammar.stories(1, 500) for word in text.split(" ")[1:]}
    sizes = [len(stand_in.encoding.encode_ordinary(" " + word.strip('",.!'))) for word in words]
    assert np.mean(np.array(sizes) == 1) > 0.9 and max(sizes) <= 3


def test_bytes_per_token_is_counted_on_the_validation_set(stand_in):
    bytes_ = sum(len(text.encode()) for text in texts_of(stand_in.validation, stand_in.encoding))
    assert stand_in.bytes_per_token == bytes_ / (len(stand_in.validation.ids) - 1)


def test_tokens_are_written_once(stand_in, cache, monkeypatch):
    monkeypatch.setattr(stories, "write_tokens", None)  # would be called, and fail
    again = stories.load()
    assert again.train.sha256 == stand_in.train.sha256
    assert {path.suffix for path in cache.rglob("*") if path.is_file()} == {".tokens"}


def test_a_damaged_copy_is_made_again(stand_in, cache):
    path = next(cache.rglob("train.tokens"))
    sound = path.read_bytes()
    for damaged in (sound[:1000], b"", sound[:-1] + b"\x07"):
        path.unlink()
        path.write_bytes(damaged)
        assert stories.load().train.sha256 == stand_in.train.sha256
        assert path.read_bytes() == sound


def test_another_recipe_is_another_file(stand_in, cache, monkeypatch):
    before = set(cache.rglob("*.tokens"))
    monkeypatch.setattr(stories, "SEED", 1)
    assert stories.load().train.sha256 != stand_in.train.sha256
    assert before < set(cache.rglob("*.tokens"))


# Text files. The vocabulary of GPT-2 is replaced, so that no real data is needed.

@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "tinystories").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    learned = vocabulary.learn(list(grammar.stories(0, 50)), 300)
    monkeypatch.setattr(vocabulary, "gpt2", lambda _: learned)
    return tmp_path


def write(folder, name, *told):
    (folder / "tinystories" / name).write_text(f"\n{END}\n".join(told), encoding="utf8")


def test_stories_are_cut_at_the_separator(folder):
    write(folder, "a.txt", "  One.\nOf two lines. ", "Two – with a dash.", "  ", "Three.\n")
    write(folder, "b.txt", "Four.", "")
    found = stories.load(folder)
    assert texts_of(found.train, found.encoding) == [
        "One.\nOf two lines.", "Two – with a dash.", "Three."]
    assert texts_of(found.validation, found.encoding) == ["Four."]
    assert found.source == "TinyStories" and not found.is_stand_in


def test_a_story_in_both_is_left_out_of_training(folder):
    write(folder, "TinyStories-train.txt", "One.", "Shared.", "Two.", " Shared. ")
    write(folder, "TinyStories-valid.txt", "Shared.", "Three.")
    found = stories.load(folder)
    assert texts_of(found.train, found.encoding) == ["One.", "Two."]
    assert texts_of(found.validation, found.encoding) == ["Shared.", "Three."]


def test_separators_at_the_borders_of_blocks_are_seen(folder, monkeypatch):
    told = [f"Story {i}, long enough." for i in range(500)]
    write(folder, "a.txt", *told)
    whole = list(stories.stories_in([folder / "tinystories" / "a.txt"]))
    text = (folder / "tinystories" / "a.txt").read_text("utf8")
    for size in (1, 7, 64):
        monkeypatch.setattr(stories, "blocks", lambda _, size=size: (
            text[i:i + size] for i in range(0, len(text), size)))
        assert list(stories.stories_in(["any"])) == whole == told


def test_tokens_stay_beside_the_text_and_follow_its_changes(folder):
    write(folder, "a.txt", "One.")
    write(folder, "b.txt", "Two.")
    stories.load(folder)
    assert len(list((folder / "tinystories").rglob("*.tokens"))) == 2
    write(folder, "a.txt", "One.", "And more.")
    assert len(stories.load(folder).train) == 2


def test_beside_read_only_text_the_users_cache_is_used(folder):
    write(folder, "a.txt", "One.")
    write(folder, "b.txt", "Two.")
    (folder / "tinystories").chmod(0o555)
    try:
        assert len(stories.load(folder).train) == 1
    finally:
        (folder / "tinystories").chmod(0o755)
    assert not list((folder / "tinystories").rglob("*.tokens"))
    assert len(list((folder / "cache").rglob("*.tokens"))) == 2


def test_the_folder_is_that_of_the_argument_or_of_the_environment_or_none(monkeypatch):
    monkeypatch.setattr(stories, "load_tinystories", lambda folder: f"texts of {folder}")
    monkeypatch.setattr(stories, "load_grammar", lambda: "the grammar")
    monkeypatch.setenv("MESHBOOK_DATA", "there")
    assert (stories.load(), stories.load("here")) == ("texts of there", "texts of here")
    monkeypatch.setenv("MESHBOOK_DATA", "")
    assert (stories.load(), stories.load("here")) == ("the grammar", "texts of here")
    monkeypatch.delenv("MESHBOOK_DATA")
    assert stories.load() == "the grammar"


def test_too_few_files_are_a_clear_error(folder):
    with pytest.raises(FileNotFoundError, match=r"found 0 \*\.txt; `make data` downloads them"):
        stories.load(folder)
    write(folder, "only.txt", "One.")
    with pytest.raises(FileNotFoundError, match=r"found 1 \*\.txt"):
        stories.load(folder)


def test_a_file_of_another_encoding_is_named(folder):
    write(folder, "b.txt", "Two.")
    (folder / "tinystories" / "a.txt").write_bytes("Caf\xe9.".encode("latin1"))
    with pytest.raises(ValueError, match=r"a\.txt is not text in UTF-8"):
        stories.load(folder)
    assert not list((folder / "tinystories").rglob("train.tokens"))


@pytest.mark.skipif(not REAL, reason="MESHBOOK_DATA has no TinyStories")
def test_real_stories():
    found = stories.load(DATA)
    assert found.encoding.n_vocab == 50_257 and found.source == "TinyStories"
    one, other = (texts_of(part, found.encoding) for part in (found.train, found.validation))
    assert not set(one) & set(other)
    assert set(one) | set(other) <= {
        text.strip() for path in Path(DATA, "tinystories").glob("*.txt")
        for text in path.read_text("utf8").split(END)}
    assert 3.5 < found.bytes_per_token < 4.5


# The download

def test_only_what_is_missing_or_damaged_is_fetched(tmp_path, monkeypatch):
    import hashlib
    from meshbook.data import downloads

    sha256 = hashlib.sha256(b"text").hexdigest()
    monkeypatch.setattr(stories, "TINYSTORIES", {"whole.txt": (4, sha256), "cut.txt": (4, sha256)})
    monkeypatch.setattr(vocabulary, "GPT2_FILES", {"encoder.json": sha256})
    asked = []
    monkeypatch.setattr(downloads, "fetch_file", lambda *what: asked.append(what))
    (tmp_path / "tinystories").mkdir()
    (tmp_path / "tinystories" / "whole.txt").write_bytes(b"text")
    (tmp_path / "tinystories" / "cut.txt").write_bytes(b"tex")
    stories.main(str(tmp_path))
    (mirrors, found, size, path), (gpt2_mirrors, _, _, gpt2_path) = asked
    assert path == tmp_path / "tinystories" / "cut.txt" and (found, size) == (sha256, 4)
    assert mirrors[0] == ("https://huggingface.co/datasets/roneneldan/TinyStories/resolve/"
                          "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64/cut.txt")
    assert mirrors[1].startswith("https://hf-mirror.com/datasets/roneneldan/TinyStories/")
    assert gpt2_path == vocabulary.gpt2_path(tmp_path, "encoder.json")
    assert gpt2_mirrors == [vocabulary.GPT2_HOME + "encoder.json"]


def test_nothing_is_downloaded_without_a_hash():
    hashes = [sha256 for _, sha256 in stories.TINYSTORIES.values()]
    hashes += vocabulary.GPT2_FILES.values()
    assert all(len(each) == 64 and set(each) <= set("0123456789abcdef") for each in hashes)
