"""Vocabularies: every text comes back, GPT-2's tokens are tiktoken's, learned ones repeatable."""
import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from meshbook.data import grammar, vocabulary

TEXTS = list(grammar.stories(0, 400))
LEARNED = vocabulary.learn(TEXTS, 512)
DATA = os.environ.get("MESHBOOK_DATA")
real = pytest.mark.skipif(not DATA or not vocabulary.gpt2_path(DATA, "encoder.json").is_file(),
                          reason="MESHBOOK_DATA has no vocabulary of GPT-2")


@examples(100)
@given(st.text())
def test_every_text_comes_back(text):
    assert LEARNED.decode(LEARNED.encode_ordinary(text)) == text


@examples(100)
@given(st.binary())
def test_every_run_of_bytes_has_tokens(some):
    assert LEARNED.decode_bytes(list(some)) == some  # token b is byte b


@functools.cache
def gpt2():
    return vocabulary.gpt2(DATA)


@real
@given(st.text())
@examples(100)
def test_every_text_comes_back_from_gpt2(text):
    assert gpt2().decode(gpt2().encode_ordinary(text)) == text


@real
def test_gpt2_is_tiktokens_own(monkeypatch):
    import tiktoken

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(Path(DATA, "tiktoken-cache")))
    ours, theirs = gpt2(), tiktoken.get_encoding("gpt2")
    assert vocabulary.identity(ours) == vocabulary.identity(theirs)
    assert ours.n_vocab == 50_257 and ours.eot_token == 50_256
    text = "Once upon a time,  there was\n\na 3-year-old who didn't say “hello” … 数"
    assert ours.encode_ordinary(text) == theirs.encode_ordinary(text)


