"""Each message of the page on troubleshooting is provoked by the cell below its heading."""
import re
from pathlib import Path

import pytest
from run_chapter import cells

PAGE = Path(__file__).resolve().parents[2] / "book" / "troubleshooting.md"

HEAD, *PARTS = re.split(r'^### "', PAGE.read_text("utf8"), flags=re.MULTILINE)
MESSAGES = [part.partition('"\n')[0] for part in PARTS]


@pytest.fixture(scope="module")
def said():
    """{message: what its cell prints}, the page run from top to bottom."""
    printed = []
    namespace = {"print": lambda *words: printed.append(" ".join(map(str, words)))}
    found = {}
    for code in cells(HEAD):
        exec(code, namespace)
    for message, part in zip(MESSAGES, PARTS, strict=True):
        printed.clear()
        for code in cells(part):
            exec(code, namespace)
        found[message] = " ".join(" ".join(printed).split())
    return found


@pytest.mark.parametrize("message", MESSAGES)
def test_the_message_is_what_the_cell_prints(said, message):
    assert message in said[message]


def test_there_are_fifteen_at_least():
    assert len(set(MESSAGES)) == len(MESSAGES) >= 15
