"""Write notebooks/ from book/: the same chapters for Colab, Kaggle and nbmake.

Markdown is the only source of a chapter. The notebooks have no outputs, and the same
Markdown always gives the same bytes. Run as a script, this writes them all.
"""

import hashlib
import json
import re
import sys
from pathlib import Path

import jupytext
import yaml
from plain import plain
from pybtex.database import parse_file

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = ("start-here.md", "[0-9][0-9]-*.md", "fused-loss.md", "checkpoints.md", "tpu-time.md",
            "tensorboard.md", "calculator.md", "explorer.md", "errata.md", "memory-fit.md",
            "augmentation-parity.md", "troubleshooting.md")
HEADING = re.compile(r"^#+\s+(.*?)\s*$", re.MULTILINE)
LABEL = re.compile(r"^\(([\w:-]+)\)=\s*\n+#+\s+(.*?)\s*$", re.MULTILINE)
TITLE = re.compile(r"^# .*\n", re.MULTILINE)
BADGES = re.compile(r"^\[!\[Open in Colab\].*\n\n?", re.MULTILINE)
TERM = re.compile(r"^(.+)\n  \S", re.MULTILINE)
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


class Links:
    """Where everything is: the repository, the site, the sources that are cited."""

    def __init__(self, root=ROOT):
        config = yaml.safe_load((root / "_config.yml").read_text("utf8"))
        self.book = root / "book"
        self.repository = config["repository"]["url"]
        self.branch = config["repository"]["branch"]
        self.colab = config["launch_buttons"]["colab_url"]
        self.site = config["html"]["baseurl"]
        self.entries = parse_file(str(self.book / "references.bib")).entries
        self.labels = dict(self._labels())
        glossary = (self.book / "glossary.md").read_text("utf8")
        self.terms = {term.lower(): term for term in TERM.findall(glossary)}

    def _labels(self):
        """Each label of the book with its page and heading."""
        for path in sorted(self.book.glob("*.md")):
            for label, heading in LABEL.findall(path.read_text("utf8")):
                yield label, (path.stem, heading)

    def page(self, name):
        """The address of a page on the site."""
        if not (self.book / f"{name}.md").exists():
            raise ValueError(f"there is no page book/{name}.md to link to")
        return f"{self.site}book/{name}.html"

    def file(self, path):
        """The address of a file of the book."""
        return f"{self.repository}/raw/{self.branch}/book/{path}"

    def term(self, text, term):
        """A word that the glossary explains."""
        if term.lower() not in self.terms:
            raise ValueError(f"the glossary has no entry {term}")
        anchor = re.sub(r"[^\w]+", "-", self.terms[term.lower()]).strip("-")
        return f"[{text}]({self.page('glossary')}#term-{anchor})"

    def document(self, text, name):
        """Another page, by default under its own title."""
        page = self.page(name)
        title = HEADING.search((self.book / f"{name}.md").read_text("utf8"))[1]
        return f"[{text or title}]({page})"

    def label(self, text, label):
        """A labelled section, by default under its own heading."""
        if label not in self.labels:
            raise ValueError(f"there is no label {label}")
        name, heading = self.labels[label]
        return f"[{text or heading}]({self.page(name)}#{label})"

    def cite(self, keys, textual):
        """Sources by author and year, each linked to where it can be read."""
        cited = ", ".join(self._source(key.strip(), textual) for key in keys.split(","))
        return cited if textual else f"({cited})"

    def _source(self, key, textual):
        """One source."""
        if key not in self.entries:
            raise ValueError(f"references.bib has no entry {key}")
        entry = self.entries[key]
        who, year = authors(entry), entry.fields.get("year", "n.d.")
        shown = f"{who} ({year})" if textual else f"{who}, {year}"
        return f"[{shown}]({address(entry.fields) or self.page('bibliography')})"

    def first_cell(self):
        """The code that every notebook opens with; the site has no such cell."""
        return (
            "# Colab, Kaggle: install the book. Where it is installed this does nothing.\n"
            "import importlib.util, sys\n"
            "if importlib.util.find_spec(\"meshbook\") is None:\n"
            f"    book = \"{self.repository}/archive/{self.branch}.zip\"\n"
            "    !{sys.executable} -m pip install -q --no-deps {book}\n"
            "    !{sys.executable} -m meshbook.hosts.notebooks\n"
            "    importlib.invalidate_caches()"
        )

    def runtimes(self, name):
        """{Colab, Kaggle: the address that opens a chapter's notebook there}."""
        source = f"blob/{self.branch}/notebooks/{name}.ipynb"
        github = self.repository.removeprefix("https://github.com/")
        return {"Colab": f"{self.colab}/github/{github}/{source}",
                "Kaggle": f"https://kaggle.com/kernels/welcome?src={self.repository}/{source}"}

    def badges(self, name, images="_static"):
        """The line under the title of a chapter, on the site and on GitHub."""
        return " ".join(f"[![Open in {place}]({images}/{place.lower()}.svg)]({address})"
                        for place, address in self.runtimes(name).items())


