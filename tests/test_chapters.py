"""A chapter's cells: their code is complete, and under a name of meshbook the same as there."""
import ast
import sys
from pathlib import Path

import pytest
from pyflakes.checker import Checker
from pyflakes.messages import UndefinedName, UnusedImport

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "book" / "_ext"))
from run_chapter import cells  # noqa: E402

CHAPTERS = sorted((ROOT / "book").glob("*-*.md"))
PAGES = [path for path in sorted((ROOT / "book").glob("*.md")) if cells(path.read_text("utf8"))]


class Bare(ast.NodeTransformer):
    """The syntax tree without docstrings and annotations."""

    def visit_FunctionDef(self, node):
        self.generic_visit(node)
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
            node.body = node.body[1:] or [ast.Pass()]
        if hasattr(node, "returns"):
            node.returns = None
        return node

    visit_ClassDef = visit_FunctionDef

    def visit_arg(self, node):
        node.annotation = None
        return node


def definitions(code):
    """{name: syntax tree} of the functions, classes and constants at the top of some code."""
    found = {}
    for node in ast.parse(code).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = ast.dump(Bare().visit(node))
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "a").isupper():
            found[node.targets[0].id] = ast.dump(node)
    return found


def of_meshbook():
    """{name: {module: syntax tree}} of everything that meshbook and helpers define."""
    found = {}
    for path in [*sorted((ROOT / "meshbook").glob("*.py")), ROOT / "helpers.py"]:
        for name, tree in definitions(path.read_text("utf8")).items():
            found.setdefault(name, {})[path.stem] = tree
    return found


def of_chapter(path):
    """[(name, syntax tree)] of every definition in a chapter's cells."""
    return [pair for code in cells(path.read_text("utf8")) for pair in definitions(code).items()]


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_definition_shown_in_a_chapter_is_the_one_that_is_used(path):
    known = of_meshbook()
    for name, tree in of_chapter(path):
        modules = known.get(name, {})
        assert not modules or tree in modules.values(), (
            f"{path.name} defines {name} otherwise than meshbook.{'/'.join(modules)}")


def loose_ends(code):
    """[(line, name)] of what is used and not defined, or imported and not used."""
    return [(each.lineno, each.message_args[0]) for each in Checker(ast.parse(code)).messages
            if isinstance(each, (UndefinedName, UnusedImport))]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_has_every_name_that_its_cells_use_and_no_import_that_they_do_not(path):
    assert loose_ends("\n".join(cells(path.read_text("utf8")))) == []


def test_a_loose_end_is_seen():
    found = loose_ends("import os\n\ndef f(x):\n    return partial(x)")
    assert sorted(found) == [(1, "os"), (4, "partial")]


def test_the_lessons_stand_in_the_chapters():
    shown = {path.stem: {name for name, _ in of_chapter(path)} for path in CHAPTERS}
    assert {"make_mesh"} <= shown["02-device-mesh"]
    assert {"ViT", "Block", "Attention", "MLP", "Norm", "train_step"} <= shown[
        "03-vision-transformer"]
    assert {"Sharding", "DATA", "TENSOR", "FULL", "vit_step_traffic"} <= shown[
        "04-sharded-vision-transformer"]


def test_the_comparison_sees_a_changed_line():
    one, other = (definitions(f"def f(x: int):\n    'doc'\n    return x + {n}") for n in (1, 2))
    plain = definitions("def f(x):\n    return x + 1")
    assert one != other and one == plain
