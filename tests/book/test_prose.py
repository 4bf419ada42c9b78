"""Prose: what it calls by a name of code exists, and its words are spelled as in a dictionary."""
import builtins
import importlib
import keyword
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import source
from run_chapter import cells

ROOT = Path(__file__).resolve().parents[2]

PAGES = sorted((ROOT / "book").glob("*.md"))
CODE = re.compile(r"^```(?:\{code-cell\}|\w).*?^```$", re.DOTALL | re.MULTILINE)
ROLE = re.compile(r"\{[\w:]+\}`[^`]+`")
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
NAME = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(.*\))?(?:=.*)?")
LIBRARIES = [importlib.import_module(name) for name in (
    "jax", "jax.lax", "jax.numpy", "jax.image", "flax.nnx", "optax", "numpy")]


REPLACED = {  # phrases that no page uses: what stands for them
    r"\b[kMG]i?B a device": "GB per device", r"\bbytes a device\b": "bytes per device",
    r"\bnats a token\b": "nats per token", r"\bbits a byte\b": "bits per byte",
    r"\bnumbers a (?:token|head|patch|device)\b": "elements per token, head, patch or device",
    r"\bwithout a word\b": "silently, or what it does not say",
    r"\bchanged\b\W* against\b": "changed since", r"\basks? nobody\b": "does not check",
    r"\bnothing but lie\b": "is ignored", r"\bone line a tensor\b": "one line per tensor",
    r"\bnote (?:that )?d(?:id|oes) nothing\b": "an annotation that is stored and ignored",
    r"\bthe other half(?: done)? again\b":
        "both devices of a group compute the same thing",
    r"\bmakes? of (?:that|it|them) what\b": "turn this into what",
    r"\b(?:all|everything) that has numbers\b": "all of the model's parameters",
    r"\bunknowns? a TPU\b": "constants are fitted for each TPU generation",
    r"\b(?:[mµ]s|[kMGT]?FLOPs?|all-reduces|collectives|matmuls|examples|images|pixels|sums|tokens) "
    r"an? (?:block|core|device|image|layer|second|side|step|token|TPU)\b": "per block, per second",
    r"\b(?:all-reduce|collective|matmul|pass) an? (?:block|layer|step|token)\b": "per block",
    r"\b(?:asks?|said|says?|knows?) nobody\b|\bnobody (?:asks?|asked) for\b": "is not needed",
}


def words(text):
    return set(re.findall(r"\w+", text))


def repository():
    """Every word of the code, the Makefile and the project's file."""
    paths = [ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / "helpers.py"]
    paths += [*ROOT.glob("meshbook/**/*.py"), *ROOT.glob("benchmarks/*.py")]
    return set().union(*(words(path.read_text("utf8")) for path in paths))


def named(text):
    """The names in backticks of a page's prose; notation such as `dA = G · Bᵀ` is none."""
    prose = ROLE.sub("", CODE.sub("", text))
    return {match[1] for match in map(NAME.fullmatch, SPAN.findall(prose)) if match}


def in_a_library(name):
    """Whether a dotted name can be looked up in one of the libraries."""
    first, *rest = name.split(".")
    for library in LIBRARIES:
        found = library if first == library.__name__ else getattr(library, first, None)
        for each in rest:
            found = getattr(found, each, None)
        if found is not None:
            return True
    return False


def unknown(text, known):
    """The names of a page's prose that are nowhere."""
    known = known | words("\n".join(cells(text))) | set(dir(builtins)) | set(keyword.kwlist)
    return {name for name in named(text)
            if not set(name.split(".")) <= known and not in_a_library(name)}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_names_in_backticks_exist(path):
    assert unknown(path.read_text("utf8"), repository()) == set()


def test_a_name_that_is_nowhere_is_found():
    page = "Use `train_step`, `jax.lax.psum`, `nowhere_at_all` and `make_mesh(shape)`; `a · b`."
    assert unknown(page, repository()) == {"nowhere_at_all"}


def test_the_text_leads_to_every_word_of_the_glossary():
    glossary = (ROOT / "book" / "glossary.md").read_text("utf8")
    terms = {word.lower() for word in re.findall(r"^(\S.*)\n  \S", glossary, re.MULTILINE)}
    linked = {(named or shown).lower() for path in PAGES if path.stem != "glossary"
              for shown, named in re.findall(r"\{term\}`([^`<]+?)(?: <(.+?)>)?`",
                                             path.read_text("utf8"))}
    assert len(terms) > 40 and terms == linked


def replaced(text):
    """The phrases of a page that others stand for."""
    return [found[0] for phrase in REPLACED for found in re.finditer(phrase, text)]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_no_page_uses_a_phrase_that_another_replaces(path):
    assert replaced(path.read_text("utf8")) == []


def test_a_phrase_that_is_replaced_is_found():
    text = "It takes 3 kB a device, goes on without a word.\n\n**What changed** against chapter 1"
    assert replaced(text) == ["kB a device", "without a word", "changed** against"]
    assert replaced("Bytes per device; a byte a token has; nothing has changed.") == []
    text = "Two unknowns a TPU. Half of it was the other half done again: four all-reduces a block."
    assert replaced(text) == ["the other half done again", "unknowns a TPU", "all-reduces a block"]
    assert replaced("The more bytes a token stands for, the more tokens a model of them needs.") == []


def test_folded_code_and_code_in_prose_are_not_counted():
    page = ("---\nkernel: none\n---\n# One two\n\n```{code-cell}\nx = 1\n\ny = 2\n```\n\nthree `four`\n\n"
            "```{code-cell} ipython3\n:tags: [hide-input]\nz = 3\n```\n\n```python\nnot = seen\n```\n")
    assert source(page) == (5, 2) and source(page).ratio == 2.5  # `#` is a word, too
    assert source("no code").ratio is None


def spelled(*paths):
    command = [sys.executable, "-m", "codespell_lib", *paths]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_words_are_spelled_as_in_a_dictionary(tmp_path):
    done = spelled(*ROOT.glob("*.md"), *PAGES, "meshbook", "helpers.py", "benchmarks")
    assert done.stdout == "" and done.returncode == 0, done.stdout
    (tmp_path / "page.md").write_text("Recieve the gradients.")  # codespell:ignore
    assert "==> Receive" in spelled(tmp_path / "page.md").stdout
