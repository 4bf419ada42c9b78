"""A grammar of tiny stories: one description, by which they are written and by which they are read.

A story is a choice of facts (who, which animal, what is wished for, in which tense ...) and of one
way to say each of its sentences. Every sentence must agree with the same facts, so the grammar is
one of attributes (Knuth 1968): a word may be right only because of another, five sentences ago.
"""
import itertools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

# A line is a choice; the first line names its words, by which a sentence refers to them: {name}.
FACTS = {
    "tense": """
        tense
        past
        present""",
    "person": """
        name child she him his
        Lily girl  she her her
        Mia  girl  she her her
        Rose girl  she her her
        Emma girl  she her her
        Anna girl  she her her
        Tom  boy   he  him his
        Ben  boy   he  him his
        Max  boy   he  him his
        Leo  boy   he  him his
        Sam  boy   he  him his""",
    "trait": "trait little brave kind shy",
    "animal": """
        animal ran    runs
        cat    crept  creeps
        dog    ran    runs
        bird   flew   flies
        duck   walked walks
        frog   jumped jumps
        bunny  hopped hops
        mouse  ran    runs
        fox    crept  creeps""",
    "nature": "nature small funny sleepy clever",
    "colour": "colour red blue green yellow white",
    "thing": """
        thing used   uses   use
        kite  flew   flies  fly
        boat  sailed sails  sail
        drum  played plays  play
        book  read   reads  read
        bell  rang   rings  ring
        hat   wore   wears  wear
        ball  threw  throws throw
        lamp  lit    lights light""",
    "place": "place hill river forest lake farm sea",
}

# [past|present] is decided by the tense of the story.
STORY = (
    (
        "There [was|is] a {trait} {child} named {name} who [lived|lives] by the {place}.",
        "In a house by the {place} [lived|lives] a {trait} {child} named {name}.",
        "By the {place} [lived|lives] {name}, a {trait} {child}.",
    ),
    (
        "{she} [had|has] a {nature} {animal}.",
        "{his} best friend [was|is] a {nature} {animal}.",
        "A {nature} {animal} [followed|follows] {him} everywhere.",
    ),
    (
        "Every night {name} [wished|wishes] for a {colour} {thing}.",
        "More than anything, {name} [wanted|wants] a {colour} {thing}.",
        '"I wish I had a {colour} {thing}," {name} [said|says] to the {animal}.',
    ),
    (
        "One day the {animal} [{ran}|{runs}] away and [did|does] not come back.",
        "Then the {animal} [got|gets] lost in the dark.",
        "But one morning the {animal} [was|is] gone.",
    ),
    (
        "{name} [looked|looks] for it until the moon [came|comes] up.",
        "{she} [called|calls] and [called|calls], and {his} eyes [filled|fill] with tears.",
        "{she} [took|takes] {his} coat and [went|goes] to look for it.",
    ),
    (
        "At last {she} [found|finds] the {animal}, sleeping on a {colour} {thing}!",
        "Under a tree [sat|sits] the {animal}, and next to it [lay|lies] a {colour} {thing}!",
        "Then the {animal} [came|comes] home, and it [brought|brings] {him} a {colour} {thing}!",
    ),
    (
        "Now {name} [{used}|{uses}] the {colour} {thing} every day with the {animal}.",
        "{name} [hugged|hugs] the {animal}, and they [{used}|{use}] the {colour} {thing} together.",
        "{name} and the {animal} [{used}|{use}] the {colour} {thing} and [were|are] happy.",
    ),
)


@dataclass(frozen=True)
class Place:
    """One place in a sentence: the word that stands there, for every choice of the facts in it."""

    facts: tuple
    words: dict  # from the rows chosen of those facts to the word


def tables(facts: Mapping[str, str]):
    """{fact: [{column: word} of each row]}; a fact on one line is one column, its name first."""
    found = {}
    for fact, text in facts.items():
        lines = [line.split() for line in text.strip().splitlines()]
        head, *rows = lines if len(lines) > 1 else [[word] for word in lines[0]]
        found[fact] = [dict(zip(head, row, strict=True)) for row in rows]
    return found


END = "the end"
TABLES = tables(FACTS)
FACT_OF = {column: fact for fact, rows in TABLES.items() for column in rows[0]}


