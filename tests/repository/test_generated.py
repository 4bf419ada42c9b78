"""Slips are drawn evenly and the same way each time, and change what they say and nothing else."""

import ast
import json
from collections import Counter
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from run_chapter import cells

from benchmarks import generated, mutants
from benchmarks.generated import ROOT, Generated
from benchmarks.slips import OPERATORS, Slip, edited, slips

DRAWN = generated.drawn()
CODE = '''"""Words: 1 + 1."""
import jax
LEAST = 3


class Box:
    def size(self, x, axis: int = 0):
        """Of 2 numbers."""
        if x is None:
            raise ValueError(f"{1 + 1} is missing")
        x = x - self.least(x)  # a remark
        return jax.lax.psum((x / 4).sum(axis=-1), "batch") if axis < 2 else x.astype(jax.int32)
'''


@pytest.mark.parametrize("operator, becomes", [
    ("off by one", ["4", "2", "1", "5", "3", "2", "0", "3", "1"]),
    ("dropped term", ["x", "x"]),
    ("swapped operands", ["(self.least(x) - x)", "(4 / x)"]),
    ("swapped axis", ["axis=0", "'model'"]),
    ("wrong dtype", ["x", "jax.int16"]),
    ("mean for sum", ["jax.lax.pmean", "(x / 4).mean"]),
    ("moved bound", ["(axis <= 2)"]),
    ("stale variable", ["pass"]),
    ("dropped exchange", ["(x / 4).sum(axis=-1)"]),
    ("skipped branch", ["False", "x.astype(jax.int32)",
                        "jax.lax.psum((x / 4).sum(axis=-1), 'batch')"]),
])
def test_an_operator_makes_its_slips_and_leaves_words_and_types_alone(operator, becomes):
    made = [slip for slip in slips(CODE) if slip.operator == operator]
    assert Counter(slip.becomes for slip in made) == Counter(becomes)
    assert {slip.function for slip in made} <= {"LEAST", "Box.size"}


def test_a_slip_changes_one_place_of_the_text():
    sound = ast.dump(ast.parse(CODE))
    for slip in slips(CODE):
        text = edited(CODE, slip)
        assert ast.dump(ast.parse(text)) != sound
        assert "# a remark" in text or slip.operator == "stale variable"
        apart = [lines for lines in zip(CODE.splitlines(), text.splitlines(), strict=True)
                 if lines[0] != lines[1]]
        assert len(apart) == 1 and slip.becomes in apart[0][1]


def test_a_slip_of_code_that_is_not_there_is_refused():
    slip = Slip("Box.size", ("body", 9, "value"), "off by one", "3", "4")
    where = r"Box.size: off by one at body.9.value: expected 3 there, found nothing"
    with pytest.raises(ValueError, match=where):
        edited(CODE, slip)
    slip = Slip("LEAST", ("value",), "off by one", "4", "5")
    with pytest.raises(ValueError, match=r"LEAST: off by one at value: expected 4 there, found 3"):
        edited(CODE, slip)


def test_slips_are_drawn_evenly_over_folders_and_operators():
    assert len(DRAWN) == len({each.name for each in DRAWN}) == generated.COUNT >= 300
    of_folder = Counter(each.file.partition("/")[0] for each in DRAWN)
    assert set(of_folder) == {path.parent.name for path in ROOT.glob("meshbook/*/__init__.py")}
    assert max(of_folder.values()) - min(of_folder.values()) <= 1
    assert {each.slip.operator for each in DRAWN} == set(OPERATORS)
    assert generated.drawn() == DRAWN != generated.drawn(seed=generated.SEED + 1)


def test_each_is_one_edit_and_something_runs_for_it():
    without = []
    for each in DRAWN:
        text = each.path.read_text("utf8")
        assert ast.dump(ast.parse(edited(text, each.slip))) != ast.dump(ast.parse(text))
        first = generated.tests_of(each.file, each.slip.function)[0]
        if not generated.page_of(each) and not generated.uses(
                generated.code_of_tests()[first], each.file):
            without.append(each.file)
    assert not without, f"neither tests nor a page: {sorted(set(without))}"


def test_what_runs_is_what_teaches_the_code_and_what_tests_it():
    mask = next(Generated("models/losses", slip) for slip in slips(
        (ROOT / "meshbook/models/losses.py").read_text("utf8")) if slip.function)
    assert generated.tests_of("models/losses")[0] == "tests/models/test_losses.py"
    assert generated.page_of(mask)
    assert generated.tests_of("hlo/module")[0] == "tests/hlo/test_module.py"
    assert {"sent", "step_traffic"} <= {*generated.callers_of("costs/traffic", "_by_hand")}
    named = generated.tests_of("training/state", "weighted_mean")
    assert "weighted_mean" in generated.code_of_tests()[named[0]]
    assert set(named) == set(generated.code_of_tests())
    assert generated.tests_of("training/state")[0] != named[0]


def test_a_slip_is_planted_in_the_module_and_where_a_page_shows_the_code(tmp_path):
    for name in ("meshbook/parallel", "book"):
        (tmp_path / name).mkdir(parents=True)
    sound = "def double(x):\n    return x + x\n"
    (tmp_path / "meshbook/parallel/a.py").write_text(sound.replace(":", ':\n    """2 x."""'))
    shown = f"x + x\n```{{code-cell}} ipython3\n{sound}```\n"
    other = shown.replace("double", "twice")
    for name, text in (("one", shown), ("other", other)):
        (tmp_path / f"book/{name}.md").write_text(text)
    slip = next(slip for slip in slips(sound) if slip.operator == "dropped term")
    Generated("parallel/a", slip).plant(tmp_path)
    wrong = "def double(x):\n    return x\n"
    planted = (tmp_path / "meshbook/parallel/a.py").read_text()
    assert planted == wrong.replace(":", ':\n    """2 x."""')
    assert cells((tmp_path / "book/one.md").read_text()) == [wrong]
    assert (tmp_path / "book/other.md").read_text() == other


