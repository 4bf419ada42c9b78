"""What a page is made of: words, lines of code that are seen, figures, and its size once built."""

import re
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from bs4 import BeautifulSoup

CELL = re.compile(r"(?sm)^```\{code-cell\}[^\n]*\n(.*?)^```$")
FOLDED = re.compile(r":tags:.*?(?:hide|remove)-(?:input|cell)")
NO_PROSE = re.compile(r"(?sm)^(`{3,}).*?^\1$|\A---\n.*?^---$")
BADGES = ("colab", "kaggle")
MARK = '<div id="pages-of-the-book"></div>'


class Source(NamedTuple):
    """Of a page's Markdown: the words of its prose, and its lines of code that are not folded."""

    words: int
    lines: int

    @property
    def ratio(self):
        """Words per visible line, or None for a page without code."""
        return self.words / self.lines if self.lines else None


def source(text):
    """The Source of a page in Markdown."""
    lines = [line for code in CELL.findall(text) if not FOLDED.match(code)
             for line in code.splitlines() if line.strip() and not line.startswith(":")]
    return Source(len(NO_PROSE.sub("", text).split()), len(lines))


class Built(NamedTuple):
    """Of a built page: its figures, and the bytes of the page and of the images that it loads."""

    figures: int
    bytes: int


def built(path):
    """The Built of a page of the site: drawings in it and images, but for badges and logos."""
    page = BeautifulSoup(path.read_text("utf8"), "html.parser")
    images = [tag["src"] for tag in page.select("article img[src]")
              if not any(badge in tag["src"] for badge in BADGES)]
    loaded = {path.parent / unquote(urlsplit(tag["src"]).path)
              for tag in page.select("img[src]") if not urlsplit(tag["src"]).scheme}
    size = path.stat().st_size + sum(file.stat().st_size for file in loaded)
    return Built(len(page.select("article svg[role=img]")) + len(images), size)


def table(book, site):
    """The table of all pages that have code, as HTML; book: the sources, site: the built pages."""
    head = "page", "words", "visible lines", "words per line", "figures", "MB"
    rows = []
    for path in sorted(Path(book).glob("*.md")):
        page, of = Path(site, f"{path.stem}.html"), source(path.read_text("utf8"))
        if of.lines and page.exists():
            figures, size = built(page)
            rows.append((f'<a href="{page.name}">{path.stem}</a>', f"{of.words:,}", of.lines,
                         f"{of.ratio:.1f}", figures, f"{size / 1e6:.2f}"))
    right = ' style="text-align: right"'
    lines = ["".join(f"<th{right if at else ''}>{cell}</th>" for at, cell in enumerate(head))]
    lines += ["".join(f"<td{right if at else ''}>{cell}</td>" for at, cell in enumerate(row))
              for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines[1:])
    return ('<div class="pst-scrollable-table-container">'
            '<table class="table" id="pages-of-the-book">'
            f"<thead><tr>{lines[0]}</tr></thead><tbody>{body}</tbody></table></div>")


def fill(book, site):
    """Write the table of all pages where the built page of the status has its mark."""
    status = Path(site, "status.html")
    if status.exists():
        text = status.read_text("utf8")
        status.write_text(text.replace(MARK, table(book, site)), "utf8")
