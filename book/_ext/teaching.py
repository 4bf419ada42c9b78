"""Where the book teaches what the package has: for each name, the section that shows it best."""

import ast
import importlib
import inspect
import pkgutil
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

import yaml
from run_chapter import OPTIONS

FENCE = re.compile(r"^(`{3,}|:{3,})(.*)$")
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*$")
FOLDED = re.compile(r":tags:.*?(?:hide|remove)-(?:input|cell)")
MODULE = re.compile(r"^\.\. automodule:: ([\w.]+)\n((?: .*\n|\n)*)", re.MULTILINE)
MEMBERS = re.compile(r"^ +:members:(.*(?:\n {4,}\w.*)*)", re.MULTILINE)
SPAN = re.compile(r"(?<![`}])`([A-Za-z_][\w.]*)(?:\(.*?\))?`(?!`)")
NOT_TEACHING = {"api", "glossary", "bibliography", "about", "status"}
SHOWN, TAUGHT, USED, NAMED = 4, 3, 2, 1  # how well a section shows a name


class Section(NamedTuple):
    """A section of a page: number counts the page's headings from 0, cells are (code, folded)."""

    page: str
    number: int
    title: str
    cells: list
    prose: list


class Place(NamedTuple):
    """The section that shows a name best, and how: SHOWN, TAUGHT, USED or NAMED.

    by: the name in the API that uses this one in its own code, where no page names this one.
    """

    how: int
    section: Section
    by: str | None = None

    @property
    def words(self):
        """What leads to the section on the page about the API."""
        verb = "taught in" if self.how >= TAUGHT else "used in"
        if self.by:
            return f"Used by {self.by.rpartition('.')[2]}, which is {verb}"
        return verb.capitalize()


def pages(root):
    """The names of the book's pages in reading order, from its table of contents."""
    toc = yaml.safe_load((root / "_toc.yml").read_text("utf8"))
    files = [toc["root"], *(each["file"] for part in toc["parts"] for each in part["chapters"])]
    return [Path(each).name for each in files]


def sections(page, text):
    """The Sections of a page in MyST Markdown, in order; what precedes its title is in none."""
    found, fence, block = [], None, []
    for line in text.splitlines():
        mark = FENCE.match(line)
        if fence is None and mark:
            fence, block = mark[1], [mark[2]]
        elif fence is not None and line.strip() == fence:
            if found and block[0].startswith("{code-cell}"):
                code = "\n".join(block[1:]) + "\n"
                found[-1].cells.append((OPTIONS.sub("", code), bool(FOLDED.match(code))))
            elif found and block[0].startswith("{"):
                found[-1].prose.extend(block[1:])
            fence = None
        elif fence is not None:
            block.append(line)
        elif heading := HEADING.match(line):
            found.append(Section(page, len(found), heading[1], [], []))
        elif found:
            found[-1].prose.append(line)
    return found


def entries(text):
    """{full name: object} of the functions and classes that the page about the API documents."""
    found = {}
    for name, options in MODULE.findall(text):
        module = importlib.import_module(name)
        listed = re.findall(r"\w+", "".join(MEMBERS.findall(options)))
        members = listed or getattr(module, "__all__", None) or vars(module)
        for member in members:
            value = getattr(module, member)
            own = getattr(value, "__module__", None) == name or "imported-members" in options
            if (inspect.isfunction(value) or inspect.isclass(value)) and own and (
                    not member.startswith("_") and value.__doc__):
                found[f"{name}.{member}"] = value
    return found


class Reader:
    """Reads the cells of one page in order, and knows what their names stand for."""

    def __init__(self, known):
        self.entries, self.names = known, {}
        self.known = {id(value): name for name, value in known.items()}

    def cell(self, code):
        """(the names of the API that a cell shows, those that it uses)."""
        shown, used = set(), set()
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and node.module:
                self.names |= {each.asname or each.name: f"{node.module}.{each.name}"
                               for each in node.names}
            elif isinstance(node, ast.Import):
                self.names |= {each.asname: each.name for each in node.names if each.asname}
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                shown |= {full for full, value in self.entries.items() if defines(node, value)}
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "show":
                shown |= {self.full(each) for each in node.args}
            elif isinstance(node, (ast.Name, ast.Attribute)):
                used.add(self.full(node))
        return shown - {None}, used - {None}

    def full(self, node):
        """The full name, in the API, of what an expression such as costs.step_peak is, or None."""
        path = []
        while isinstance(node, ast.Attribute):
            path, node = [node.attr, *path], node.value
        if not isinstance(node, ast.Name) or not self.names.get(node.id, "").startswith("meshbook"):
            return None
        try:
            return self.known.get(id(pkgutil.resolve_name(".".join([self.names[node.id], *path]))))
        except (AttributeError, ImportError):
            return None


def defines(node, value):
    """Whether a definition in a cell is that of an object of the package: name and arguments."""
    if node.name != value.__name__ or isinstance(node, ast.ClassDef) != inspect.isclass(value):
        return False
    own = [each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)] if isinstance(
        node, ast.FunctionDef) else []
    return inspect.isclass(value) or set(own) == set(inspect.signature(value).parameters)


def uses(value, known):
    """The other names of the API that the code of one of its objects uses."""
    by_object = {id(each): name for name, each in known.items()}
    scope = vars(inspect.getmodule(inspect.unwrap(value)))
    found = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(value))))):
        if isinstance(node, ast.Name):
            found.add(by_object.get(id(scope.get(node.id))))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.add(by_object.get(id(getattr(scope.get(node.value.id), node.attr, None))))
    return found - {None}


def with_helpers(known, found):
    """The same Places, and those of names that only other names of the API use, nearest first."""
    found, ring = dict(found), list(found)
    while ring:
        users = {}
        for name in sorted(ring, key=lambda name: -found[name].how):
            for other in sorted(uses(known[name], known) - found.keys()):
                users.setdefault(other, name)
        found |= {other: found[user]._replace(by=user) for other, user in users.items()}
        ring = list(users)
    return found


def book_places(root, known):
    """The Places of all that the book shows, or that what it shows uses."""
    texts = {page: (root / "book" / f"{page}.md").read_text("utf8") for page in pages(root)
             if page not in NOT_TEACHING}
    return with_helpers(known, places(known, texts))


def places(known, texts):
    """{full name of the API: its Place} of all that some page shows.

    known: `entries`; texts: {page: its Markdown} in reading order. A section shows a name best
    where its definition stands, then where visible code uses it and the prose names it, then where
    visible code uses it, then where folded code does or the prose alone names it. Of two that are
    as good the earlier counts.
    """
    by_word = {}
    for name in known:
        by_word.setdefault(name.rpartition(".")[2], []).append(name)
    found = {}
    for page, text in texts.items():
        reader = Reader(known)
        for section in sections(page, text):
            words = {word.rpartition(".")[2] for word in SPAN.findall("\n".join(section.prose))}
            named = {by_word[word][0] for word in words if len(by_word.get(word, ())) == 1}
            ranks = dict.fromkeys(named, NAMED)
            for code, folded in section.cells:
                shown, used = reader.cell(code)
                for name in used:
                    how = NAMED if folded else TAUGHT if name in named else USED
                    ranks[name] = max(ranks.get(name, 0), how)
                ranks |= dict.fromkeys(shown, NAMED if folded else SHOWN)
            for name, how in sorted(ranks.items()):  # in an order that no hash decides
                if name not in found or how > found[name].how:
                    found[name] = Place(how, section)
    return found
