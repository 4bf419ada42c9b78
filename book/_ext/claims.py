"""What carries a page's claims: book/claims/PAGE.toml, held against the page.

    [[comparatives]]   a comparison of the prose
    claim = "..."      a fragment of the sentence
    assertion = "..."  of a visible cell of the page, or of `page`; or several in a list
    because = "..."    in place of an assertion: why no cell can carry it

    [[others]]         a sentence about somebody else's code
    claim = "..."
    source = "..."     what was read: github:owner/name, path and lines, or a package
    commit = "..."     forty hexadecimal digits, or release = "..." of a package

    [[mentions]]       a sentence that names another project and says nothing of its code
    claim = "..."
    because = "..."

The claims in docstrings of the package are in package.toml, each with its `file`.
"""

import ast
import re
import tomllib
from pathlib import Path
from typing import NamedTuple

from pages import FOLDED

CELL = re.compile(r"^(`{3,})\{code-cell\}[^\n]*\n(.*?)^\1$", re.DOTALL | re.MULTILINE)
OPTIONS = re.compile(r"\A(?:---\n.*?^---\n|(?::[^\n]*\n)+)", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"^(`{3,})(?:\{(?:code-cell|bibliography|toctree|math|eval-rst)\}|\w)[^\n]*\n"
                  r".*?^\1$", re.DOTALL | re.MULTILINE)
RIDDLE = re.compile(r"^:mystnb:.*\bcode_prompt_show: Show the (?:check|answer)\b", re.MULTILINE)
NO_PROSE = re.compile(r"\A---\n(?s:.*?)^---$|^\(\w[\w-]*\)=$|^#+ .*$|^[`:]{3,}.*$|"
                      r"^:[\w-]+:.*$|<!--(?s:.*?)-->|<https?:[^>]*>", re.MULTILINE)
NUMERALS = r"(?:two|three|four|five|six|seven|eight|nine|ten|sixteen|a hundred|a thousand|many)"
COMPARISON = re.compile("|".join((  # a measure of one thing by another, or of one among all
    rf"\b(?:twice|thrice|halves|halved|doubles|doubled|{NUMERALS} times)\b",
    r"\b(?:half|(?:a|one) (?:third|quarter|fifth|sixth|seventh|eighth|ninth|tenth|sixteenth)|"
    r"two thirds|three quarters) (?:of|as|the|more|less|again)\b",
    r"\bas (?:many|much|fast|long|large|few|little|slow|small|cheap)\b(?! as possible)",
    r"\b(?:more|fewer|less|larger|smaller|faster|slower|longer|shorter|higher|lower|cheaper|"
    r"better|worse|greater|closer)\b[^.;:]{0,80}? than\b",
    r"\bthe (?:fastest|slowest|largest|smallest|cheapest|longest|shortest|highest|lowest|best|"
    r"worst|fewest|least)\b",
    r"\b(?:nothing|nearly|almost|hardly|barely)\b",
    r"\b(?:most of|all but|an order of magnitude|orders of magnitude|the most)\b",
)), re.IGNORECASE)


PROJECTS = re.compile(r"\b(?:JAXformer|Megatron|torchtitan|MaxText|JaxPP|DeepSpeed|MegaBlocks|"
                      r"nanoGPT|nanochat|nanodo|Levanter|Tutel|NCCL)\b")


class Found(NamedTuple):
    """Words of the prose that need an entry, and the sentence around them."""

    words: str
    sentence: str


def collapsed(text):
    """The text with single spaces."""
    return " ".join(text.split())


def prose(text):
    """The prose of a page in Markdown, collapsed: no code, no headings, no directives' fences."""
    return collapsed(NO_PROSE.sub("", CODE.sub("", text)))


def uncovered(pattern, plain, fragments=()):
    """What of the collapsed prose the pattern finds and none of the fragments overlaps."""
    spans = [(m.start(), m.end()) for each in fragments
             for m in re.finditer(re.escape(collapsed(each)), plain)]
    for found in pattern.finditer(plain):
        if not any(start < found.end() and found.start() < end for start, end in spans):
            begin = plain.rfind(". ", 0, found.start()) + 1
            end = plain.find(". ", found.end())
            yield Found(found[0], plain[begin:end + 1 if end > 0 else None].strip())


def assertions(text, folded=False):
    """The assertions of a page's visible cells, collapsed: assert, and calls of assert_…().

    A cell that checks the answers of exercises, or the answer of a riddle, may be folded, as the
    answers are. folded: of the other folded cells instead.
    """
    found = []
    for cell in CELL.finditer(text):
        hidden = (bool(FOLDED.match(cell[2])) and not checks_answers(text, cell)
                  and not RIDDLE.search(cell[2]))
        if hidden == folded:
            code = OPTIONS.sub("", cell[2])
            found += [collapsed(ast.get_source_segment(code, node))
                      for node in ast.walk(ast.parse(code)) if _asserts(node)]
    return found


