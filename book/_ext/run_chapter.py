"""Run a chapter's code cells as one script: python book/_ext/run_chapter.py CHAPTER."""

import linecache
import re
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
CELL = re.compile(r"^```\{code-cell\}[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
OPTIONS = re.compile(r"\A(?:---\n.*?^---\n|(?::[^\n]*\n)+)", re.DOTALL | re.MULTILINE)


def cells(text):
    """The code of every cell of a chapter in MyST Markdown."""
    return [OPTIONS.sub("", code) for code in CELL.findall(text)]


def run(chapter):
    """Execute the cells of a chapter in order, in one namespace; a terminal shows no picture."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    for number, code in enumerate(cells(chapter.read_text("utf8")), 1):
        name = f"<{chapter.stem}, cell {number}>"
        linecache.cache[name] = (len(code), None, code.splitlines(True), name)
        exec(compile(code, name, "exec"), vars(main))


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    run(Path(sys.argv[1]))
