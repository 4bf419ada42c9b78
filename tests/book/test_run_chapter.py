"""`make start` runs a chapter's cells as one script, on few packages."""

import os
import subprocess
import sys
from pathlib import Path

from run_chapter import cells

ROOT = Path(__file__).resolve().parents[2]
CHAPTER = """# Title

```{code-cell} python
:tags: [hide-input]

x = 1
```

```python
print("an example, not a cell")
```

```{code-cell}
---
tags: [hide-output]
---
from helpers import show

def double(x):
    return 2 * x

print(repr(show(double)), double(x))
```
"""


def test_cells_are_the_code_without_its_options():
    first, second = cells(CHAPTER)
    assert first == "\nx = 1\n"
    assert second.startswith("from helpers import show") and "hide-output" not in second


def run(path):
    command = [sys.executable, ROOT / "book" / "_ext" / "run_chapter.py", path]
    return subprocess.run(command, capture_output=True, text=True, timeout=120,
                          env={**os.environ, "JAX_PLATFORMS": "cpu"})


def test_a_chapter_runs_as_a_script(tmp_path):
    (tmp_path / "chapter.md").write_text(CHAPTER)
    done = run(tmp_path / "chapter.md")
    assert done.stdout.endswith("def double(x):\n    return 2 * x 2\n"), done.stderr


def test_a_failing_cell_fails_and_is_named(tmp_path):
    (tmp_path / "chapter.md").write_text("```{code-cell}\nx = 1\nx.y\n```\n")
    done = run(tmp_path / "chapter.md")
    assert done.returncode != 0
    assert 'File "<chapter, cell 1>", line 2' in done.stderr
    assert done.stdout == ""


def test_the_preface_imports_only_what_make_start_installs():
    allowed = {"jax", "flax", "optax", "numpy", "matplotlib", "helpers", "meshbook"}
    lines = "".join(cells((ROOT / "book" / "start-here.md").read_text())).splitlines()
    imports = [line.split()[1].split(".")[0] for line in lines
               if line.startswith(("import ", "from "))]
    assert imports and set(imports) - allowed <= set(sys.stdlib_module_names)
