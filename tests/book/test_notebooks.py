"""notebooks/ is made from book/, byte for byte, and holds nothing that it does not."""

import json
import re
from pathlib import Path

import nbformat
import pytest
from notebooks import Links, chapters, generate, sync, with_badges
from plain import plain

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MYST = re.compile(r"\{(term|doc|ref|cite|math)[\w:]*\}`|^(```|:::)\{|^\([\w-]+\)=", re.MULTILINE)


def read(path):
    return json.loads(path.read_text("utf8"))


def test_each_chapter_has_its_notebook_and_no_other_exists():
    assert [path.stem for path in NOTEBOOKS] == sorted(path.stem for path in chapters())


def test_notebooks_are_what_make_sync_writes():
    for path, text in generate().items():
        assert path.read_text("utf8") == text, f"{path.name} is old: make sync"


def test_generation_is_stable():
    assert generate() == generate()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_valid_plain_and_without_outputs(path):
    nbformat.validate(nbformat.read(path, as_version=4))
    for cell in read(path)["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
        else:
            assert not MYST.search(text), text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_opens_with_its_badges(path):
    first = "".join(read(path)["cells"][0]["source"])
    address = f"mesh-book/mesh-book/blob/main/notebooks/{path.name}"
    assert f"https://colab.research.google.com/github/{address}" in first
    assert f"src=https://github.com/{address}" in first


@pytest.mark.parametrize("path", chapters(), ids=lambda path: path.stem)
def test_a_chapter_shows_its_badges_under_its_title(path):
    text = path.read_text("utf8")
    assert text == with_badges(path, Links()), f"{path.name} has old badges: make sync"
    assert text.count("[![Open in") == 2 and "_static/colab.svg" in text


def test_every_notebook_installs_the_book_in_the_same_first_cell():
    first = {"".join(read(path)["cells"][1]["source"]) for path in NOTEBOOKS}
    (code,) = first
    assert "https://github.com/mesh-book/mesh-book/archive/main.zip" in code
    assert all(read(path)["cells"][1]["cell_type"] == "code" for path in NOTEBOOKS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_code_fits_a_page(path):
    for cell in read(path)["cells"]:
        if cell["cell_type"] == "code":
            long = [line for line in cell["source"] if len(line.rstrip("\n")) > 80]
            assert not long, long


@pytest.fixture
def small_book(tmp_path):
    """A book of one chapter, with everything that notebooks refer to."""
    book = tmp_path / "book"
    book.mkdir()
    (tmp_path / "_config.yml").write_text((ROOT / "_config.yml").read_text())
    (book / "glossary.md").write_text(
        "# Glossary\n\n```{glossary}\nMesh\n  A grid.\n```\n")
    (book / "bibliography.md").write_text("# Bibliography\n")
    (book / "references.bib").write_text(
        "@article{one, author={Doe, Jane and Roe, Max and Poe, Ann}, title={T}, "
        "year={2020}, journal={J}, url={https://example.org/one}}\n")
    (book / "01-first.md").write_text(
        "---\njupytext: {text_representation: {extension: .md, format_name: myst}}\n"
        "kernelspec: {display_name: Python 3, language: python, name: python3}\n---\n"
        "(here)=\n# 1. First\n\nText.\n\n```{code-cell}\n:tags: [hide-input]\nx = 1\n```\n")
    return tmp_path


def test_sync_writes_and_removes(small_book):
    (small_book / "notebooks").mkdir()
    (small_book / "notebooks" / "gone.ipynb").write_text("{}")
    (path,) = sync(small_book)
    assert path.name == "01-first.ipynb"
    assert list((small_book / "notebooks").iterdir()) == [path]
    code = read(path)["cells"][-1]
    assert code["source"] == ["x = 1"] and code["metadata"] == {"tags": ["hide-input"]}


SITE = "https://mesh-book.github.io/mesh-book/book"


@pytest.mark.parametrize("myst, expected", [
    ("a {term}`mesh`", f"a [mesh]({SITE}/glossary.html#term-Mesh)"),
    ("{term}`meshes <mesh>`", f"[meshes]({SITE}/glossary.html#term-Mesh)"),
    ("{cite}`one`", "([Doe et al., 2020](https://example.org/one))"),
    ("{cite:t}`one`", "[Doe et al. (2020)](https://example.org/one)"),
    ("{doc}`01-first`", f"[1. First]({SITE}/01-first.html)"),
    ("{ref}`this <here>`", f"[this]({SITE}/01-first.html#here)"),
    ("[x](01-first.md#here)", f"[x]({SITE}/01-first.html#here)"),
    ("{math}`x^2`", "$x^2$"),
    ("`{term}` and ``{term}`mesh` ``", "`{term}` and ``{term}`mesh` ``"),
    ("(here)=\n# Title", "# Title"),
    ("```{math}\nx\n```", "$$\nx\n$$"),
    ("```{admonition} Box\n:class: tip\nText\n\nMore\n```", "> **Box**\n>\n> Text\n>\n> More"),
    (":::{note}\nText\n:::", "> **Note**\n>\n> Text"),
    ("```{admonition} Why\n:class: dropdown\nSo.\n```",
     "<details>\n<summary>Why</summary>\n\nSo.\n\n</details>"),
    ("````{note}\n```python\nx\n```\n````", "> **Note**\n>\n> ```python\n> x\n> ```"),
    ("```python\n{term}`mesh`\n```", "```python\n{term}`mesh`\n```"),
])
def test_myst_becomes_plain(small_book, myst, expected):
    assert plain(myst, Links(small_book)) == expected


@pytest.mark.parametrize("myst, message", [
    ("```{tableofcontents}\n```", "directive tableofcontents has no plain form"),
    ("{numref}`x`", "role numref has no plain form"),
    ("{term}`nothing`", "glossary has no entry nothing"),
    ("{cite}`nobody`", "references.bib has no entry nobody"),
    ("{ref}`nowhere`", "no label nowhere"),
    ("[x](missing.md)", "no page book/missing.md"),
    ("```{note}\nopen", "never closed"),
])
def test_what_has_no_plain_form_is_refused(small_book, myst, message):
    with pytest.raises(ValueError, match=message):
        plain(myst, Links(small_book))
