"""Plant faults in the package, one at a time, and let a page find them, or the tests of the code.

    python -m benchmarks.mutants             all of them, into results/mutants.json (make mutants)
    python -m benchmarks.mutants NAME ...    those whose names contain one of these, into it as well

A fault of mutants.toml is an edit of a module, made in a copy of the book: in the module and in
those cells of the page that define the same (`benchmarks.syntax` says how it is located), or of
the page's own code. Then the page runs at the size "test", to its end or to the first cell that
fails. Code that no page teaches (the readers of HLO, checkpoints, loaders) has a file of tests in
the page's place, which runs to its first failure. What was found is kept in _build/mutants by a hash of the package and the page, so that a run that was stopped goes on.
"""

import functools
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks import syntax
from benchmarks.__main__ import ROOT, machine, provenance
from meshbook.hlo.options import FAST, flags

sys.path.append(str(ROOT / "book" / "_ext"))
from run_chapter import cells  # noqa: E402

TABLE = Path(__file__).with_suffix(".toml")
EDIT = ("function", "node", "which", "becomes")
BETWEEN = "\n# the next cell\n"
KEPT = ROOT / "_build" / "mutants"
COMPILED = ROOT / "_build" / "compiled"
RECORD = ROOT / "results" / "mutants.json"
LIMIT = 900  # seconds for one page: what takes longer is a fault of this program
BY = {"ProofFailed": "proof", "AssertionError": "assertion", "Failed": "assertion"}
NOTHING_SAID = ("timed out", "killed")  # neither caught nor survived
CRASHES = (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGFPE, -signal.SIGILL, -signal.SIGBUS)
TOGETHER = 2  # pages that run at the same time


@dataclass(frozen=True)
class Edit:
    """Other code in the place of a node: the only one of its shape in a function, or one of several.

    function: its qualified name, or that of a class, a field or a constant. which: (place, how many
    there are). becomes: what `syntax.replaced` takes.
    """

    function: str
    node: str
    becomes: str
    which: tuple = (1, 1)

    def __call__(self, text):
        """The text with the edit. Raises ValueError where its node is not there."""
        found = definitions(text)
        if self.function not in found:
            raise ValueError(f"expected {self.function}, found {', '.join(filter(None, found))}")
        node = syntax.located(found[self.function], self.node, *self.which)
        return syntax.replaced(text, node, self.becomes)


@dataclass(frozen=True)
class Fault:
    """Edits of meshbook/<file>.py, mostly one, and the page that teaches what they break.

    Without a file, the page's own code is edited. page: its name, or the path of a file of tests,
    tests/<folder>/test_<subject>.py. story: what went wrong, in a line. equivalent: why nothing
    that can be observed changes, for a fault of which that is claimed; then the page has to run to
    its end.
    """

    name: str
    file: str
    page: str
    story: str
    edits: tuple[Edit, ...]
    equivalent: str = ""

    @property
    def path(self):
        """Of the edited file, in the repository."""
        return f"meshbook/{self.file}.py" if self.file else f"book/{self.page}.md"


def faults():
    """All faults of the table."""
    return [fault(each) for each in tomllib.loads(TABLE.read_text("utf8"))["fault"]]


def fault(said):
    """The fault of an entry: its own edit, and those of its list `also`."""
    edits = [Edit(**{name: each[name] for name in EDIT if name in each})
             for each in (said, *said.get("also", []))]
    rest = {name: value for name, value in said.items() if name not in (*EDIT, "also")}
    return Fault(**rest, edits=tuple(edits))


def in_module(fault, text):
    """The module's text with the fault. Raises ValueError where a node is not there as it says."""
    try:
        return functools.reduce(lambda text, edit: edit(text), fault.edits, text)
    except ValueError as error:
        raise ValueError(f"{fault.name}: {fault.path}: {error}") from None


def in_page(fault, page, module):
    """A page's text with the fault in each cell that defines what it edits as the module does.

    page, module: the texts without the fault. The page's own fault (without a module) is in the one
    cell that has the node.
    """
    if not fault.file:
        own = [code for code in cells(page) if definitions(code)]
        edited = in_module(fault, BETWEEN.join(own)).split(BETWEEN)
        for before, after in zip(own, edited, strict=True):
            page = page.replace(before, after)
        return page
    sound = definitions(module)
    for code in cells(page):
        edited, shown = code, definitions(code)
        for edit in fault.edits:
            name = edit.function
            if name in shown and syntax.same(shown[name], sound[name]):
                edited = edit(edited)
        page = page.replace(code, edited)
    return page


@functools.lru_cache(2000)
def definitions(code):
    """What some code defines; a cell of magics, which is no Python, defines nothing."""
    try:
        return syntax.definitions(syntax.parsed(code))
    except SyntaxError:
        return {}


