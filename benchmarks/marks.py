"""Which drawn faults a file of tests can notice: those whose statement it executes.

In a copy of the book every statement that has a fault is marked. Each file of tests runs there
once and leaves a mark for each of them that it comes by, in other processes, too. For all else it
is the run that it is without a fault, so that it need not run again. A file that fails with the
marks, such as one that reads the package's source, is asked about every fault.
"""

import ast
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from benchmarks import mutants, syntax

LIMIT = 1800  # seconds: of a file that is not done by then, nothing is known
MARK = """
def _come_by(number, known=set()):
    if number not in known:
        known.add(number)
        open({folder!r} + "/" + str(number), "w").close()
"""


def statement(node: ast.AST, path: Sequence):
    """The innermost statement of a function that holds the node at the end of a path; None where
    that is computed when the module is read, as a constant or a default is.
    """
    found = None
    for step in path:
        below = node[step] if isinstance(node, list) else getattr(node, step)
        if isinstance(node, list) and isinstance(below, ast.stmt):
            found = below
        node = below
    return found


def plant(folder: Path, faults: Iterable, marks: Path):
    """Mark the statements of faults in a copy of the book; returns the numbers of those without."""
    without, by_file = set(), {}
    for number, fault in enumerate(faults):
        by_file.setdefault(fault.file, []).append((number, fault.slip))
    for file, slips in by_file.items():
        path = folder / "meshbook" / f"{file}.py"
        text = path.read_text("utf8")
        tree, bare = ast.parse(text), syntax.Bare().visit(ast.parse(text))
        nodes = syntax.definitions(bare)
        found = {number: statement(nodes[slip.function], slip.path) for number, slip in slips}
        without |= {number for number, each in found.items() if each is None}
        for number, each in found.items():
            if each is not None:
                body, at = _same_statement(tree, each)
                body[at:at] = ast.parse(f"_come_by({number})").body
        begin = next(n for n, each in enumerate(tree.body) if not _comes_first(each))
        tree.body[begin:begin] = ast.parse(MARK.format(folder=str(marks))).body
        path.write_text(ast.unparse(tree), "utf8")
    return without


def _same_statement(tree, wanted):
    """(list, place in it) of a statement in the tree with docstrings and annotations."""
    for node in ast.walk(tree):
        for _, body in ast.iter_fields(node):
            for at, each in enumerate(body if isinstance(body, list) else ()):
                if type(each) is type(wanted) and (each.lineno, each.col_offset) == (
                        wanted.lineno, wanted.col_offset):
                    return body, at
    raise ValueError(f"expected a statement in line {wanted.lineno}, found none")


def _comes_first(each):
    """Whether a statement has to stand before all others."""
    return (isinstance(each, ast.ImportFrom) and each.module == "__future__"
            or isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))


def executing(faults: Sequence, places: Iterable[str]):
    """{file of tests: names of the faults whose statement it executes}; what is known is kept."""
    with tempfile.TemporaryDirectory() as folder:
        free = SimpleQueue()
        for number in range(mutants.TOGETHER):
            copy, marks = Path(folder, f"book{number}"), Path(folder, f"marks{number}")
            mutants.copy_book(copy)
            free.put((copy, marks, plant(copy, faults, marks)))

        def look(place):
            mine = free.get()
            try:
                return set(_look(*mine, place, [each.name for each in faults]))
            finally:
                free.put(mine)

        with ThreadPoolExecutor(mutants.TOGETHER) as pool:
            places = sorted(places)
            return dict(zip(places, pool.map(look, places), strict=True))


def _look(copy, marks, without, place, names):
    """The names of the faults that a file of tests comes by in a marked copy."""
    key = "\0".join([mutants.fingerprint(mutants.ROOT, place), *names])
    kept = mutants.KEPT / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
    if kept.exists():
        return json.loads(kept.read_text("utf8"))
    shutil.rmtree(marks, ignore_errors=True)
    marks.mkdir()
    try:
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", "--tb=no", place], cwd=copy,
                              env=mutants.environment(copy), capture_output=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return names
    if done.returncode:  # what would have come behind the failure is not known
        print(f"{place}: fails with marks, and may execute all", flush=True)
        return names
    found = [names[number] for number in sorted(without | {int(path.name)
                                                           for path in marks.iterdir()})]
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(found), "utf8")
    print(f"{place}: executes {len(found)} of {len(names)}", flush=True)
    return found
