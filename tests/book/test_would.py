"""What exercises, their answers and errata say that code would do or refuse is run somewhere."""
import re
from pathlib import Path

import pytest
from claims import CELL, collapsed, entries, prose, uncovered

ROOT = Path(__file__).resolve().parents[2]
WOULD = re.compile(r"\b(?:would|could not|refuse[sd]?|catch(?:es)?|complains?|notices?)\b")
PAGES = ["errata", "start-here", "01-data-loading", "02-device-mesh", "03-vision-transformer",
         "04-sharded-vision-transformer", "05-seeing-shardings", "06-nine-experiments",
         "augmentation-parity", "explorer"]


def said(page, text):
    """The prose of a page that speaks of what would happen: all of errata, others' exercises."""
    hints = " ".join(re.findall(r"^# Hint: .*$", text, re.MULTILINE))
    if page != "errata":
        text = text[text.index("\n## Exercises"):] if "\n## Exercises" in text else ""
    return f"{prose(text)} {hints}"


def not_run(page, text, listed):
    """What is wrong with the entries of [[would]]: a claim, and a line of a cell or a test."""
    plain = said(page, text)
    cells = [collapsed(cell[2]) for cell in CELL.finditer(text)]
    for entry in listed:
        if collapsed(entry["claim"]) not in plain:
            yield f"not in the prose: {entry['claim']}"
        if "cell" in entry and not any(collapsed(entry["cell"]) in cell for cell in cells):
            yield f"in no cell: {entry['cell']}"
        if "test" in entry:
            path, name = entry["test"].split("::")
            if f"def {name}(" not in (ROOT / path).read_text("utf8"):
                yield f"no such test: {entry['test']}"
        if not {"cell", "test", "because"} & entry.keys():
            yield f"run nowhere: {entry['claim']}"
    for words, sentence in uncovered(WOULD, plain, [entry["claim"] for entry in listed]):
        yield f"run nowhere: {words!r} in: {sentence}"


@pytest.mark.parametrize("page", PAGES)
def test_what_would_happen_is_run(page):
    text = (ROOT / "book" / f"{page}.md").read_text("utf8")
    assert list(not_run(page, text, entries(ROOT / "book", page).get("would", []))) == []


def test_a_sentence_that_nobody_ran_is_found():
    text = ("It would do.\n\n## Exercises\n\nThe check refuses it. So would JAX.\n\n"
            "```{code-cell} ipython3\n# Hint: Who would?\nx = refused(f)\n```\n")
    refuses = {"claim": "The check refuses it", "cell": "refused(f)"}
    jax = {"claim": "So would JAX.", "test": "tests/book/test_would.py::said"}
    who = {"claim": "Who would?", "because": "a question"}
    assert list(not_run("page", text, [refuses, jax, who])) == []
    assert len(list(not_run("page", text, []))) == 3
    assert len(list(not_run("errata", text, []))) == 4
    assert list(not_run("page", text, [refuses | {"cell": "g"}, jax, who])) == ["in no cell: g"]
    assert list(not_run("page", text, [refuses, jax | {"test": "tests/book/test_would.py::no"},
                                       who])) == ["no such test: tests/book/test_would.py::no"]
    assert list(not_run("page", text, [refuses, {"claim": jax["claim"]}, who])) == [
        "run nowhere: So would JAX."]
