"""Pages run two at a time, and a cell that measures time runs while no other does."""
import json
from itertools import combinations

import nbformat
import pytest
from execution import Page, execute_all

CELL = """
import json, time
began = time.time()
time.sleep(0.3)
print(json.dumps([began, time.time()]))
"""
TAGS = {"timed at once": ["alone", "", ""], "timed later": ["", "", "alone", ""],
        "long": ["", "", "", "", ""], "short": ["", "", ""], "timed twice": ["alone", "alone"]}


def page(folder, name, tags, source=CELL):
    cells = [nbformat.v4.new_code_cell(source, metadata={"tags": [tag] if tag else []})
             for tag in tags]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})
    return Page(name, folder / f"{name}.md", notebook)


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """(page, whether it is alone, begin, end) of every cell, in seconds."""
    folder = tmp_path_factory.mktemp("pages")
    found = []
    for done in execute_all([page(folder, *each) for each in TAGS.items()], timeout=60):
        assert done.error is None, done.error[1]
        for cell, tag in zip(done.notebook.cells, TAGS[done.name], strict=True):
            found.append((done.name, bool(tag), *json.loads(cell.outputs[0].text)))
    return found


def overlap(first, second):
    *_, began, ended = first
    return max(began, second[2]) < min(ended, second[3])


def test_pages_run_side_by_side(cells):
    assert any(overlap(*pair) for pair in combinations(cells, 2))


def test_nothing_runs_beside_a_cell_that_is_alone(cells):
    alone = [cell for cell in cells if cell[1]]
    assert len(alone) == 4
    for cell in alone:
        assert not any(overlap(cell, other) for other in cells if other is not cell)


def test_pages_with_cells_that_are_alone_begin_last(cells):
    began = {}
    for name, _, begin, _ in cells:
        began.setdefault(name, begin)
    assert set(sorted(began, key=began.get)[:2]) == {"long", "short"}


def test_a_page_that_failed_leaves_its_place_to_others(tmp_path):
    wrong = page(tmp_path, "wrong", ["alone"], source="1 / 0")
    right = [page(tmp_path, name, ["", "alone"]) for name in ("right", "also right")]
    done = {each.name: each.error for each in execute_all([wrong, *right], timeout=60)}
    assert done.pop("wrong")[0] == "CellExecutionError" and set(done.values()) == {None}
