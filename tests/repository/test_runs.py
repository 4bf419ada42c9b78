"""What runs where: the table of CONTRIBUTING.md is what .ci/run does, and nothing is in no run."""
import importlib.util
import re
import subprocess
from pathlib import Path

from notebooks import chapters

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text("utf8")
MAKE = (ROOT / "Makefile").read_text("utf8")
RUNS = ("start", "book", "test", "newer", "test-aot")

spec = importlib.util.spec_from_file_location("minutes", ROOT / ".ci" / "minutes.py")
minutes = importlib.util.module_from_spec(spec)
spec.loader.exec_module(minutes)


def paths_of(run):
    """The paths that a run gives to pytest, as the Makefile or .ci/run says."""
    if run == "newer":
        (listed,) = re.findall(r"^newer=(\(.*?\))$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
        echo = f"paths={listed}; printf '%s\\n' \"${{paths[@]}}\""
        return subprocess.check_output(["bash", "-c", echo], text=True, cwd=ROOT).split()
    if run == "test":
        return re.search(r"^TESTS \?= (.*)$", MAKE, re.MULTILINE)[1].split()
    return re.search(r"^test-aot:.*?(tests/\S+)$", MAKE, re.MULTILINE | re.DOTALL)[1].split()


def within(place, path):
    """Whether a path that is given to pytest has tests of this page, folder or file in it."""
    if not place.startswith("tests/"):
        return path in ("notebooks", f"notebooks/{place}.ipynb")
    return path in ("tests", place) or path.startswith(f"{place}/")


def expected():
    """{page, folder of tests or file of tests: {runs in which it is}}."""
    pages = [path.stem for path in sorted((ROOT / "book").glob("*.md"))
             if "```{code-cell}" in path.read_text("utf8")]
    tests = sorted({"/".join(path.relative_to(ROOT).parts[:2])
                    for path in (ROOT / "tests").glob("**/test_*.py")})
    notebooks = {path.stem for path in chapters()}
    rows = {page: {"book"} | ({"start"} if page == "start-here" else set()) for page in pages}
    rows |= {place: set() for place in tests}
    for run in ("test", "newer", "test-aot"):
        for place in rows:
            if place.startswith("tests/") or place in notebooks:
                rows[place] |= {run for path in paths_of(run) if within(place, path)}
    return rows


def test_the_table_is_what_runs():
    assert minutes.promised(TEXT) == expected()


def test_every_page_and_every_folder_is_in_a_run_and_in_make_test():
    rows = expected()
    assert len(rows) > 30 and [name for name, runs in rows.items() if not runs] == []
    assert [name for name, runs in rows.items() if name.startswith("tests/")
            and "test" not in runs] == []


def test_the_table_names_the_runs():
    assert re.findall(r"^\| *\| `(.*)` \|$", TEXT, re.MULTILINE) == ["` | `".join(RUNS)]


def test_what_was_promised_and_not_run_is_found(tmp_path, capsys):
    (tmp_path / "sections.txt").write_text("125 make book\n4 make test\n")
    (tmp_path / "book.log").write_text("  start-here      executed in 31 s\n  x   FAILED: y\n")
    (tmp_path / "test.xml").write_text(
        '<testsuites><testcase classname="tests.hlo.test_a" name="test_b" time="1.5" />'
        '<testcase classname="tests.hlo.test_a" name="test_c" time="2.5" />'
        '<testcase classname="tests.test_d" name="test_e" time="4" />'
        '<testcase classname="tests.data.test_f" name="test_g" time="0"><skipped /></testcase>'
        '<testcase classname="notebooks.errata.ipynb" name="errata.ipynb" time="6" /></testsuites>')
    rows = minutes.seconds(tmp_path)
    assert rows == {"start-here": {"book": 31}, "tests/hlo": {"test": 4}, "errata": {"test": 6},
                    "tests/test_d.py": {"test": 4}}
    text = ("## What runs where\n\n| | `book` | `test` |\n|---|---|---|\n| `start-here` | x | |\n"
            "| `errata` | x | x |\n| `tests/data` | | x |\n| `tests/hlo` | | x |\n")
    assert minutes.promised(text)["errata"] == {"book", "test"}
    assert minutes.missing(rows, ["book", "test"], text) == ["errata in book", "tests/data in test"]
    assert minutes.missing(rows, ["test"], text) == ["tests/data in test"]
    print(minutes.table(rows, ["book", "test"]))
    assert "start-here                                  31           -" in capsys.readouterr().out
