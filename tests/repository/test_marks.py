"""What a file of tests executes of faults: in functions, branches, other processes, constants."""
import ast
import subprocess
import sys

import pytest

from benchmarks import generated, marks, mutants
from benchmarks.generated import Generated
from benchmarks.slips import slips

CODE = '''"""A module."""
from __future__ import annotations

LEAST = 3


def size(x: int, by: int = 4):
    """Of x."""
    if x > 5:
        return x * 6
    rest = [
        each + 7 for each in range(x)]
    return sum(rest)


class Box:
    side = 8

    def wide(self):
        return self.side + 9
'''


def faults_of(code, file="a/b"):
    return [Generated(file, slip) for slip in slips(code) if slip.operator == "off by one"
            and slip.becomes == str(int(slip.was) + 1)]


def test_a_statement_is_marked_once_for_each_of_its_faults_and_the_rest_is_as_it_was(tmp_path):
    path, faults = tmp_path / "meshbook" / "a" / "b.py", faults_of(CODE)
    path.parent.mkdir(parents=True)
    path.write_text(CODE)
    without = marks.plant(tmp_path, faults, tmp_path / "marks")
    assert {faults[number].slip.was for number in without} == {"3", "4", "8"}  # when it is read
    (tmp_path / "marks").mkdir()
    passed = lambda call: {faults[int(each.name)].slip.was for each in subprocess.run(
        [sys.executable, "-c", f"import b; {call}"], cwd=path.parent, check=True)
        and (tmp_path / "marks").iterdir()}
    assert passed("b.size(2)") == {"5", "7"} and passed("b.size(9)") == {"5", "6", "7"}
    assert passed("b.Box().wide(); assert b.size(3) == 24") == {"5", "6", "7", "9"}
    assert ast.unparse(ast.parse(path.read_text())).count("_come_by(") == len(faults) - 3 + 1


@pytest.fixture(scope="module")
def executing(tmp_path_factory):
    """Of the faults of a property of plans that tests of presets ask for."""
    text = (generated.ROOT / "meshbook/costs/plans.py").read_text("utf8")
    chosen = [Generated("costs/plans", slip) for slip in slips(text)
              if slip.function == "Plan.how"]
    place = "tests/costs/test_presets.py"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mutants, "KEPT", tmp_path_factory.mktemp("kept"))
        yield chosen, [marks.executing(chosen, [place])[place] for _ in range(2)]


def test_a_file_of_tests_is_asked_once_what_it_executes(executing):
    chosen, (first, again) = executing
    assert first == again == {each.name for each in chosen} and len(chosen) > 3


@pytest.mark.parametrize("test", ["def test_it(:", "def test_it(): assert False",
                                  "import not_installed\ndef test_it(): pass"])
def test_a_file_that_fails_with_the_marks_may_notice_everything(executing, tmp_path, test,
                                                                monkeypatch):
    chosen, _ = executing
    monkeypatch.setattr(mutants, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(mutants, "fingerprint", lambda folder, place: place)
    (tmp_path / "test_it.py").write_text(test)
    names = [each.name for each in chosen]
    assert marks._look(tmp_path, tmp_path / "marks", set(), "test_it.py", names) == names
    assert not (tmp_path / "kept").exists()
