"""Spot the bug: each check fails on the published code, holds on the mended, and tells them apart."""
import re
from pathlib import Path

import pytest
from run_chapter import cells

PAGE = Path(__file__).resolve().parents[2] / "book" / "errata.md"

TEXT = PAGE.read_text("utf8")
RIDDLES = TEXT[:TEXT.index("\n## The numbers of the answers\n")]
HEAD, *SECTIONS = re.split(r"^### (?=\d+\. )", RIDDLES, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def setup():
    """What the page's first cells define, its two verdicts replaced by notes of what they saw."""
    namespace = {}
    for code in cells(HEAD):
        exec(code, namespace)
    return namespace


def judged(setup, section):
    """[(verdict, check, subject)] of a section's cells."""
    seen, namespace = [], dict(setup)
    for verdict in ("fails", "holds"):
        namespace[verdict] = lambda check, subject, verdict=verdict: seen.append(
            (verdict, check, subject))
    for code in cells(section):
        exec(code, namespace)
    return seen


def test_there_are_as_many_as_the_page_says():
    said = re.search(r"find ([\w-]+) faults", TEXT)[1]
    assert said == {26: "twenty-six"}[len(SECTIONS)]
    assert [int(each.split(".")[0]) for each in SECTIONS] == list(range(1, len(SECTIONS) + 1))


@pytest.mark.parametrize("section", SECTIONS, ids=lambda each: each.splitlines()[0])
def test_the_check_fails_before_and_holds_after(setup, section):
    (first, check, faulty), (second, same, mended) = judged(setup, section)
    assert (first, second) == ("fails", "holds") and check is same
    with pytest.raises(AssertionError) as caught:
        check(faulty)
    assert str(caught.value) and "assert " not in str(caught.value)  # it says what is wrong
    check(mended)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda each: each.splitlines()[0])
def test_hint_and_answer_are_folded(section):
    assert re.search(r":tags: \[hide-input\]\n:mystnb: .*hint.*\n# Hint: \w", section)
    assert section.count("tags: [hide-cell]") == 1
    assert re.search(r"\{cite\}`\w+`", section)


def refuse(subject):
    raise AssertionError("no")


def test_a_verdict_that_is_wrong_stops_the_page(setup):
    with pytest.raises(AssertionError):
        setup["fails"](lambda subject: None, None)
    with pytest.raises(AssertionError, match="ZeroDivisionError|division"):
        setup["fails"](lambda subject: 1 / 0, None)
    with pytest.raises(AssertionError, match="no"):
        setup["holds"](refuse, None)
