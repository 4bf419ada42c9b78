"""A chapter's cells: their code is complete, and under a name of meshbook the same as there."""
import ast
from pathlib import Path

import pytest
from definitions import definitions, members
from pyflakes.checker import Checker
from pyflakes.messages import UndefinedName, UnusedImport
from run_chapter import cells

ROOT = Path(__file__).resolve().parents[2]
TAUGHT = {  # the modules whose code a chapter shows, a name that two have from the first of them
    "01-data-loading": ("data.images", "data.augmentation", "data.order"),
    "02-device-mesh": ("sharding.meshes",),
    "03-vision-transformer": (
        "models.vit", "models.layers", "training.state", "training.loop", "training.optimizers"),
    "04-sharded-vision-transformer": (
        "sharding.meshes", "sharding.rules", "sharding.gradients"),
    "07-stories-into-tokens": ("data.tokens",),
    "augmentation-parity": ("data.augmentation",),
    "08-pretraining-minigpt": ("models.minigpt", "models.losses"),
    "fused-loss": ("models.losses",),
}
CHAPTERS = sorted((ROOT / "book").glob("*-*.md"))
PAGES = [path for path in sorted((ROOT / "book").glob("*.md")) if cells(path.read_text("utf8"))]


def of_meshbook():
    """{name: {module: syntax tree}} of everything that meshbook and helpers define."""
    found = {}
    for path in [*sorted((ROOT / "meshbook").glob("**/*.py")), ROOT / "helpers.py"]:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("meshbook.")
        for name, tree in definitions(path.read_text("utf8")).items():
            found.setdefault(name, {})[module] = tree
    return found


def of_chapter(path):
    """[(name, syntax tree)] of every definition in a chapter's cells."""
    return [pair for code in cells(path.read_text("utf8")) for pair in definitions(code).items()]


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_definition_shown_in_a_chapter_is_the_one_of_its_module(path):
    known, taught = of_meshbook(), TAUGHT.get(path.stem, ())
    for name, tree in of_chapter(path):
        homes = known.get(name, {})
        home = next((module for module in taught if module in homes), None)
        assert home or not homes, (
            f"{path.name} defines {name}, as {' and '.join(homes)} does: which of them is taught?")
        assert home is None or tree == homes[home] or is_part(path, name, home), (
            f"{path.name} defines {name} otherwise than meshbook.{home}")


def is_part(path, name, home):
    """Whether a chapter shows some methods and fields of a class, each as its module has it."""
    file = ROOT / "meshbook" / f"{home.replace('.', '/')}.py"
    whole = members(file.read_text("utf8")).get(name, {})
    shown = next((found[name] for code in cells(path.read_text("utf8"))
                  if name in (found := members(code))), {})
    return bool(shown) and shown.items() <= whole.items()


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
    assert {"Rules", "spec_of", "vit_step_traffic"} <= shown[
        "04-sharded-vision-transformer"]


def test_the_comparison_sees_a_changed_line():
    one, other = (definitions(f"def f(x: int):\n    'doc'\n    return x + {n}") for n in (1, 2))
    plain = definitions("def f(x):\n    return x + 1")
    assert one != other and one == plain
