"""The package by subject: few entries, imports that only go down a floor, and no circle."""

import ast
import importlib
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "meshbook"
MODULES = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
           for path in PACKAGE.glob("**/*.py")}
FLOORS = {  # a subject imports from its own floor and those below
    "text": 1, "sharding": 1, "hlo": 1, "proofs": 1, "profiling": 1, "drawing": 1, "data": 1,
    "models": 2, "parallel": 2, "training": 2, "costs": 2, "planning": 2,
    "saving": 3, "faults": 3, "hosts": 3,
}
SUBJECTS = sorted({name.partition(".")[0] for name in MODULES} - {"__init__"})


def imports(text, modules):
    """The modules of the package that some code imports, wherever in it the import stands."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{each.name}" for each in node.names} | {node.module}
    ours = {name.removeprefix("meshbook.") for name in found if name.startswith("meshbook.")}
    return {known for name in ours for known in (name, f"{name}.__init__") if known in modules}


def arrows():
    """{module: modules that it imports} of the whole package."""
    return {name: imports(path.read_text("utf8"), MODULES) - {name}
            for name, path in MODULES.items()}


def upwards(graph):
    """The imports of a graph that lead to a higher floor."""
    floor = lambda name: FLOORS[name.partition(".")[0]]
    return [f"{one} -> {other}" for one, others in graph.items() if one != "__init__"
            for other in sorted(others) if floor(other) > floor(one)]


def circle(graph):
    """One circle of a graph as a list of names, or None."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]


def between_subjects(graph):
    """{subject: other subjects that it imports}."""
    subjects = {}
    for one, others in graph.items():
        here = subjects.setdefault(one.partition(".")[0], set())
        here |= {other.partition(".")[0] for other in others} - {one.partition(".")[0]}
    return subjects


def test_every_subject_has_a_floor_and_there_are_at_most_fifteen():
    assert set(SUBJECTS) == FLOORS.keys() and len(SUBJECTS) <= 15


def test_no_import_leads_upwards():
    assert upwards(arrows()) == []


def test_no_imports_go_round():
    graph = {one: others - {f"{one.partition('.')[0]}.__init__"} for one, others in arrows().items()}
    assert circle(graph) is None
    assert circle(between_subjects(arrows())) is None


def test_an_arrow_upwards_and_a_circle_are_seen():
    graph = {"sharding": imports("from meshbook.models import vit", MODULES)}
    assert "sharding -> models.vit" in upwards(graph)
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"] or circle(
        {"a": {"b"}, "b": {"a"}})


def test_every_import_that_is_written_anywhere_is_one_of_a_module():
    """Those in scripts that a page or a test hands to another process, too."""
    written = set()
    for pattern in ("book/*.md", "book/_ext/*.py", "tests/**/*.py", "benchmarks/*.py", "README.md"):
        for path in ROOT.glob(pattern):
            text = path.read_text("utf8")
            found = re.findall(r"(?:from|import) meshbook\.([\w.]+)", text)
            for names in re.findall(r"from meshbook import ([\w, ]+)", text):
                found += [name.partition(" as ")[0].strip() for name in names.split(",")]
            written |= {(path.name, name) for name in found}
    assert len(written) > 100
    assert [each for each in sorted(written)
            if each[1] not in MODULES and f"{each[1]}.__init__" not in MODULES] == []


@pytest.mark.parametrize("name", sorted(
    name.removesuffix(".__init__") for name in MODULES if name.endswith(".__init__")))
def test_a_package_says_what_readers_import(name):
    package = importlib.import_module(f"meshbook.{name}")
    assert package.__doc__ and package.__all__ == sorted(package.__all__)
    own = {path.stem for path in (PACKAGE / name).glob("*.py")}
    for each in package.__all__:
        assert hasattr(package, each) or each in own, f"meshbook.{name} has no {each}"
