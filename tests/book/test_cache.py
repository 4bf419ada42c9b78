"""No page of the site is stale, and no page is executed without need."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from meshbook_execution import cache_key, forget

ROOT = Path(__file__).resolve().parents[2]
HEADER = """---
jupytext: {text_representation: {extension: .md, format_name: myst}}
kernelspec: {display_name: Python 3, language: python, name: python3}
---
"""
FIRST = HEADER + """# First

```{code-cell}
from helpers import answer
print("the answer is", answer())
```
"""
SECOND = HEADER + """# Second

```{code-cell}
import os
print("size", os.environ.get("MESHBOOK_SIZE"))
```
"""
CONFIG = """
title: Small
only_build_toc_files: true
execute: {execute_notebooks: cache, stderr_output: warn}
sphinx: {local_extensions: {meshbook_execution: book/_ext}}
"""


@pytest.fixture
def tree(tmp_path):
    """The files that a cache key depends on, and a data folder."""
    for name in ("helpers.py", "requirements.lock", "meshbook/proofs.py",
                 "results/machine.json", "data/batch"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("old")
    return tmp_path


@pytest.mark.parametrize("name", [
    "helpers.py", "requirements.lock", "meshbook/proofs.py", "meshbook/new.py",
    "results/machine.json", "data/batch", "data/deeper",
])
def test_an_edit_changes_the_key(tree, name):
    environ = {"MESHBOOK_DATA": str(tree / "data")}
    old = cache_key(tree, environ)
    assert cache_key(tree, environ) == old
    (tree / name).write_text("edited")
    assert cache_key(tree, environ) != old


@pytest.mark.parametrize("environ", [
    {"MESHBOOK_SIZE": "test"}, {"MESHBOOK_DATA": "elsewhere"}, {"XLA_FLAGS": "--x"},
    {"JAX_ENABLE_X64": "1"},
])
def test_a_setting_changes_the_key(tree, environ):
    assert cache_key(tree, environ) != cache_key(tree, {})


def test_what_no_chapter_sees_does_not_change_the_key(tree):
    old = cache_key(tree, {})
    (tree / "README.md").write_text("new")
    assert cache_key(tree, {"HOME": "elsewhere"}) == old


def test_old_caches_are_forgotten(tmp_path):
    for age in range(6):
        cache = tmp_path / str(age)
        cache.mkdir()
        os.utime(cache, (1000 - age, 1000 - age))
    forget(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "3"]


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """A book of two chapters with this book's extension, built by hand."""
    root = tmp_path_factory.mktemp("small")
    shutil.copytree(ROOT / "book" / "_ext", root / "book" / "_ext")
    (root / "_config.yml").write_text(CONFIG)
    (root / "_toc.yml").write_text(
        "{format: jb-book, root: book/first, chapters: [{file: book/second}]}")
    (root / "helpers.py").write_text("def answer():\n    return 41\n")
    (root / "book" / "first.md").write_text(FIRST)
    (root / "book" / "second.md").write_text(SECOND)
    return root


def build(root, **environ):
    """Run `jupyter-book build .` as a reader would, strictly."""
    command = [Path(sys.executable).with_name("jupyter-book"), "build", ".", "-W", "--keep-going"]
    clean = {name: value for name, value in os.environ.items()
             if not name.startswith("MESHBOOK_")}
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300,
                          env={**clean, **environ})


def progress(done):
    """Which page was executed, and which came from the cache."""
    return dict(re.findall(r"^  (\w+) +(executed|from cache|FAILED)", done.stdout, re.MULTILINE))


def page(root, name):
    return (root / "_build" / "html" / "book" / f"{name}.html").read_text()


def test_a_build_executes_what_is_stale_and_nothing_else(book):
    assert progress(build(book)) == {"first": "executed", "second": "executed"}
    assert "the answer is 41" in page(book, "first")

    (book / "helpers.py").write_text("def answer():\n    return 42\n")
    assert progress(build(book)) == {"first": "executed", "second": "executed"}
    assert "the answer is 42" in page(book, "first")

    (book / "book" / "second.md").write_text(SECOND.replace('"size"', '"my size"'))
    shutil.rmtree(book / "_build" / ".doctrees")
    assert progress(build(book)) == {"first": "from cache", "second": "executed"}

    build(book, MESHBOOK_SIZE="test")
    assert "my size test" in page(book, "second")
    build(book)
    assert "my size None" in page(book, "second")


def test_a_failing_cell_fails_the_build_each_time(book):
    (book / "book" / "second.md").write_text(SECOND.replace("import os", "import nothing"))
    for _ in range(2):
        done = build(book)
        assert done.returncode != 0
        assert progress(done)["second"] == "FAILED"


def test_stray_stderr_fails_the_build(book):
    stray = SECOND.replace("import os", "import os, sys; print('stray', file=sys.stderr)")
    (book / "book" / "second.md").write_text(stray)
    assert build(book).returncode != 0
