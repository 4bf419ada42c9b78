"""What is written twice in the repository says the same both times."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONFIG = yaml.safe_load((ROOT / "_config.yml").read_text())
LOCK = "requirements.lock"
LOCKS = [LOCK, "requirements-start.lock", "requirements-aot.lock", "requirements-ray.lock",
         "requirements-uv.lock"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MODULES = [*ROOT.glob("meshbook/**/*.py"), *ROOT.glob("book/_ext/*.py")]


def requirements(name):
    """The requirements that a file lists, with what it includes."""
    for line in (ROOT / name).read_text().splitlines():
        line = line.split("#")[0].strip()
        if line.startswith("-r "):
            yield from requirements(line.removeprefix("-r "))
        elif line:
            yield line


def pins(name):
    """The versions that a lock chooses, by package; one or more each."""
    found = re.findall(r"^([a-z0-9._-]+)==(\S+)", (ROOT / name).read_text(), re.MULTILINE)
    return {package: {v for p, v in found if p == package} for package, _ in found}


def bare(requirement):
    return re.split(r"[<>=\[ ]", requirement)[0]


@pytest.mark.parametrize("name", LOCKS)
def test_every_pin_has_a_hash(name):
    blocks = re.split(r"\n(?=\S)", (ROOT / name).read_text())
    pinned = [block for block in blocks if re.match(r"\S+==", block)]
    assert pinned and all("--hash=sha256:" in block for block in pinned)


def test_the_lock_holds_all_requirements():
    assert {bare(line) for line in requirements("requirements-dev.txt")} <= pins(LOCK).keys()


@pytest.mark.parametrize("name", ["requirements-start.lock", "requirements-aot.lock"])
def test_all_run_on_the_same_versions(name):
    whole = pins(LOCK)
    for package, versions in pins(name).items():
        assert versions == whole.get(package, versions), package
    assert len(pins(name).keys() & whole.keys()) > 20


def test_the_preface_installs_nothing_large():
    assert not {"torch", "torchvision", "jupyter-book"} & pins("requirements-start.lock").keys()


def test_the_package_asks_for_what_the_book_asks_for():
    listed = set(requirements("requirements.txt"))
    extras = dict(PROJECT["optional-dependencies"])
    assert set(extras.pop("ray")) <= set(requirements("requirements-ray.txt"))  # of one test
    assert set(PROJECT["dependencies"]) | set(sum(extras.values(), [])) == listed


def test_the_address_of_the_repository_is_the_same_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["repository-code"] == CONFIG["repository"]["url"]
    assert citation["url"] == CONFIG["html"]["baseurl"]
    assert CONFIG["html"]["baseurl"] in (ROOT / "README.md").read_text()


def test_the_version_is_the_same_everywhere():
    version = PROJECT["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == version
    assert f"## {version} ({citation['date-released']})" in (ROOT / "CHANGELOG.md").read_text()
    about = (ROOT / "book" / "about.md").read_text()
    assert f"version = {{{version}}}" in about and citation["url"] in about
    assert f"year    = {{{citation['date-released'].year}}}" in about


def test_every_chapter_is_in_the_table_of_contents():
    toc = (ROOT / "_toc.yml").read_text()
    missing = [path.stem for path in ROOT.glob("book/*.md") if f"book/{path.stem}\n" not in toc]
    assert missing == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_pin_actions_and_ask_for_little(path):
    workflow = path.read_text()
    used = re.findall(r"uses: (\S+)", workflow)
    assert used and all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action) for action in used)
    assert yaml.safe_load(workflow)["permissions"] == {"contents": "read"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_module_is_short(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 300
    assert [line for line in lines if len(line) > 100] == []


def test_no_two_files_of_tests_have_one_name():
    """pytest cannot collect two modules of one name."""
    names = [path.name for path in ROOT.glob("tests/**/test_*.py")]
    assert {name for name in names if names.count(name) > 1} == set()


def test_files_of_tests_are_short():
    lines = {path.name: len(path.read_text().splitlines()) for path in ROOT.glob("tests/**/*.py")}
    assert lines["test_build.py"] > 100 and {name for name, n in lines.items() if n > 300} == set()
