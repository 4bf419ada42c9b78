"""The built site as a document: outputs, links, alternatives to pictures."""

import gzip
import json
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from bs4 import BeautifulSoup
from notebooks import chapters
from pages import built, source

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "_build" / "html"
PAGES = sorted(SITE.glob("book/*.html"))
CHAPTERS = [SITE / "book" / f"{path.stem}.html" for path in chapters()]

KINDS = {"text/plain", "text/html", "text/markdown", "image/png", "image/svg+xml", "stdout"}

pytestmark = pytest.mark.skipif(not PAGES, reason="no site in _build/html: make book")


def each(paths):
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.stem)


@cache
def soup(path):
    return BeautifulSoup(path.read_text("utf8"), "html.parser")


@cache
def anchors(path):
    return {tag["id"] for tag in soup(path).find_all(id=True)}


def test_every_chapter_is_on_the_site():
    assert [path.stem for path in CHAPTERS if path not in PAGES] == []


def test_the_sites_root_leads_to_its_first_page_and_asks_for_no_icon():
    front = soup(SITE / "index.html")
    first = front.select_one("meta[http-equiv=refresh]")["content"].partition("url=")[2]
    assert (SITE / first) in PAGES and front.select_one("a")["href"] == first
    assert front.select_one("link[rel=icon]")["href"] == "data:,"


@each(CHAPTERS)
def test_a_chapter_has_outputs_and_neither_tracebacks_nor_stray_stderr(path):
    assert soup(path).select(".cell_output")
    assert not soup(path).select(".output.traceback, .output.stderr")
    assert "Traceback (most recent call last)" not in soup(path).get_text()


@each(CHAPTERS)
def test_a_progress_bar_is_one_full_line(path):
    for output in soup(path).select(".cell_output"):
        bars = [line for line in output.get_text().splitlines() if "█" in line or "░" in line]
        assert bars in ([], ["█" * 60])


def test_outputs_are_of_the_kinds_that_the_site_shows():
    executed = list((ROOT / "_build" / ".execution").glob("*/executed/*/base.ipynb"))
    outputs = [output for path in executed for cell in json.loads(path.read_text("utf8"))["cells"]
               for output in cell.get("outputs", [])]
    assert len(outputs) > 100
    for output in outputs:
        assert (set(output.get("data", {})) | {output.get("name")} - {None}) <= KINDS


@each(PAGES)
def test_a_page_is_light(path):
    page = soup(path)
    assert built(path).bytes <= 1.5e6
    code = [tag["src"] for tag in page.find_all("script", src=True)] + [
        tag["href"] for tag in page.find_all("link", href=True)
        if "stylesheet" in tag.get("rel", []) or tag.get("as") in ("script", "style", "font")]
    files = {path.parent / unquote(urlsplit(each).path) for each in code if not urlsplit(each).scheme}
    assert sum(len(gzip.compress(file.read_bytes())) for file in files) <= 1e6


def test_the_status_says_of_each_page_with_code_what_it_is_made_of():
    rows = [[cell.get_text() for cell in row.find_all("td")]
            for row in soup(SITE / "book" / "status.html").select("#pages-of-the-book tbody tr")]
    with_code = {path.stem: made for path in (ROOT / "book").glob("*.md")
                 if (made := source(path.read_text("utf8"))).lines}
    assert {name for name, *_ in rows} == {path.stem for path in PAGES} & with_code.keys()
    for name, words, lines, _, figures, _ in rows:
        assert (words, lines) == (f"{with_code[name].words:,}", str(with_code[name].lines))
        drawings = soup(SITE / "book" / f"{name}.html").select("article svg[role=img]")
        assert len(drawings) <= int(figures) <= len(drawings) + 3


def test_figures_and_bytes_of_a_built_page_are_counted(tmp_path):
    (tmp_path / "a.png").write_bytes(b"x" * 1000)
    drawing, image = "<svg role='img'></svg>", "<img src='a.png' alt='a'>"
    text = f"<svg role='img'></svg><article>{drawing}{image}{image}<img src='_static/colab.svg'></article>"
    (tmp_path / "_static").mkdir()
    (tmp_path / "_static" / "colab.svg").write_text("<svg/>")
    (tmp_path / "page.html").write_text(text)
    assert built(tmp_path / "page.html") == (3, len(text) + 1000 + 6)


def test_the_search_knows_every_section():
    index = (SITE / "searchindex.js").read_text("utf8")
    known = json.JSONDecoder().raw_decode(index[index.index("{"):])[0]
    titles = {(known["docnames"][page], anchor) for places in known["alltitles"].values()
              for page, anchor in places}
    for path in PAGES:
        for heading in soup(path).select("article h2, article h3"):
            section = heading.find_parent("section")
            assert (f"book/{path.stem}", section["id"]) in titles, heading.get_text()


@each(PAGES)
def test_a_link_to_a_page_shows_a_card(path):
    said = {tag["property"]: tag["content"] for tag in soup(path).find_all("meta", property=True)}
    assert said["og:url"].endswith(f"/book/{path.name}") and said["og:title"]
    assert said["og:image"] == "https://mesh-book.github.io/mesh-book/_static/card.png"
    assert (SITE / "_static" / "card.png").exists() and said["og:image:alt"]


@each(PAGES)
def test_every_picture_has_a_text_alternative(path):
    for image in soup(path).find_all("img"):
        assert image.get("alt"), str(image)[:200]
    for drawing in soup(path).select("article svg"):
        assert drawing.get("aria-label") or drawing.get("aria-hidden"), str(drawing)[:200]


@each(PAGES)
def test_every_internal_link_and_anchor_resolves(path):
    for link in soup(path).find_all("a", href=True):
        target = urlsplit(link["href"])
        if target.scheme or target.netloc:
            continue
        page = (path.parent / unquote(target.path)).resolve() if target.path else path
        assert page.exists(), link["href"]
        if target.fragment and page.suffix == ".html":
            assert unquote(target.fragment) in anchors(page), link["href"]


@each(PAGES)
def test_every_colab_link_names_a_notebook(path):
    links = [link["href"] for link in soup(path).find_all("a", href=True)
             if "colab.research.google.com" in link["href"]]
    assert bool(links) == (path in CHAPTERS)
    for link in links:
        assert "/github/mesh-book/mesh-book/blob/main/notebooks/" in link
        assert (ROOT / "notebooks" / link.rsplit("/", 1)[1]).exists(), link


@each(PAGES)
def test_nothing_is_loaded_from_elsewhere(path):
    loaded = [tag.get("src") for tag in soup(path).find_all(src=True)]
    loaded += [tag["href"] for tag in soup(path).find_all("link", href=True)
               if "canonical" not in tag.get("rel", [])]
    assert [address for address in loaded if urlsplit(address).netloc] == []


@each(CHAPTERS)
def test_notebooks_link_to_what_the_site_has(path):
    source = (ROOT / "notebooks" / f"{path.stem}.ipynb").read_text("utf8")
    base = "https://mesh-book.github.io/mesh-book/"
    for part in source.split(f"]({base}")[1:]:
        name, _, anchor = part.split(")", 1)[0].partition("#")
        assert (SITE / name).exists(), name
        assert not anchor or anchor in anchors(SITE / name), f"{name}#{anchor}"