def place(piece: str, first: bool):
    """The Place that one piece of a sentence describes: `tree`, `{name}`, `[was|is]` ..."""
    before, core, after = re.fullmatch(r'("?)(\[.+\]|\{.+\}|\w+)(\W*)', piece).groups()
    by_tense = core.strip("[]").split("|") if core.startswith("[") else [core] * 2
    facts = ["tense"] if core.startswith("[") else []
    facts += [FACT_OF[by_tense[0].strip("{}")]] if "{" in core else []
    words = {}
    for rows in itertools.product(*(range(len(TABLES[fact])) for fact in facts)):
        word = by_tense[rows[0] if "tense" in facts else 0]
        if word.startswith("{"):
            word = TABLES[facts[-1]][rows[-1]][word.strip("{}")]
        words[rows] = before + (word[0].upper() + word[1:] if first else word) + after
    return Place(tuple(facts), words)


SENTENCES = [
    [[place(piece, i == 0) for i, piece in enumerate(way.split(" "))] for way in ways]
    for ways in STORY
]
SIZES = [len(rows) for rows in TABLES.values()] + [len(ways) for ways in SENTENCES]
COUNT = math.prod(SIZES)  # stories, no two of them equal: parse() is the inverse of nth()


def nth(number: int | np.integer):
    """The story of this number, from 0 to COUNT - 1; the number's digits are its choices."""
    digits = [int(digit) for digit in np.unravel_index(number, SIZES)]
    row, taken = dict(zip(TABLES, digits)), digits[len(TABLES):]
    places = itertools.chain(*(ways[way] for ways, way in zip(SENTENCES, taken, strict=True)))
    return " ".join(each.words[tuple(row[fact] for fact in each.facts)] for each in places)


def story(rng: np.random.Generator):
    """One story, drawn with a NumPy generator; all are equally likely."""
    return nth(rng.integers(COUNT))


def stories(seed: int | np.integer, count: int | np.integer):
    """Yield `count` different stories; the seed says which, and in which order."""
    yield from map(nth, np.random.default_rng(seed).choice(COUNT, count, replace=False))


def parse(text: str):
    """(number, None) where nth(number) is this text, else (None, the first thing that is wrong)."""
    words, at, taken = text.split(" "), 0, []
    possible = {fact: set(range(len(rows))) for fact, rows in TABLES.items()}
    for ordinal, ways in enumerate(SENTENCES, 1):
        tried = [follow(way, words, at, possible) for way in ways]
        end = max(stop for stop, _, _ in tried)
        fits = [i for i, (_, then, _) in enumerate(tried) if then]  # one at most: ways differ
        if not fits:
            expected = set().union(*(right for stop, _, right in tried if stop == end))
            return None, refusal(ordinal, words[at:end], expected, words[end:end + 1])
        at, possible, _ = tried[fits[0]]
        taken += fits
    if words[at:]:
        return None, refusal(len(SENTENCES) + 1, [], {END}, words[at:at + 1])
    rows = [min(possible[fact]) for fact in TABLES]
    return int(np.ravel_multi_index(rows + taken, SIZES)), None


def follow(sentence: Sequence[Place], words: list[str], at: int, possible: dict[str, set[int]]):
    """Read one sentence from words[at:]; `possible` are the rows left for each fact.

    Returns (where it ends, the rows left then, None), or (where it fails, None, what would fit).
    """
    for each in sentence:
        agreeing = {rows: word for rows, word in each.words.items()
                    if all(row in possible[fact] for row, fact in zip(rows, each.facts))}
        found = [rows for rows, word in agreeing.items() if words[at:at + 1] == [word]]
        if not found:
            return at, None, set(agreeing.values())
        left = {fact: {rows[i] for rows in found} for i, fact in enumerate(each.facts)}
        possible, at = possible | left, at + 1
    return at, possible, None


def refusal(
    ordinal: int, before: Sequence[str], expected: Collection[str], found: Sequence[str]
):
    """One line: which sentence, how it began, which words could have followed, which did."""
    words = " or ".join(repr(word) if word != END else word for word in sorted(expected))
    began = f", after {' '.join(before)!r}" if before else ""
    return f"sentence {ordinal}{began}: expected {words}, found {repr(found[0]) if found else END}"


def accepts(text: str):
    """Whether the text is, word for word, one of the COUNT stories."""
    return why_not(text) is None


def why_not(text: str):
    """None for a story, else one line about the first word at which it stops being one."""
    return parse(text)[1]
