"""Two words for bytes: what is said to be sent or received is wire bytes, never result bytes."""
import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "book").glob("*.md"))
MODULES = sorted((ROOT / "meshbook").glob("**/*.py"))
TRAVELS = re.compile(r"\breceiv(?:e|es|ed|ing)\b|"
                     r"\bbytes\b[^.]*\b(?:sends?|sent)\b|\b(?:sends?|sent)\b[^.]*\bbytes\b", re.I)
LINKS = re.compile(r"\bwire\b|\blinks?\b", re.I)


def sentences(text):
    """The sentences of a page or of docstrings, each on one line; a cell's code is its lines."""
    for block in re.split(r"\n\s*\n|^```.*$|^\|", text, flags=re.MULTILINE):
        yield from re.split(r"(?<=[.?!])\s+", " ".join(block.split()))


def docstrings(source):
    """The docstrings of a module and of all that it defines."""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef
    found = (node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds))
    return "\n\n".join(filter(None, map(ast.get_docstring, found)))


def confused(text):
    """Sentences that say of bytes that they are sent or received, and not over which links."""
    return [each for each in sentences(text) if TRAVELS.search(each) and not LINKS.search(each)]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_no_page_calls_result_bytes_received(path):
    assert confused(path.read_text("utf8")) == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_no_docstring_calls_result_bytes_received(path):
    assert confused(docstrings(path.read_text("utf8"))) == []


@pytest.mark.parametrize("text", [
    "Bytes that one device receives along each mesh axis in a tensor-parallel step.",
    'figures.bars(found, "MB", alt="Bytes that one core of a v2 receives in a step")',
    "A device sends 12,288 bytes along `model`.", "So many bytes are sent.\n\nOver its links."])
def test_what_was_wrong_is_found(text):
    assert len(confused(text)) == 1


def test_a_docstring_that_is_wrong_is_found():
    wrong = 'def cost():\n    """Bytes that a device receives."""\n'
    assert len(confused(docstrings(wrong))) == 1
    assert confused(docstrings(wrong.replace("Bytes", "Wire bytes"))) == []
