"""The grammar of the stories: what it writes it reads, and nothing else."""
import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from meshbook.data import grammar

numbers = st.integers(0, grammar.COUNT - 1)
STORY = grammar.nth(987_654_321)


def test_at_least_a_million_stories():
    assert grammar.COUNT >= 10**6


@given(numbers)
@examples(100)
def test_every_number_is_a_story_and_every_story_has_one_number(number):
    assert grammar.parse(grammar.nth(number)) == (number, None)


def test_no_two_ways_to_say_a_sentence_give_the_same_words():
    """With the next test: the numbers, and so COUNT, count different texts."""
    for ways in grammar.SENTENCES:
        for one, other in itertools.combinations(ways, 2):
            assert any(not set(a.words.values()) & set(b.words.values())
                       for a, b in zip(one, other)), (one, other)


def test_every_fact_can_be_read_off_every_story():
    """Some sentence, however it is said, has a word that differs for every row of the fact."""
    tells = lambda place, fact: place.facts == (fact,) and len(set(place.words.values())) == len(
        place.words)
    for fact in grammar.TABLES:
        assert any(all(any(tells(place, fact) for place in way) for way in ways)
                   for ways in grammar.SENTENCES), fact


def test_what_a_word_says_of_each_fact_does_not_depend_on_another():
    """The parser keeps the rows left for each fact apart; so they must be independent."""
    for place in itertools.chain(*itertools.chain(*grammar.SENTENCES)):
        for word in set(place.words.values()):
            rows = {row for row, its in place.words.items() if its == word}
            assert rows == set(itertools.product(*map(set, zip(*rows))))


def test_stories_are_distinct_and_seeded():
    first = list(grammar.stories(1, 2000))
    assert len(set(first)) == 2000
    assert first == list(grammar.stories(1, 2000)) != list(grammar.stories(2, 2000))
    assert grammar.accepts(grammar.story(np.random.default_rng(3)))


def test_words_are_few_and_stories_short():
    told = list(grammar.stories(0, 3000))
    words = {word.strip('",.!').lower() for story in told for word in story.split()}
    assert 100 <= len(words) <= 190
    assert max(len(story.split()) for story in told) <= 90
    assert Counter(story[-1] for story in told).keys() == {"."}


@given(numbers, st.data())
@examples(200)
def test_another_word_is_refused_unless_it_makes_another_story(number, data):
    words = grammar.nth(number).split(" ")
    at = data.draw(st.integers(0, len(words) - 1))
    words[at] = data.draw(st.sampled_from(VOCABULARY))
    text = " ".join(words)
    read, why = grammar.parse(text)
    assert (why is None) == (read is not None)
    assert read is None or grammar.nth(read) == text


VOCABULARY = sorted({word for place in itertools.chain(*itertools.chain(*grammar.SENTENCES))
                     for word in place.words.values()})


@examples(100)
@given(st.text())
def test_any_text_is_read_without_an_error(text):
    read, why = grammar.parse(text)
    assert read is None and why


AGREEING = (
    "There was a brave boy named Tom who lived by the farm. His best friend was a funny dog. "
    "More than anything, Tom wanted a yellow kite. One day the dog ran away and did not "
    "come back. He called and called, and his eyes filled with tears. Under a tree sat the dog, "
    "and next to it lay a yellow kite! Tom and the dog flew the yellow kite and were happy.")


@pytest.mark.parametrize("right, wrong, sentence", [
    ("brave boy", "brave girl", 1),  # a name and its child
    ("who lived", "who lives", 1),  # tense, within a sentence
    ("His best", "Her best", 2),  # a name and its pronoun
    ("wanted", "wants", 3),  # tense, between sentences
    ("Tom wanted", "Ben wanted", 3),  # who it is about
    ("the dog ran", "the cat crept", 4),  # which animal it is
    ("the dog ran", "the dog flew", 4),  # how it moves
    ("did not", "does not", 4),
    ("He called", "She called", 5),
    ("his eyes", "her eyes", 5),
    ("sat the dog", "sat the fox", 6),
    ("a yellow kite!", "a red kite!", 6),  # what was wished for
    ("a yellow kite!", "a yellow boat!", 6),
    ("dog flew the yellow", "dog flew the red", 7),
    ("flew the yellow kite", "flew the yellow boat", 7),
    ("flew the", "sailed the", 7),  # what one does with it
    ("were happy", "are happy", 7),
    (" Tom and", "  Tom and", 7),
    ("were happy.", "were happy", 7),
    ("were happy.", "were happy.\n", 7),
    ("Tom and the dog flew the yellow kite and were happy.", "", 7),
    ("were happy.", "were happy. The end.", 8),
])
def test_what_does_not_agree_is_refused_with_its_sentence(right, wrong, sentence):
    assert grammar.accepts(AGREEING)
    assert AGREEING.count(right) == 1
    spoiled = AGREEING.replace(right, wrong)
    assert not grammar.accepts(spoiled)
    assert grammar.why_not(spoiled).startswith(f"sentence {sentence}")


def test_the_reason_names_what_was_expected_and_found():
    spoiled = AGREEING.replace("a yellow kite!", "a red kite!")
    assert grammar.why_not(spoiled) == (
        "sentence 6, after 'Under a tree sat the dog, and next to it lay a': "
        "expected 'yellow', found 'red'")
    assert grammar.why_not("") == "sentence 1: expected 'By' or 'In' or 'There', found ''"
    assert "found the end" in grammar.why_not("By the hill")
    assert grammar.why_not(AGREEING + " Then") == "sentence 8: expected the end, found 'Then'"
    assert grammar.why_not(AGREEING) is None


def trigram(told, rng):
    """A story by a model that knows how often a word follows two others."""
    follows = {}
    for story in told:
        words = ["", "", *story.split(" "), ""]
        for one, two, three in zip(words, words[1:], words[2:]):
            follows.setdefault((one, two), []).append(three)
    while True:
        words = ["", ""]
        while len(words) < 3 or words[-1]:
            seen = follows[tuple(words[-2:])]
            words.append(seen[rng.integers(len(seen))])
        yield " ".join(words[2:-1])


def test_three_words_in_a_row_do_not_make_a_story():
    written = trigram(grammar.stories(0, 2000), np.random.default_rng(0))
    assert sum(map(grammar.accepts, itertools.islice(written, 300))) <= 3
