"""Numbers in the prose: in the page's code or outputs, cited, or known here."""

import re
from pathlib import Path

import pytest
from bs4 import BeautifulSoup

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "_build" / "html" / "book"
PAGES = [path for path in sorted((ROOT / "book").glob("*.md"))
         if "code-cell" in path.read_text("utf8")]
UNIT = r"(?:%|ms|µs|s\b|seconds?\b|minutes?\b|hours?\b|[kMGT]i?B\b|[kMGTP]?FLOPs?\b|times\b)"
ALONE = r"(?<![\w.,^·/-])(\d[\d,]*(?:\.\d+)?)"
NUMBER = re.compile(rf"{ALONE}(?:\s?(?:million |billion )?{UNIT}|(?<=[\d.,][\d.,]\d)(?![\w-]))")
NO_PROSE = re.compile(r"^```\{code-cell\}.*?^```$|^```console.*?^```$|`[^`\n]*`|\$[^$]*\$|"
                      r"<https?:[^>]*>|\]\([^)]*\)|^#[^\n]*$|\A---\n.*?^---$",
                      re.DOTALL | re.MULTILINE)
KNOWN = {  # neither measured nor computed by the page
    ("01-data-loading", "170 MB"): "the size of CIFAR-10's archive",
    ("01-data-loading", "60,000"): "of CIFAR-10's own description, cited in the same paragraph",
    ("01-data-loading", "50,000"): "the same",
    ("01-data-loading", "3,072"): "32 · 32 · 3",
    ("02-device-mesh", "2.30"): "a release of NCCL, in the sentence's own words",
    ("03-vision-transformer", "0.02"): "what GPT-2's code begins with, in the sentence's own words",
    ("03-vision-transformer", "90.9%"): "of the repository that the sentence links to",
    ("03-vision-transformer", "94%"): "the same",
    ("07-stories-into-tokens", "1.9 GB"): "the size of TinyStories' files",
    ("09-profiling", "3.1%"): "of the source that the first paragraph cites",
    ("20-corpus", "3,500"): "350 billion by 100 million, both in the exercise",
    ("errata", "50,000"): "of CIFAR-10's own description",
    ("start-here", "13%"): "of the source that the first paragraph cites",
} | {(page, number): "for CIFAR-10, compared with its images in chapter 1"
     for page in ("01-data-loading", "errata")
     for number in ("0.2023", "0.1994", "0.2010", "0.2470", "0.2435", "0.2616")}

needs_site = pytest.mark.skipif(not SITE.exists(), reason="no site in _build/html: make book")


def stated(text):
    """The numbers of a page's prose, but for paragraphs that cite where they have them from."""
    for paragraph in re.split(r"\n\n", NO_PROSE.sub("", text)):
        if "{cite" not in paragraph:
            yield from NUMBER.finditer(paragraph)


def unfounded(text, page):
    """The numbers of a page's prose that neither its cells nor a citation account for."""
    cells = "\n".join(map(str, BeautifulSoup(page, "html.parser").select("div.cell")))
    computed = re.sub(r"<span[^>]*>|</span>|(?<=\d)[,_](?=\d)", "", cells)
    for found in stated(text):
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


def test_the_numbers_are_looked_at():
    assert sum(len(list(stated(path.read_text("utf8")))) for path in PAGES) > 100


def test_a_number_from_nowhere_is_found():
    page = '<div class="cell">x = <span>5</span>: 0.37 of 1,024 MB, 65_536 rows</div>'
    text = ("# Of 777\n\n37% of 1,024 MB took 250 ms, and 12 s in the source {cite}a.\n\n"
            "It is 3 times `4 MB`, 65,536 or 65,537 rows, (8, 1), 0.25.")
    assert list(unfounded(text, page)) == ["3 times", "65,537", "0.25"]
    code = "```{code-cell} ipython3\n9 s\n\n8 s\n```\n"
    text = code + text.replace(" {cite}a", "")
    assert list(unfounded(text, page)) == ["250 ms", "12 s", "3 times", "65,537", "0.25"]