def test_the_score_counts_by_tests_and_by_pages():
    rows = [{"verdict": "caught", "ended": {"tests/a.py": "assertion", "01": "survived"}},
            {"verdict": "caught", "ended": {"tests/a.py": "error", "01": "proof"}},
            {"verdict": "survived", "ended": {"tests/a.py": "survived"}}]
    assert generated.score(rows) == {"faults": 3, "caught": 2, "survived": 1, "equivalent": 0,
                                     "by tests": 2, "by pages": 1, "pages": 2}


def test_what_nothing_has_caught_goes_on_first_and_in_the_end_every_page_has_run(monkeypatch):
    tests, ran = ["tests/a/test_a.py", "tests/a/test_b.py"], []
    places = {"caught": [*tests, "01", "tests/a/test_c.py"],
              "survivor": ["tests/b/test_b.py", "02"]}

    def attempt(place, plant, limit):
        ran.append(place)
        how = "assertion" if place == tests[0] else "survived"
        return {"ended": how, "seconds": 1.0, "says": ""}

    monkeypatch.setattr(mutants, "TOGETHER", 1)
    monkeypatch.setattr(mutants, "sound", lambda places: dict.fromkeys(places, 1.0))
    monkeypatch.setattr(mutants, "attempt", attempt)
    monkeypatch.setattr(generated, "places_of", lambda each, most, _: places[each.name])
    monkeypatch.setattr(generated.marks, "executing", lambda faults, places: {})
    chosen = [SimpleNamespace(name=name, plant=None) for name in places]
    assert generated.endings(chosen, most=2) == [
        {tests[0]: "assertion", "01": "survived"},
        dict.fromkeys(places["survivor"], "survived")]
    assert ran == [tests[0], "tests/b/test_b.py", "02", "01"]
    ran.clear()
    kept, known = [], {"caught": {tests[0]: "assertion"}, "survivor": {"02": "survived"}}
    generated.endings(chosen, 2, known, lambda ended: kept.append(json.dumps(ended)))
    assert ran == ["tests/b/test_b.py", "01"]  # what is known does not run again
    assert len(kept[0]) < len(kept[-1]) and all(json.loads(kept[0]))


def row(name, verdict, **more):
    return {"name": name, "verdict": verdict, "ended": {"tests/a.py": verdict}} | more


def test_a_survivor_keeps_its_row_and_gets_what_a_later_run_found(monkeypatch):
    first = {"faults": [row("a", "caught"), *(row(name, "survived") for name in "bcd")]}
    there, later = {"b": "b, moved", "c": "c", "d": None}, {"b, moved": "proof", "c": "survived"}
    monkeypatch.setattr(generated, "from_row", lambda row: there[row["name"]])
    monkeypatch.setattr(generated, "rows_of", lambda chosen, most: [
        {"name": name, "ended": {"tests/a.py": later[name]}} for name in chosen])
    record = generated.examined_again(first, "new")
    again = {"commit": "new", "verdict": "caught", "ended": {"tests/a.py": "proof"}}
    assert record["faults"][:2] == [row("a", "caught"), row("b", "survived", again=again)]
    assert record["faults"][3]["again"]["verdict"] == "gone"
    assert record["score"]["survived"] == 3  # when they were drawn
    assert generated.survivors(record) == ["c"]
    assert generated.caught(record) == 1 / 4


def test_what_is_equivalent_counts_neither_way():
    equivalent = row("b", "survived", again={"verdict": "equivalent"})
    record = {"faults": [row("a", "caught"), equivalent, row("c", "survived")],
              "score": {"caught": 1}}
    assert generated.survivors(record) == ["c"] and generated.caught(record) == 1 / 2


@pytest.mark.parametrize("ended, verdict", [
    ({"tests/a.py": "survived", "01": "proof"}, "caught"),
    ({"tests/a.py": "timed out", "01": "survived"}, "caught"),
    ({"tests/a.py": "killed", "01": "error"}, "caught"),
    ({"tests/a.py": "killed", "01": "survived"}, "killed"),
    ({"tests/a.py": "survived"}, "survived"),
])
def test_a_fault_is_caught_where_one_place_noticed_it(ended, verdict):
    assert generated.verdict("a", ended) == verdict


def test_a_row_gives_its_fault_back_also_where_its_code_has_moved():
    each = DRAWN[0]
    said = json.loads(json.dumps({"file": each.file, **asdict(each.slip)}))
    assert generated.from_row(said) == each
    assert generated.from_row(said | {"path": ["body", 999]}) in (each, None)
    assert generated.from_row(said | {"was": "something_else()"}) is None
    assert generated.from_row(said | {"file": "parallel/no_such_module"}) is None


@pytest.mark.skipif(not generated.RECORD.exists(), reason="no run is recorded")
def test_the_record_has_nine_tenths_caught_and_every_survivor_answered():
    record = json.loads(generated.RECORD.read_text("utf8"))
    rows, equivalent = record["faults"], generated.EQUIVALENT
    assert len(rows) >= 300 and len({each["name"] for each in rows}) == len(rows)
    assert record["score"] == generated.score(rows)
    assert generated.caught(record) >= generated.LEAST
    assert not generated.survivors(record)
    assert len(equivalent) <= 0.05 * len(rows)
    assert equivalent.keys() == {each["name"] for each in rows
                                 if each.get("again", each)["verdict"] == "equivalent"}
    assert all(len(reason) > 20 for reason in equivalent.values())
