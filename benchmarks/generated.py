"""Generate faults: slips of the package's syntax trees, drawn by a seed, evenly over its folders.

    python -m benchmarks.generated             all that are drawn (make generated-faults)
    python -m benchmarks.generated 2/7         every seventh of them, from the second one on
    python -m benchmarks.generated survivors   those of the record that nothing caught, once more

Each is planted in a copy of the book. Then files of tests that execute it run one after the other,
those of its module first, until one fails: two, and after the page that teaches it, at the size
"test", more. The page runs also where tests have noticed. A fault is caught where something fails.
What was found is kept in _build/mutants, as `benchmarks.mutants` keeps it, so that a run that was
stopped goes on. A run of all faults writes the record results/generated.json, first when something
is known of each, and goes on from the record of its commit, too, such as in a clone of that commit;
survivors are examined again at a later commit, and the record then has both verdicts. A survivor is
called equivalent only in EQUIVALENT, with the reason. It fails where less than LEAST are caught,
and where a survivor survives again.
"""

import ast
import copy
import dataclasses
import functools
import itertools
import json
import random
import re
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields

from benchmarks import marks, mutants, syntax
from benchmarks.__main__ import ROOT, machine, provenance
from benchmarks.mutants import definitions
from benchmarks.slips import OPERATORS, Slip, edited, slips

sys.path.append(str(ROOT / "book" / "_ext"))
from run_chapter import cells  # noqa: E402

# Of a first draw, seed 44, 240 of 336 faults were caught when it was left, and 96 were not, each
# tried on up to three places; most of their kinds got tests. Of a second, seed 46, 272 of 336 were
# caught. Of the 64 others 7 change nothing that can be observed, 4 stood in code that did nothing,
# the code of 2 is gone, and the kinds of the other 51 got tests. Of a third, seed 47, 260 of 336
# were caught by two files of tests and the page; it was left there, since a file of tests was asked
# also where it never comes by the fault, and most kinds of the others got tests.
SEED, COUNT = 48, 336
FIRST, MOST, ALL = 2, 12, 1000  # files of tests: for each fault, for one that goes on, at all
OFTEN = 20  # runs after which the record is written again
LEAST = 0.9  # of the faults of a run have to be caught
RECORD = ROOT / "results" / "generated.json"
EQUIVALENT = {}  # {name of a fault: why nothing that can be observed changes}


@dataclass(frozen=True)
class Generated:
    """A slip in meshbook/<file>.py."""

    file: str
    slip: Slip

    @property
    def name(self):
        """It says where, what, and what stands there now."""
        return f"{self.file}, {self.slip}: {self.slip.was} -> {self.slip.becomes}"

    @property
    def path(self):
        """Of the module."""
        return ROOT / "meshbook" / f"{self.file}.py"

    def plant(self, folder):
        """The slip in a copy of the book: in its module, and in each cell with the same code."""
        module = folder / "meshbook" / f"{self.file}.py"
        sound = module.read_text("utf8")
        module.write_text(edited(sound, self.slip), "utf8")
        same = code_of(sound, self.slip.function)
        for page in folder.glob("book/*.md"):
            text = page.read_text("utf8")
            for code in cells(text):
                if self.slip.function and code_of(code, self.slip.function) == same:
                    text = text.replace(code, edited(code, self.slip))
            page.write_text(text, "utf8")


@functools.cache
def code_of(text, function):
    """The syntax tree of a function in some code, printed bare; None where it is not there."""
    found = definitions(text).get(function)
    return found and ast.dump(syntax.Bare().visit(copy.deepcopy(found)))


def all_slips(operators):
    """{folder of the package: {operator: [Generated]}}."""
    found = {}
    for path in sorted((ROOT / "meshbook").glob("*/*.py")):
        file = f"{path.parent.name}/{path.stem}"
        if file.startswith("faults/wrong"):  # they are wrong already
            continue
        for slip in slips(path.read_text("utf8"), operators):
            of = found.setdefault(path.parent.name, {})
            of.setdefault(slip.operator, []).append(Generated(file, slip))
    return found


def drawn(seed=SEED, count=COUNT, operators=OPERATORS):
    """So many of them: folders take turns, and in each folder operators do."""
    chance, found, chosen = random.Random(seed), all_slips(operators), []
    for of in found.values():
        for each in of.values():
            chance.shuffle(each)
    turns = {folder: [name for name in operators if name in of] for folder, of in found.items()}
    for names in turns.values():
        chance.shuffle(names)
    while len(chosen) < count and any(turns.values()):
        for folder, names in turns.items():
            if not names or len(chosen) == count:
                continue
            name = names.pop(0)
            chosen.append(found[folder][name].pop())
            if found[folder][name]:
                names.append(name)
    return chosen


