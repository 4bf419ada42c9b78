"""Numbers with a unit in the prose: in the page's code or outputs, cited, or known here."""

import re
from pathlib import Path

import pytest
from bs4 import BeautifulSoup

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "_build" / "html" / "book"
PAGES = [path for path in sorted((ROOT / "book").glob("*.md"))
         if "code-cell" in path.read_text("utf8")]
UNIT = r"(?:%|ms|µs|s\b|seconds?\b|minutes?\b|hours?\b|[kMGT]i?B\b|[kMGTP]?FLOPs?\b|times\b)"
NUMBER = re.compile(rf"(?<![\w.,^·/])(\d[\d,]*(?:\.\d+)?)\s?(?:million |billion )?{UNIT}")
NO_PROSE = re.compile(r"^```\{code-cell\}.*?^```$|`[^`\n]*`|\$[^$]*\$", re.DOTALL | re.MULTILINE)
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

needs_site = pytest.mark.skipif(not SITE.exists(), reason="no site in _build/html: make book")


def unfounded(text, page):
    """The numbers of a page's prose that neither its cells nor a citation account for."""
    cells = "\n".join(map(str, BeautifulSoup(page, "html.parser").select("div.cell")))
    computed = re.sub(r"<span[^>]*>|</span>", "", cells).replace(",", "")
    for paragraph in re.split(r"\n\n", NO_PROSE.sub("", text)):
        if "{cite" not in paragraph:
            for found in NUMBER.finditer(paragraph):
                if not _appears(found[1].replace(",", ""), "%" in found[0], computed):
                    yield found[0]


def _appears(number, percent, computed):
    end = "" if "." in number else r"(?!\d)"  # 5.33 stands for 5.333
    patterns = [rf"(?<![\d.]){re.escape(number)}{end}"]
    if percent:
        patterns.append(rf"(?<!\d)0\.0?{number.replace('.', '')}")
    return any(re.search(pattern, computed) for pattern in patterns)


@needs_site
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_number_in_the_prose_comes_from_somewhere(path):
    page = (SITE / f"{path.stem}.html").read_text("utf8")
    found = unfounded(path.read_text("utf8"), page)
    assert [each for each in found if (path.stem, each) not in KNOWN] == []


def test_a_number_from_nowhere_is_found():
    page = '<div class="cell">x = <span>5</span>: 0.37 of 1,024 MB</div>'
    text = "37% of 1,024 MB took 250 ms, and 12 s in the source {cite}a.\n\nIt is 3 times `4 MB`."
    assert list(unfounded(text, page)) == ["3 times"]
    code = "```{code-cell} ipython3\n9 s\n\n8 s\n```\n"
    text = code + text.replace(" {cite}a", "")
    assert list(unfounded(text, page)) == ["250 ms", "12 s", "3 times"]