def test_learned_tokens_are_those_of_the_library_that_learned_them():
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    theirs = Tokenizer(models.BPE())
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.train_from_iterator(TEXTS, trainers.BpeTrainer(
        vocab_size=511, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    for text in [*grammar.stories(1, 50), "It's 1 a.m.,  and  they'll come!"]:
        pieces = [vocabulary.as_bytes(token) for token in theirs.encode(text).tokens]
        assert LEARNED.decode_tokens_bytes(LEARNED.encode_ordinary(text)) == pieces


def test_learned_tokens_join_the_most_frequent_pair_first():
    encoding = vocabulary.learn(["ababab cab ab"], 259)
    assert vocabulary.token_bytes(encoding)[256:258] == [b"ab", b"abab"]
    assert encoding.n_vocab == 259 and encoding.eot_token == 258


def test_a_text_with_too_few_pairs_gives_fewer_tokens():
    assert vocabulary.learn(["a a a"], 1000).n_vocab < 260


def check_merges(encoding, piece):
    rows = vocabulary.merges(encoding, piece)
    numbers = [encoding.encode_single_token(part) for part in rows[-1][0]]
    assert numbers == encoding.encode_ordinary(piece)
    assert rows[0] == ([bytes([byte]) for byte in piece.encode()], None)
    ranks = [made for _, made in rows[1:]]
    assert ranks == sorted(set(ranks))
    for (before, _), (after, made) in zip(rows, rows[1:]):
        token, at = encoding.decode_single_token_bytes(made), 0
        for part in after:  # each part stood there, or is the new token, made of two
            count = 1 if before[at] == part else 2
            assert b"".join(before[at:at + count]) == part and (count == 1 or part == token)
            at += count
        assert at == len(before) > len(after)


@examples(100)
@given(st.text(st.characters(categories=["Lu", "Ll"]), min_size=1))
def test_merges_lead_to_the_tokens_of_a_word_in_the_order_of_their_numbers(word):
    check_merges(LEARNED, " " + word)


@pytest.mark.parametrize("word", [" banana", " bananananana", " playground", "oooooo", " sheshe"])
def test_merges_join_all_pairs_of_one_kind_in_one_row(word):
    check_merges(LEARNED, word)


def test_pieces_are_not_joined_to_each_other():
    spaces = vocabulary.learn(["   x", "   y"], 258)  # pieces: "  " twice, " x" and " y"
    assert vocabulary.merges(spaces, "  ")[-1] == ([b"  "], 256)
    with pytest.raises(ValueError, match="expected one piece of text, such as ' word'; found '  x"):
        vocabulary.merges(spaces, "  x")  # the pieces are " " and " x"


@real
def test_merges_of_gpt2():
    check_merges(gpt2(), " playground")
    rows = vocabulary.merges(gpt2(), " playground")
    assert len(rows) == 11 and rows[-1] == ([b" playground"], 24817)


def test_learning_is_repeatable_in_any_order_and_any_process():
    backwards = vocabulary.identity(vocabulary.learn(TEXTS[::-1], 512))
    assert backwards == vocabulary.identity(LEARNED)
    program = ("from meshbook.data import grammar, vocabulary\n"
               "texts = list(grammar.stories(0, 400))\n"
               "print(vocabulary.identity(vocabulary.learn(texts, 512)).sha256)")
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                           env=os.environ | {"PYTHONHASHSEED": "5"}, check=True)
    assert found.stdout.strip() == backwards.sha256


def test_words_of_the_stories_become_single_tokens():
    whole = vocabulary.learn(TEXTS, 640)
    for word in (" kite", " happy", " named", " morning", " tears"):
        assert len(whole.encode_ordinary(word)) == 1


def test_the_separator_is_a_token_of_its_own_and_only_if_allowed():
    end = LEARNED.encode(vocabulary.END, allowed_special={vocabulary.END})
    assert end == [LEARNED.eot_token] == [LEARNED.n_vocab - 1]
    assert LEARNED.eot_token not in LEARNED.encode_ordinary(vocabulary.END)
    assert vocabulary.byte_lengths(LEARNED)[LEARNED.eot_token] == 0


@examples(100)
@given(st.text())
def test_lengths_add_up_to_the_bytes_of_the_text(text):
    tokens = LEARNED.encode_ordinary(text)
    assert vocabulary.byte_lengths(LEARNED)[tokens].sum() == len(text.encode())


def test_identity_tells_vocabularies_apart():
    other = vocabulary.learn(TEXTS, 500)
    renamed = vocabulary.learn(TEXTS, 512, name="other")
    swapped = dict(LEARNED._mergeable_ranks)
    swapped[b"a"], swapped[b"b"] = swapped[b"b"], swapped[b"a"]
    found = {vocabulary.identity(each) for each in (
        LEARNED, other, renamed, vocabulary.encoding_of("learned", swapped))}
    assert len(found) == 4


def test_too_small_a_vocabulary_is_refused():
    with pytest.raises(ValueError, match="257 tokens or more, found 256"):
        vocabulary.learn(TEXTS, 256)
    smallest = vocabulary.learn(TEXTS, 257)  # bytes, and what stands between documents
    assert smallest.n_vocab == 257 and smallest.eot_token == 256
    assert smallest.encode("abc") == [97, 98, 99]


def test_missing_files_of_gpt2_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected GPT-2's vocab.bpe there"):
        vocabulary.gpt2(tmp_path)


@real
@pytest.mark.parametrize("file", vocabulary.GPT2_FILES)
def test_damaged_files_of_gpt2_are_refused_and_left_alone(tmp_path, file):
    shutil.copytree(Path(DATA, "tiktoken-cache"), tmp_path / "tiktoken-cache")
    path = vocabulary.gpt2_path(tmp_path, file)
    path.chmod(0o644)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"not GPT-2's {file}, or damaged: expected SHA-256"):
        vocabulary.gpt2(tmp_path)
    assert path.read_bytes() == content


def test_a_vocabulary_comes_back_from_its_facts():
    """By JSON: its tokens, its numbers, how it cuts, and its special tokens."""
    gaps = tiktoken.Encoding("gaps", pat_str=r"\w+|\s", special_tokens={vocabulary.END: 9},
                             mergeable_ranks={b"a": 0, b"b": 1, b"ab": 7, b" ": 3})
    for encoding in (LEARNED, gaps):
        facts = json.loads(json.dumps(vocabulary.as_facts(encoding)))
        back = vocabulary.of_facts(facts)
        assert (back.name, back.eot_token) == (encoding.name, encoding.eot_token)
        assert back.special_tokens_set == encoding.special_tokens_set
        assert back.encode("abba ab") == encoding.encode("abba ab")
        assert vocabulary.as_facts(back) == facts
    back = vocabulary.of_facts(vocabulary.as_facts(LEARNED))
    assert vocabulary.identity(back) == vocabulary.identity(LEARNED)
    assert gaps.encode("abba ab") == [7, 1, 0, 3, 7]


def test_the_files_of_gpt2_lie_where_tiktoken_keeps_them(tmp_path):
    """Under the SHA-1 of the address at which they were published."""
    names = {"vocab.bpe": "6d1cbeee0f20b3d9449abfede4726ed8212e3aee",
             "encoder.json": "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6"}
    for file, name in names.items():
        path = vocabulary.gpt2_path(tmp_path, file)
        assert path == tmp_path / "tiktoken-cache" / name
