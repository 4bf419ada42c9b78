"""A corpus from the command line, as somebody with texts of their own makes it."""
import json

import pytest

from meshbook.data import make_corpus
from meshbook.data.shards import read_corpus


@pytest.fixture
def texts(tmp_path):
    found = [f"The {n}th bird sings of {n * n} rivers and of the sea." for n in range(300)]
    half = len(found) // 2
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"body": each}) + "\n" for each in found[:half]), "utf8")
    (tmp_path / "b.jsonl").write_text(
        "".join(json.dumps({"body": each}) + "\n" for each in found[half:]), "utf8")
    return found


def command(tmp_path, *more):
    return [str(tmp_path / "corpus"), str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"),
            "--vocabulary", "learn:400", "--workers", "2", "--field", "body",
            "--held-out", "0.1", "--shard-tokens", "900", *more]


def test_every_document_is_there_and_again_nothing_changes(tmp_path, texts, capsys):
    make_corpus.main(command(tmp_path))
    made = read_corpus(tmp_path / "corpus")
    found = [*made.train.documents(made.encoding), *made.validation.documents(made.encoding)]
    assert sorted(found) == sorted(texts) and len(made.validation) > 5
    said = capsys.readouterr().out
    assert f"train: {len(made.train)} documents" in said and "validation:" in said
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "corpus").iterdir()}
    make_corpus.main(command(tmp_path))
    assert before == {path.name: path.stat().st_mtime_ns
                      for path in (tmp_path / "corpus").iterdir()}


@pytest.mark.parametrize("name", ["learn", "learn:many", "gpt-9"])
def test_an_unknown_vocabulary_is_refused(name):
    with pytest.raises(ValueError, match=f"gpt2, learn:SIZE, or one of tiktoken's .*{name}"):
        make_corpus.encoding_named(name, [], "text")
