"""A folder belongs to one plan: nothing of another is mixed in, and what differs is said."""
import shutil

import pytest
import tiktoken
from corpora import ENCODING, TEXTS, small_plan, write_inputs

from meshbook.data import vocabulary
from meshbook.data.buckets import Place
from meshbook.data.corpus import build_corpus
from meshbook.data.corpus_plan import claim, plan


@pytest.fixture
def inputs(tmp_path):
    return write_inputs(tmp_path / "inputs")


@pytest.fixture
def claimed(tmp_path, inputs):
    claim(Place(tmp_path / "x"), small_plan(inputs))
    return Place(tmp_path / "x")


def test_the_same_plan_claims_again_wherever_its_inputs_are(claimed, inputs, tmp_path):
    claim(claimed, small_plan(inputs))
    claim(claimed, small_plan(shutil.move(inputs, tmp_path / "elsewhere")))
    claim(claimed, small_plan(*sorted((tmp_path / "elsewhere").iterdir())))


def other_text(inputs):
    (inputs / "b.txt").write_text((inputs / "b.txt").read_text().replace("the", "The", 1))


def one_more(inputs):
    (inputs / "c.txt").write_text("More.")


def one_less(inputs):
    (inputs / "b.txt").unlink()


@pytest.mark.parametrize("change, said", [
    (other_text, "its input b.txt has other content"),
    (one_more, "its input c.txt is missing there"),
    (one_less, "its input b.txt is missing here")])
def test_other_inputs_are_refused(claimed, inputs, change, said):
    change(inputs)
    with pytest.raises(ValueError, match=f"is of another plan: {said}; expected an empty folder"):
        build_corpus(small_plan(inputs), claimed.url, ENCODING)


@pytest.mark.parametrize("settings, said", [
    ({"shard_tokens": 2000}, "its shard_tokens is 3000, here it is 2000"),
    ({"held_out": 0}, "its held_out is 0.05, here it is 0"),
    ({"piece_bytes": 4000}, "its piece_bytes is 5000, here it is 4000"),
    ({"encoding": vocabulary.learn(TEXTS, 300)}, "its (vocabulary|end) is .*, here it is")])
def test_other_settings_are_refused(claimed, inputs, settings, said):
    with pytest.raises(ValueError, match=f"is of another plan: {said}"):
        claim(claimed, small_plan(inputs, **settings))


def test_inputs_in_another_order_are_another_plan(claimed, inputs):
    with pytest.raises(ValueError, match="its inputs are in another order"):
        claim(claimed, small_plan(inputs / "b.txt", inputs / "a.jsonl"))


def test_shards_without_a_plan_are_refused(tmp_path, inputs):
    """What JAXformer's upload would have kept: it skips names that are there already."""
    Place(tmp_path / "x").write("train-000000.tokens", b"of an earlier corpus")
    with pytest.raises(ValueError, match="expected an empty folder or one with the same plan.json, "
                                         "found train-000000.tokens and none"):
        build_corpus(small_plan(inputs), tmp_path / "x", ENCODING)


def test_a_plan_that_was_cut_short_is_written_again_unless_there_is_more(claimed, inputs):
    content = bytes(claimed.read("plan.json"))
    claimed.write("plan.json", content[:100])
    claim(claimed, small_plan(inputs))
    assert bytes(claimed.read("plan.json")) == content
    claimed.write("plan.json", content[:100])
    claimed.write("train-000000.tokens", b"x")
    with pytest.raises(ValueError, match="found train-000000.tokens and .* is damaged"):
        claim(claimed, small_plan(inputs))


def test_plans_that_make_no_sense(inputs):
    with pytest.raises(ValueError, match="expected each input once, found .*b.txt twice"):
        plan([inputs, inputs / "b.txt"], ENCODING)
    with pytest.raises(ValueError, match="held_out from 0 to below 1, found 0, 10 and 0.5"):
        plan([inputs], ENCODING, 0, 10, 0.5)
    with pytest.raises(ValueError, match="held_out from 0 to below 1, found 10, 10 and 1.0"):
        plan([inputs], ENCODING, 10, 10, 1.0)
    bare = tiktoken.Encoding("bare", pat_str=".", special_tokens={},
                             mergeable_ranks={bytes([b]): b for b in range(256)})
    with pytest.raises(ValueError, match="'bare' of 256 tokens.* has no <|endoftext|>"):
        plan([inputs], bare)


def test_a_split_without_documents_is_refused(tmp_path):
    (tmp_path / "x.txt").write_text("Only one.")
    with pytest.raises(ValueError, match="no document is for validation: expected at least one, "
                                         "found 1 documents in all and held_out=1e-09"):
        build_corpus(small_plan(tmp_path / "x.txt", held_out=1e-9), tmp_path / "x", ENCODING)


def test_a_plan_that_says_no_sizes_has_the_usual_ones(inputs):
    made = plan([inputs], ENCODING)
    assert (made.shard_tokens, made.piece_bytes, made.held_out) == (100_000_000, 64 * 2**20, 0.01)
