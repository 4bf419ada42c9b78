"""Numbers with a unit in the prose: on the page by its code or its outputs, cited, or known here."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "_build" / "jupyter_execute" / "book").glob("*.ipynb"))
UNIT = r"(?:%|ms|µs|s\b|seconds?\b|minutes?\b|hours?\b|[kMGT]i?B\b|[kMGTP]?FLOPs?\b|times\b)"
NUMBER = re.compile(rf"(?<![\w.,^·/])(\d[\d,]*(?:\.\d+)?)\s?(?:million |billion )?{UNIT}")
NO_PROSE = re.compile(r"```.*?```|`[^`]*`|\$[^$]*\$", re.DOTALL)
KNOWN = {  # neither measured nor computed by the page
    ("01-data-loading", "170 MB"): "the size of CIFAR-10's archive",
    ("03-vision-transformer", "90.9%"): "of the repository that the sentence links to",
    ("03-vision-transformer", "0.3%"): "36,864 of 10.7 million parameters, both in chapter 3",
    ("06-nine-experiments", "42.8 MB"): "4 bytes for each parameter of chapter 3",
    ("07-stories-into-tokens", "36.8%"): "1 / e",
    ("07-stories-into-tokens", "26.4%"): "1 - 2 / e",
    ("09-profiling", "3.1%"): "of the source that the first paragraph cites",
    ("start-here", "13%"): "of the source that the first paragraph cites",
}

pytestmark = pytest.mark.skipif(not PAGES, reason="no executed pages in _build: make book")


def unfounded(cells):
    """The numbers of a page's prose that neither its cells nor a citation account for."""
    computed = "\n".join(_computed(cell) for cell in cells if cell["cell_type"] == "code")
    computed = computed.replace(",", "")
    for cell in cells:
        if cell["cell_type"] != "markdown":
            continue
        for paragraph in "".join(cell["source"]).split("\n\n"):
            if "{cite" not in paragraph:
                for found in NUMBER.finditer(NO_PROSE.sub("", paragraph)):
                    if not _appears(found[1].replace(",", ""), "%" in found[0], computed):
                        yield found[0]


def _computed(cell):
    outputs = [text for output in cell["outputs"]
               for text in (output.get("text", ""), *output.get("data", {}).values())]
    return "\n".join("".join(text) for text in (cell["source"], *outputs))


def _appears(number, percent, computed):
    patterns = [rf"(?<![\d.]){re.escape(number)}(?!\d)"]
    if percent:
        patterns.append(rf"(?<!\d)0\.0?{number.replace('.', '')}")
    return any(re.search(pattern, computed) for pattern in patterns)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_number_in_the_prose_comes_from_somewhere(path):
    cells = json.loads(path.read_text("utf8"))["cells"]
    assert [each for each in unfounded(cells) if (path.stem, each) not in KNOWN] == []


def test_a_number_from_nowhere_is_found():
    code = {"cell_type": "code", "source": "x = 5", "outputs": [{"text": "0.37 of 1,024 MB"}]}
    text = "37% of 1,024 MB took 250 ms, and 12 s in the source {cite}`a`.\n\nIt is 3 times `4 MB`."
    assert list(unfounded([code, {"cell_type": "markdown", "source": text}])) == ["3 times"]
    text = text.replace(" {cite}`a`", "")
    assert list(unfounded([code, {"cell_type": "markdown", "source": text}])) == [
        "250 ms", "12 s", "3 times"]