def _asserts(node):
    """assert, a call of assert_…(), or a block or call that has to raise an error."""
    name = _name(node.func) if isinstance(node, ast.Call) else ""
    return (isinstance(node, ast.Assert) or name.startswith("assert")
            or name in ("expect", "refused"))


def checks_answers(text, cell):
    """Whether a cell, a match of CELL, stands behind the page's exercises."""
    start = text.find("\n## Exercises")
    return 0 <= start < cell.start()


def typed(code, everything=False):
    """The assertions of a cell that hold of numbers typed there, whatever the package computes.

    everything: what its f-strings print, too, for cells that compute the answers of exercises.
    """
    arithmetic = set()  # names of what follows from numbers that the cell types
    nodes = [node for node in ast.walk(ast.parse(code)) if hasattr(node, "lineno")]
    for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset)):
        if isinstance(node, ast.Assign):
            names = {each.id for target in node.targets for each in ast.walk(target)
                     if isinstance(each, ast.Name)}
            arithmetic = (arithmetic | names if _of_numbers(node.value, arithmetic)
                          else arithmetic - names)
        elif isinstance(node, ast.AugAssign):
            arithmetic -= {_name(node.target)}
        elif isinstance(node, ast.Assert) or everything and isinstance(node, ast.FormattedValue):
            value = node.test if isinstance(node, ast.Assert) else node.value
            if _of_numbers(value, arithmetic):
                yield collapsed(ast.unparse(node))


NUMERIC = {"abs", "round", "sum", "min", "max", "len", "range", "int", "float", "math", "Fraction"}


def _of_numbers(node, arithmetic):
    """Whether an expression is made of typed numbers and names of such, and of nothing else."""
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    numbers = any(isinstance(each, ast.Constant) and isinstance(each.value, (int, float))
                  for each in ast.walk(node))
    return bool(numbers or names & arithmetic) and names <= arithmetic | NUMERIC


def _name(node):
    return getattr(node, "attr", getattr(node, "id", ""))


def entries(book, page):
    """What book/claims/PAGE.toml says, {} where there is none."""
    path = Path(book, "claims", f"{page}.toml")
    return tomllib.loads(path.read_text("utf8")) if path.exists() else {}


def unasserted(text, said, pages):
    """What is wrong with a page's comparatives, a sentence for each fault.

    said: of entries(); pages: {stem: text}, for assertions of other pages.
    """
    plain, entries = prose(text), said.get("comparatives", [])
    for entry in entries:
        claim = collapsed(entry["claim"])
        if claim not in plain:
            yield f"not in the prose: {claim}"
        elif not COMPARISON.search(claim):
            yield f"compares nothing: {claim}"
        if ("assertion" in entry) == bool(entry.get("because")):
            yield f"needs an assertion or a reason, and not both: {claim}"
        wanted = entry.get("assertion", [])
        where = assertions(pages[entry["page"]] if "page" in entry else text)
        for each in [wanted] if isinstance(wanted, str) else wanted:
            if not any(collapsed(each) in assertion for assertion in where):
                yield f"asserted in no visible cell: {each}"
    for words, sentence in uncovered(COMPARISON, plain, [entry["claim"] for entry in entries]):
        yield f"stands on nothing: {words!r} in: {sentence}"


def unread(text, said):
    """What is wrong with a page's sentences about others' code, a sentence for each fault."""
    plain, others, mentions = prose(text), said.get("others", []), said.get("mentions", [])
    for entry in others + mentions:
        if collapsed(entry["claim"]) not in plain:
            yield f"not in the prose: {entry['claim']}"
    for entry in others:
        yield from unsourced(entry)
    for entry in mentions:
        if not entry.get("because"):
            yield f"needs a reason: {entry['claim']}"
    fragments = [entry["claim"] for entry in others + mentions]
    for words, sentence in uncovered(PROJECTS, plain, fragments):
        yield f"nothing was read for: {words!r} in: {sentence}"


def unsourced(entry):
    """What is wrong with the source of one entry of [[others]]."""
    if not entry.get("source"):
        yield f"needs a source: {entry['claim']}"
    if ("commit" in entry) == ("release" in entry):
        yield f"needs a commit or a release, and not both: {entry['claim']}"
    if not re.fullmatch(r"[0-9a-f]{40}", entry.get("commit", "0" * 40)):
        yield f"expected a commit of 40 hexadecimal digits, found {entry['commit']!r}"