def copy_book(folder):
    """All files of the repository in a folder, as they are here; returns the folder."""
    for name in tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    COMPILED.mkdir(parents=True, exist_ok=True)  # most faults leave most programs as they are
    (folder / "_build").mkdir()
    (folder / "_build" / "compiled").symlink_to(COMPILED)
    return folder


@functools.cache
def tracked():
    """Paths of the files that git has, or would have with what is new, in the repository."""
    found = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate"],
        cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in found if (ROOT / name).is_file()]


def plant(fault, folder):
    """The fault in a copy of the book: in its module and in its page."""
    sound = ""
    if fault.file:
        module = folder / fault.path
        sound = module.read_text("utf8")
        module.write_text(in_module(fault, sound), "utf8")
    if not of_tests(fault.page):
        page = folder / "book" / f"{fault.page}.md"
        page.write_text(in_page(fault, page.read_text("utf8"), sound), "utf8")


def of_tests(page):
    """Whether this is the path of a file of tests, and not the name of a page."""
    return page.startswith("tests/")


def fingerprint(folder, page):
    """A hash of everything in a copy that can change what a page does."""
    own = [folder / "conftest.py", *sorted(folder.glob("tests/**/*.py"))]
    if not of_tests(page):
        own = [folder / "book" / f"{page}.md", folder / "book/_ext/run_chapter.py"]
    paths = [folder / "helpers.py", *own, *sorted(folder.glob("meshbook/**/*.py"))]
    digest = hashlib.sha256(page.encode())  # all files of tests read the same paths
    for path in paths:
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def environment(folder):
    """Variables of a page's process; programs are compiled as in the tests (conftest.py)."""
    without = {name: value for name, value in os.environ.items()
               if name not in ("MESHBOOK_DATA", "PYTHONPATH")}
    return without | {
        "MESHBOOK_SIZE": "test", "PYTHONPATH": str(folder), "XLA_FLAGS": flags(FAST),
    }


def run_page(folder, page, limit=LIMIT):
    """Run a page of a copy: a dict of how it ended, the cell, what it said, and the seconds."""
    command = ["book/_ext/run_chapter.py", f"book/{page}.md"]
    if of_tests(page):
        command = ["-m", "pytest", "-x", "-q", "--tb=short", page]
    begin = time.perf_counter()
    try:
        done = subprocess.run([sys.executable, *command], cwd=folder, env=environment(folder),
                              capture_output=True, text=True, errors="replace", timeout=limit)
        if of_tests(page):
            found = ending_of_tests(done.returncode, done.stdout)
        else:
            text = (folder / "book" / f"{page}.md").read_text("utf8")
            found = ending(done.returncode, done.stderr, page, text)
    except subprocess.TimeoutExpired:
        found = {"ended": "timed out", "cell": None, "says": f"not done after {limit} s"}
    return found | {"seconds": round(time.perf_counter() - begin, 1)}


def ending(code, stderr, page, text):
    """How a page's process ended: survived, proof, assertion or error, in which cell, saying what.

    code, stderr: of the process; text: of the page. proof: a ProofFailed; assertion: an
    AssertionError; error: whatever else stopped it.
    """
    if code == 0:
        return {"ended": "survived", "cell": None, "says": ""}
    if code in (-signal.SIGTERM, -signal.SIGKILL):  # somebody else ended it
        return {"ended": "killed", "cell": None, "says": f"by signal {-code}"}
    frames = re.findall(rf'File "<{re.escape(page)}, cell (\d+)>", line (\d+)', stderr)
    kind, says = raised(stderr) or (f"exit status {code}", stderr.strip()[-200:])
    if frames and not says:  # an assertion without words
        cell, line = map(int, frames[-1])
        says = cells(text)[cell - 1].splitlines()[line - 1].strip()
    return {"ended": BY.get(kind, "error"), "cell": int(frames[0][0]) if frames else None,
            "says": f"{kind}: {says}"[:240]}


def ending_of_tests(code, stdout):
    """The same of a file of tests, whose first failure pytest reports; "cell" is that test."""
    if code == 0:
        return {"ended": "survived", "cell": None, "says": ""}
    if code in (-signal.SIGTERM, -signal.SIGKILL):
        return {"ended": "killed", "cell": None, "says": f"by signal {-code}"}
    said = re.findall(r"^E +(\S.*)$", stdout, re.MULTILINE)
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", stdout, re.MULTILINE)
    # "assert 1 == 2" stands alone: pytest leaves out the name of an assertion's error
    kind = re.match(r"(?:[\w.]+\.)?(\w+)(?:: |$)|assert ", said[0] if said else "nothing said")
    kind = (kind[1] or "AssertionError") if kind else "error"
    return {"ended": BY.get(kind, "error"),
            "cell": failed[0].rpartition("::")[2] if failed else None,
            "says": (said[0] if said else f"exit status {code}: {stdout.strip()[-160:]}")[:240]}