def authors(entry):
    """Who wrote a source, as it is cited."""
    people = [" ".join(person.last_names) for person in entry.persons.get("author", [])]
    people = people or [entry.fields.get("organization", entry.fields["title"])]
    names = [name.replace("{", "").replace("}", "") for name in people]
    return f"{names[0]} et al." if len(names) > 2 else " and ".join(names)


def address(fields):
    """Where a source can be read, or None."""
    if "url" in fields:
        return fields["url"]
    if "doi" in fields:
        return f"https://doi.org/{fields['doi']}"
    return f"https://arxiv.org/abs/{fields['eprint']}" if "eprint" in fields else None


def chapters(book=ROOT / "book"):
    """The chapters in reading order: every page that becomes a notebook."""
    return [path for pattern in CHAPTERS for path in sorted(book.glob(pattern))]


def notebook(path, links):
    """The notebook of a chapter as text. Raises ValueError naming the page."""
    source = jupytext.read(path, fmt="md:myst")
    try:
        texts = [
            cell.source if cell.cell_type == "code" else plain(BADGES.sub("", cell.source), links)
            for cell in source.cells
        ]
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error
    cells = [
        _cell(path.stem, 0, "markdown", f"{links.badges(path.stem, links.file('_static'))} "
              f"[Read on the site]({links.page(path.stem)})", {}),
        _cell(path.stem, -1, "code", links.first_cell(), {"tags": ["hide-cell"]}),
    ] + [
        _cell(path.stem, number, cell.cell_type, text, cell.metadata)
        for number, (cell, text) in enumerate(zip(source.cells, texts, strict=True), 1)
    ]
    content = {"cells": cells, "metadata": _metadata(source), "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(content, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def _metadata(source):
    """What a notebook says of itself; a chapter may set its execution's timeout."""
    metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    timeout = source.metadata.get("execution", {}).get("timeout")
    return {**metadata, "execution": {"timeout": timeout}} if timeout else metadata


def _cell(page, number, kind, text, metadata):
    """One cell, whose id depends on its place alone."""
    name = hashlib.sha256(f"{page} {number}".encode()).hexdigest()[:8]
    tags = metadata.get("tags")
    cell = {
        "cell_type": kind,
        "id": name,
        "metadata": {"tags": list(tags)} if tags else {},
        "source": text.splitlines(keepends=True),
    }
    return {**cell, "execution_count": None, "outputs": []} if kind == "code" else cell


def generate(root=ROOT):
    """Every notebook of the book: its path and its text."""
    links = Links(root)
    return {
        root / "notebooks" / f"{path.stem}.ipynb": notebook(path, links)
        for path in chapters(root / "book")
    }


def with_badges(path, links):
    """The text of a chapter with its badges under its title."""
    bare = BADGES.sub("", path.read_text("utf8"))
    return TITLE.sub(lambda title: f"{title[0]}\n{links.badges(path.stem)}\n", bare, count=1)


def sync(root=ROOT):
    """Write every chapter's badges and notebook, and remove notebooks whose chapter is gone."""
    links = Links(root)
    for path in chapters(root / "book"):
        path.write_text(with_badges(path, links), "utf8")
    wanted = generate(root)
    for path in set((root / "notebooks").glob("*.ipynb")) - set(wanted):
        path.unlink()
    (root / "notebooks").mkdir(exist_ok=True)
    for path, text in wanted.items():
        path.write_text(text, "utf8")
    return sorted(wanted)


if __name__ == "__main__":
    try:
        for path in sync():
            print(f"wrote {path.relative_to(ROOT)}")
    except ValueError as error:
        sys.exit(f"make sync: {error}")