@functools.cache
def imports(text):
    """Names of the package's modules that some code imports, such as "parallel/pipeline"."""
    found = set()
    for node in ast.walk(syntax.parsed(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("meshbook"):
            inside = node.module.split(".")[1:]
            found |= {"/".join(inside), *("/".join([*inside, each.name]) for each in node.names)}
        if isinstance(node, ast.Import):
            found |= {"/".join(each.name.split(".")[1:]) for each in node.names
                      if each.name.startswith("meshbook.")}
    return found


@functools.cache
def tests_of(file, function=""):
    """All files of tests: first those that import a module, of these those that name a function,
    or what calls it in its module, and of these those of the module's folder and name.
    """
    folder, _, name = file.partition("/")
    own, callers = [function.rpartition(".")[2]], callers_of(file, function.partition(".")[0])
    found = []
    for path, text in code_of_tests().items():
        _, of, stem = path.split("/")
        named = [any(re.search(rf"\b{each}\b", text) for each in names if each)
                 for names in (own, callers)]
        found.append(((not uses(text, file), *(not each for each in named), of != folder,
                       name not in stem, len(imports(text))), path))
    return [path for _, path in sorted(found)]


@functools.cache
def callers_of(file, name):
    """What a module defines for others that calls something of it, directly or not, and itself."""
    tree = syntax.parsed((ROOT / "meshbook" / f"{file}.py").read_text("utf8"))
    named = {each.name: {node.id for node in ast.walk(each) if isinstance(node, ast.Name)}
             for each in tree.body if isinstance(each, (ast.FunctionDef, ast.ClassDef))}
    found, before = {name}, set()
    while found != before:
        before = found
        found = found | {each for each, names in named.items() if names & found}
    return sorted(each for each in found if not each.startswith("_"))


@functools.cache
def code_of_tests():
    """{path of a file of tests: its code, and that of tests/support which it imports or runs}."""
    support = {path.stem: path.read_text("utf8") for path in ROOT.glob("tests/support/*.py")}

    def whole(code):
        return "\n".join([code, *(also for name, also in support.items() if re.search(
            rf"^(from|import) {name}\b|\b{name}\.py\b", code, re.MULTILINE))])

    return {path.relative_to(ROOT).as_posix(): whole(path.read_text("utf8"))
            for path in sorted(ROOT.glob("tests/*/test_*.py"))}


def uses(text, file):
    """Whether some code imports a module, or its folder and has one of the module's names."""
    taken, folder = imports(text), file.partition("/")[0]
    return file in taken or folder in taken and any(
        re.search(rf"\b{name}\b", text) for name in names_of(file))


@functools.cache
def names_of(file):
    """What a module gives to its folder: the names of its functions and classes."""
    text = (ROOT / "meshbook" / f"{file}.py").read_text("utf8")
    return [name for name in definitions(text) if name and not name.startswith("_")
            and "." not in name]


def page_of(generated):
    """The page whose cells have the edited function, or the first that imports its module."""
    sound = generated.path.read_text("utf8")
    same = generated.slip.function and code_of(sound, generated.slip.function)
    pages = code_of_pages()
    showing = (name for name, code in pages.items()
               if same and code_of(code, generated.slip.function) == same)
    importing = (name for name, code in pages.items() if generated.file in imports(code))
    using = (name for name, code in pages.items() if uses(code, generated.file))
    return next(itertools.chain(showing, importing, using), None)


@functools.cache
def code_of_pages():
    """{page: the code of its cells, one after the other}."""
    return {path.stem: "\n".join(filter(definitions, cells(path.read_text("utf8"))))
            for path in sorted(ROOT.glob("book/*.md"))}


def places_of(generated, most, executing):
    """What runs for a fault: files of tests that execute it, so many at most, and its page.

    executing: as of `marks.executing`. The page comes behind the first FIRST files.
    """
    tests = [path for path in tests_of(generated.file, generated.slip.function)
             if generated.name in executing[path]][:most]
    return [*tests[:FIRST], *filter(None, [page_of(generated)]), *tests[FIRST:]]


def endings(chosen, most, known=None, keep=lambda ended: None):
    """One {place: how it ended} for each fault.

    First only what nothing has caught yet goes on to its next place, so that survivors are known
    early; then the pages of all others run. A run that takes more than five times what it takes
    without a fault, and two minutes, is ended. known: {name: what is known
    of how it ended}; keep(endings) is called from time to time once something is known of all.
    """
    executing, known = marks.executing(chosen, code_of_tests()), known or {}
    places = [places_of(each, most, executing) for each in chosen]
    ended = [dict(known.get(each.name, {})) for each in chosen]
    seconds = {}  # of what has run without a fault

    def run(job):
        n, place = job
        found = mutants.attempt(place, chosen[n].plant, 120 + 5 * seconds[place])
        print(f"{found['ended']:10} {chosen[n].name} ({place}, {found['seconds']:.0f} s) "
              f"{found['says']}", flush=True)
        ended[n][place] = found["ended"]

    with ThreadPoolExecutor(mutants.TOGETHER) as pool:
        for everything, rank in itertools.product((False, True), range(max(map(len, places)))):
            jobs = [(n, each[rank]) for n, each in enumerate(places) if rank < len(each)]
            jobs = [(n, place) for n, place in jobs if place not in ended[n]
                    and (not mutants.of_tests(place) if everything
                         else not any(map(is_caught, ended[n].values())))]
            seconds |= mutants.sound(sorted({place for _, place in jobs} - seconds.keys()))
            for done, _ in enumerate(pool.map(run, jobs)):
                if everything and done % OFTEN == 0:
                    keep(ended)
            if everything:
                keep(ended)
    return ended


def is_caught(how):
    """Whether a place noticed; one that does not end has noticed too, as in other such tools."""
    return how not in ("survived", "killed")


def verdict(name, ended):
    """caught, equivalent (and not caught), survived, or killed, where nothing can be said."""
    if any(map(is_caught, ended.values())):
        return "caught"
    if "killed" in ended.values():
        return "killed"
    return "equivalent" if name in EQUIVALENT else "survived"


def rows_of(chosen, most, known=None, keep=lambda rows: None):
    """The rows of faults: what each is, and how the tests of its module and its page ended.

    known: {name: {place: how it ended}}; keep(rows) is called from time to time.
    """
    def rows(endings):
        return [{"name": each.name, "file": each.file, **asdict(each.slip),
                 "verdict": verdict(each.name, ended), "ended": ended}
                for each, ended in zip(chosen, endings, strict=True)]

    return rows(endings(chosen, most, known, lambda endings: keep(rows(endings))))


def score(rows):
    """How many there were, what became of them, and how many the tests and the pages caught.

    "pages": of how many faults the page has run.
    """
    verdicts = [row["verdict"] for row in rows]
    by = lambda tests, how: sum(any(how(ended) for place, ended in row["ended"].items()
                                    if mutants.of_tests(place) == tests) for row in rows)
    return {"faults": len(rows), **{each: verdicts.count(each) for each in (
        "caught", "survived", "equivalent")}, "by tests": by(True, is_caught),
        "by pages": by(False, is_caught), "pages": by(False, bool)}


def examined_again(record, commit):
    """The record with its survivors examined once more, by all that executes them.

    A survivor keeps its row and gets "again", how it ended now; "gone" is one whose code is no
    longer there.
    """
    there = {row["name"]: from_row(row) for row in record["faults"] if row["verdict"] == "survived"}
    found = dict.fromkeys(there, {"verdict": "gone", "ended": {}})
    still = [name for name, each in there.items() if each is not None]
    for name, row in zip(still, rows_of([there[name] for name in still], ALL), strict=True):
        found[name] = {"verdict": verdict(name, row["ended"]), "ended": row["ended"]}
    faults = [row | ({"again": {"commit": commit} | found[row["name"]]}
                     if row["name"] in found else {}) for row in record["faults"]]
    return record | {"score": score(faults), "faults": faults}


def caught(record):
    """The share of faults that were caught when they were drawn, of all that change something."""
    now = Counter(row.get("again", row)["verdict"] for row in record["faults"])
    return record["score"]["caught"] / (len(record["faults"]) - now["equivalent"])


def survivors(record):
    """The names of those that are there, that nothing has caught, and that are not equivalent."""
    now = {row["name"]: row.get("again", row)["verdict"] for row in record["faults"]}
    return [name for name, found in now.items() if found not in ("caught", "equivalent", "gone")]


def from_row(row):
    """The fault of a row of the record, or None where its code is no longer there.

    Where code has moved within its function, the only slip that is like it is taken for it.
    """
    slip = Slip(**{field.name: row[field.name] for field in fields(Slip)})
    slip = dataclasses.replace(slip, path=tuple(slip.path))
    path = ROOT / "meshbook" / f"{row['file']}.py"
    there = slips(path.read_text("utf8")) if path.exists() else []
    like = [each for each in there if dataclasses.replace(each, path=slip.path) == slip]
    if slip in like or len(like) == 1:
        return Generated(row["file"], slip if slip in like else like[0])
    return None


def known(commit):
    """{name: how it ended} of what is recorded of faults of this commit: a run goes on there."""
    record = json.loads(RECORD.read_text("utf8")) if RECORD.exists() else {"faults": []}
    same = record["faults"] and record["provenance"]["commit"] == commit
    return {row["name"]: row["ended"] for row in record["faults"]} if same else {}


def write(record):
    """Write the record."""
    RECORD.write_text(json.dumps(record, indent=1) + "\n", "utf8")


def main(words):
    command = " ".join(["python -m benchmarks.generated", *words])
    source = {"machine": machine(), **provenance(command)}
    if words == ["survivors"]:
        record = examined_again(json.loads(RECORD.read_text("utf8")), source["commit"])
    else:
        part, _, parts = (words or ["1/1"])[0].partition("/")
        record = {"provenance": source, "seed": SEED}
        keep = lambda rows: words or write(record | {"score": score(rows), "faults": rows})
        rows = rows_of(drawn()[int(part) - 1::int(parts)], MOST, known(source["commit"]), keep)
        record |= {"score": score(rows), "faults": rows}
    print(json.dumps(record["score"]))
    if words in ([], ["survivors"]):
        write(record)
    open_now = survivors(record)
    if open_now and words == ["survivors"] or caught(record) < LEAST:
        sys.exit(f"not caught: {'; '.join(open_now)}")


if __name__ == "__main__":
    main(sys.argv[1:])
