"""Where the minutes of .ci/run went, page by page and folder by folder, from what its runs left.

    python3 .ci/minutes.py FOLDER

FOLDER holds sections.txt (one "seconds name" a line), a *.log for each build of pages and a *.xml
(JUnit) for each run of tests. Prints tables; exits 1 where the table of CONTRIBUTING.md promises
a page or a folder to a run in which none of its tests was executed.
"""

import re
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path

CONTRIBUTING = Path(__file__).resolve().parents[1] / "CONTRIBUTING.md"
BUILT = re.compile(r"^  (\S+) +executed in (\d+) s", re.MULTILINE)
ROW = re.compile(r"^\| `([^`]+)` \|(.*)\|$", re.MULTILINE)


def promised(text):
    """{page or folder: {runs in which it is}} of the table "What runs where"."""
    table = text.partition("## What runs where")[2]
    runs = re.findall(r"`([^`]+)`", re.search(r"^\| *\| (`.*`) \|$", table, re.MULTILINE)[1])
    return {name: {run for run, mark in zip(runs, marks.split("|"), strict=True) if mark.strip()}
            for name, marks in ROW.findall(table)}


def place(case):
    """The page or the folder of a test: notebooks/NAME, tests/FOLDER or tests/FILE.py."""
    parts = (case.get("classname") or "").split(".")
    if parts[0] == "notebooks" or (case.get("name") or "").endswith(".ipynb"):
        return case.get("name").removesuffix(".ipynb")
    name = "/".join(parts[:2])
    return f"{name}.py" if parts[1].startswith("test_") else name


def seconds(folder):
    """{page or folder: {run: seconds}} of everything that was executed, not skipped."""
    found = defaultdict(lambda: defaultdict(float))
    for log in sorted(folder.glob("*.log")):
        for name, took in BUILT.findall(log.read_text("utf8")):
            found[name][log.stem] += float(took)
    for report in sorted(folder.glob("*.xml")):
        for case in ET.parse(report).iter("testcase"):
            if case.get("name") and case.find("skipped") is None:
                found[place(case)][report.stem] += float(case.get("time"))
    return found


def table(rows, runs):
    """Text: a line for each row, longest first, and its seconds in every run."""
    lines = ["".join([f"{'seconds':34}", *(f"{run:>12}" for run in runs)])]
    for name, took in sorted(rows.items(), key=lambda row: -sum(row[1].values())):
        cells = (f"{took[run]:12.0f}" if run in took else f"{'-':>12}" for run in runs)
        lines.append(f"{name:34}{''.join(cells)}")
    return "\n".join(lines)


def missing(rows, runs, text):
    """What the table promises to one of these runs, and was not executed there."""
    return [f"{name} in {run}" for name, marked in promised(text).items()
            for run in sorted(marked & set(runs)) if run not in rows.get(name, {})]


def main(folder):
    rows = seconds(folder)
    runs = sorted({run for took in rows.values() for run in took})
    print(table(rows, runs))
    print("\nThe tests' seconds are those of workers side by side.\n")
    for line in (folder / "sections.txt").read_text("utf8").splitlines():
        took, _, name = line.partition(" ")
        print(f"{int(took) // 60:4}:{int(took) % 60:02}  {name}")
    if lacking := missing(rows, runs, CONTRIBUTING.read_text("utf8")):
        sys.exit(f"promised in CONTRIBUTING.md and not run: {'; '.join(lacking)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