def raised(stderr):
    """(name of the last exception, first line that it says) of a process's stderr, or None."""
    _, found, trace = stderr.rpartition("Traceback (most recent call last):\n")
    lines = [line for line in trace.splitlines() if line.strip()]
    at = next((n for n, line in enumerate(lines) if not line.startswith(" ")), None)
    if not found or at is None:
        return None
    kind, colon, message = lines[at].partition(":")
    words = [message.strip(), *map(str.strip, lines[at + 1:])] if colon else []
    return kind.rpartition(".")[2], next(filter(None, words), "")


def attempt(page, planted=None, limit=LIMIT):
    """How a page ends with a fault, or with none; kept, and not run again for the same files.

    planted: plants the fault in the copy of the book in a folder. limit: seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        folder = copy_book(Path(folder))
        if planted is not None:
            planted(folder)
        kept = KEPT / f"{fingerprint(folder, page)}.json"
        if kept.exists():
            return json.loads(kept.read_text("utf8"))
        found = run_page(folder, page, limit)
    if found["ended"] not in NOTHING_SAID and (planted or found["ended"] == "survived"):
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(found), "utf8")
    return found


def verdict(fault, found):
    """caught, survived, equivalent (and not caught), or why nothing can be said."""
    if found["ended"] in NOTHING_SAID:
        return found["ended"]
    caught = found["ended"] != "survived"
    if fault.equivalent:
        return "caught, though called equivalent" if caught else "equivalent"
    return "caught" if caught else "survived"


def sound(pages):
    """{page: its seconds without a fault}; exits where some fail: then nothing can be said."""
    seconds, failed = {}, []
    with ThreadPoolExecutor(TOGETHER) as pool:
        for page, found in zip(pages, pool.map(attempt, pages), strict=True):
            print(f"{page}: {found['ended']} without a fault, {found['seconds']:.0f} s", flush=True)
            seconds[page] = found["seconds"]
            if found["ended"] != "survived":
                failed.append(f"{page}, in cell {found['cell']}: {found['says']}")
    if failed:
        sys.exit("\n".join(["these fail without any fault:", *failed]))
    return seconds


def examine(chosen):
    """One row for each fault: what it is, and how its page ended."""
    def examined(fault):
        found = attempt(fault.page, functools.partial(plant, fault))
        row = {"name": fault.name, "file": fault.file, "page": fault.page, "story": fault.story,
               "verdict": verdict(fault, found), **found}
        where = f"at {found['cell']}: {found['says']}" if found["cell"] else found["says"]
        print(f"{row['verdict']:10} {fault.name} ({fault.page}, {found['seconds']:.0f} s) {where}",
              flush=True)
        return row | ({"equivalent": fault.equivalent} if fault.equivalent else {})

    with ThreadPoolExecutor(TOGETHER) as pool:
        return list(pool.map(examined, chosen))


def score(rows):
    """How many faults there were, and what became of them."""
    verdicts = [row["verdict"] for row in rows]
    caught = [row["ended"] for row in rows if row["verdict"] == "caught"]
    return {"faults": len(rows), "caught": len(caught),
            "by": {how: caught.count(how) for how in ("proof", "assertion", "error")},
            "equivalent": verdicts.count("equivalent"), "survived": verdicts.count("survived")}


def merged(before, rows, source):
    """The record with these rows in the place of what it had; whose run they are stands in "later"."""
    done = {row["name"]: row for row in rows}
    found = {row["name"]: row for row in before["mutants"]} | done
    ordered = [found[fault.name] for fault in faults() if fault.name in found]
    runs = [run | {"faults": [name for name in run["faults"] if name not in done]}
            for run in before.get("later", [])]
    later = [run for run in runs if run["faults"]] + [source | {"faults": list(done)}]
    return before | {"later": later, "score": score(ordered), "mutants": ordered}


def main(words):
    chosen = [fault for fault in faults()
              if not words or any(word in fault.name for word in words)]
    seconds = sum(sound(sorted({fault.page for fault in chosen})).values())
    rows = examine(chosen)
    seconds += sum(row["seconds"] for row in rows)
    command = f"python -m benchmarks.mutants {' '.join(words)}" if words else "make mutants"
    source = {"machine": machine(), **provenance(command)}
    if words and RECORD.exists():
        record = merged(json.loads(RECORD.read_text("utf8")), rows, source)
    else:
        record = {"provenance": source, "size": "test", "minutes": round(seconds / 60 / TOGETHER),
                  "score": score(rows), "mutants": rows}
    print(json.dumps(score(rows)))
    if not words or RECORD.exists():
        RECORD.write_text(json.dumps(record, indent=1) + "\n", "utf8")
    open_questions = [row["name"] for row in rows if row["verdict"] not in ("caught", "equivalent")]
    if open_questions:
        sys.exit(f"not answered: {'; '.join(open_questions)}")


if __name__ == "__main__":
    main(sys.argv[1:])
