"""The table of faults is true of the code, and the harness says how a page ended."""
import ast
import builtins
import contextlib
import functools
import json
import re
import shutil
from collections import Counter
from dataclasses import replace

import pytest
from definitions import definitions
from run_chapter import cells

from benchmarks import mutants, syntax
from benchmarks.mutants import ROOT, Edit, Fault

FAULTS = mutants.faults()
MODULES = {
    "data/augmentation", "data/buckets", "data/corpus", "data/corpus_plan", "data/corpus_workers",
    "data/documents", "data/images", "data/named", "data/shards", "data/token_files",
    "data/tokens",
    "drawing/experts", "drawing/schedules",
    "hlo/clock", "hlo/exchanges", "hlo/execution", "hlo/flops", "hlo/in_flight", "hlo/liveness",
    "hlo/slices",
    "hlo/memory", "hlo/module", "hlo/replica_groups", "hlo/schedule", "hlo/wire",
    "hosts/clusters", "hosts/places", "hosts/replicas", "hosts/roll_call",
    "models/balanced_loss", "models/decoder", "models/decoder_dropout",
    "models/decoder_layers", "models/expert_layers",
    "models/fused_loss", "models/generation", "models/kv_cache", "models/layers", "models/losses",
    "models/minigpt", "models/pipelined", "models/reference_decoder", "models/row_attention",
    "models/text_models", "models/vit",
    "parallel/accumulation", "parallel/backward", "parallel/blockwise", "parallel/context",
    "parallel/experts", "parallel/grouped", "parallel/overlap", "parallel/pipeline",
    "parallel/ring_attention", "parallel/routing", "parallel/schedule_execution",
    "parallel/schedules", "parallel/sequence", "parallel/slots", "parallel/stage_programs",
    "parallel/zero", "parallel/zigzag",
    "costs/explorer", "costs/machines", "costs/memory", "costs/places", "costs/plans",
    "costs/ranking", "costs/rows", "costs/seconds", "costs/step", "costs/tables", "costs/timeline",
    "costs/traffic", "costs/transfers", "costs/turns", "costs/work",
    "planning/clocks", "planning/decoder_programs", "planning/pipeline_memory",
    "planning/recorded_learning", "planning/records",
    "profiling/op_stats", "profiling/overlap", "profiling/traces",
    "saving/agreement", "saving/checkpoint_files", "saving/checkpoints", "saving/manifests",
    "saving/parts", "saving/progress",
    "sharding/gradients", "sharding/meshes", "sharding/rules",
    "training/loop", "training/optimizers", "training/state",
}


AWAITED = set()  # faults of which `make mutants` has no record yet; empty it by running them


def test_there_are_enough_faults_of_every_module():
    assert len(FAULTS) >= 60 and len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert {fault.file for fault in FAULTS if fault.file} == MODULES
    assert AWAITED <= {fault.name for fault in FAULTS}


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if not fault.file],
                         ids=lambda fault: fault.name)
def test_a_pages_own_fault_is_an_edit_of_one_of_its_cells(fault):
    page = (ROOT / fault.path).read_text("utf8")
    edited = mutants.in_page(fault, page, "")
    (before, after), = ((one, other) for one, other in zip(
        cells(page), cells(edited), strict=True) if one != other)
    assert ast.dump(ast.parse(before)) != ast.dump(ast.parse(after))


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.file],
                         ids=lambda fault: fault.name)
def test_a_fault_is_one_edit_of_its_module_and_the_same_edit_of_its_page(fault):
    sound = (ROOT / "meshbook" / f"{fault.file}.py").read_text("utf8")
    faulty = mutants.in_module(fault, sound)
    compile(faulty, fault.file, "exec")
    before, after = definitions(sound), definitions(faulty)
    assert before != after
    if mutants.of_tests(fault.page):
        assert (ROOT / fault.page).exists()
        return
    page = (ROOT / "book" / f"{fault.page}.md").read_text("utf8")
    shown = dict(pair for code in cells(page) for pair in definitions(code).items())
    edited = dict(pair for code in cells(mutants.in_page(fault, page, sound))
                  for pair in definitions(code).items())
    for name in before.keys() & shown.keys():
        if shown[name] == before[name]:
            assert edited[name] == after[name], f"{name} is another on {fault.page}"


SOUND = """def double(x):
    return 1 + 1 * x


def half(x):
    return x / 2
"""


def fault(*edits):
    return Fault("a", "b", "c", "d", tuple(edits))


def test_a_node_that_is_not_there_as_it_says_is_refused():
    half = fault(Edit("half", "_ / 2", "$1 * 2"))
    assert mutants.in_module(half, SOUND) == SOUND.replace("x / 2", "x * 2")
    for edit, words in ((Edit("half", "_ / 3", "0"), "expected 1 of the shape _ / 3, found 0"),
                        (Edit("double", "1", "0"), "expected 1 of the shape 1, found 2"),
                        (Edit("triple", "1", "0"), "expected triple, found double, half")):
        with pytest.raises(ValueError, match=f"a: meshbook/b.py: {words}"):
            mutants.in_module(fault(edit), SOUND)


def test_a_rename_or_another_line_leaves_a_fault_where_it_is():
    faults = fault(Edit("half", "_ / 2", "$1 * 2"), Edit("double", "1", "3", which=(2, 2)))
    moved = SOUND.replace("x", "whole").replace("    return 1", "    print(whole)\n    return 1")
    for text in (SOUND, moved):
        assert mutants.in_module(faults, text) == text.replace(
            "/ 2", "* 2").replace("1 * ", "3 * ")


@functools.cache
def names_of(code, own=False):
    """Names that some code has, or, of its own, those that it binds."""
    nodes = list(ast.walk(ast.parse(code)))
    bound = {getattr(node, field, None) for node in nodes for field in ("name", "arg", "asname")}
    return bound | {node.id for node in nodes if isinstance(node, ast.Name)
                    and (not own or isinstance(node.ctx, ast.Store))}


def is_code(text):
    """Whether this stands by itself, as an argument and a slice do not."""
    with contextlib.suppress(SyntaxError):
        return bool(ast.parse(text))


def test_names_of_an_edit_are_names_of_its_module():
    """One that was renamed since would end the module, whatever the checks are worth."""
    missing = []
    for each in FAULTS:
        text = (ROOT / each.path).read_text("utf8")
        known = names_of(text if each.file else "\n".join(cells(text)))
        for edit in each.edits:
            code = syntax.FILLED.sub("_", edit.becomes)
            code = next(form for form in (code, f"_({code})", f"_[{code}]") if is_code(form))
            unknown = names_of(code) - names_of(code, own=True) - known - {"_", *vars(builtins)}
            missing += [(each.name, name) for name in unknown]
    assert not missing


def test_a_page_is_edited_in_its_cells_and_where_it_defines_the_same():
    half = fault(Edit("half", "_ / 2", "$1 * 2"))
    code = SOUND.partition("\n\n\n")[2]
    page = f"x / 2 in words\n```{{code-cell}}\n{code}y = 1 / 2\n```\nand {code}"
    assert mutants.in_page(half, page, SOUND) == page.replace("x / 2\ny", "x * 2\ny")
    other = page.replace("(x)", "(x, y)")
    assert mutants.in_page(half, other, SOUND) == other


def book_of_one_page(folder, code):
    (folder / "book" / "_ext").mkdir(parents=True)
    shutil.copy(ROOT / "book/_ext/run_chapter.py", folder / "book/_ext")
    page = f"```{{code-cell}}\nimport numpy as np\n```\n\n```{{code-cell}}\n{code}\n```\n"
    (folder / "book" / "a-page.md").write_text(page)
    return folder


@pytest.mark.parametrize("code, ended, says", [
    ("1 + 1", "survived", ""),
    ("assert 1 + 1 == 3", "assertion", "AssertionError: assert 1 + 1 == 3"),
    ("assert 1 > 2, 'one is\\nless'", "assertion", "AssertionError: one is"),
    ("np.testing.assert_allclose(1, 2)", "assertion",
     "AssertionError: Not equal to tolerance rtol=1e-07, atol=0"),
    ("class ProofFailed(Exception): pass\nraise ProofFailed('leaf w: no')", "proof",
     "ProofFailed: leaf w: no"),
    ("try:\n    {}['a']\nexcept KeyError as e:\n    raise ValueError('b: c') from e", "error",
     "ValueError: b: c"),
    ("import os; os.abort()", "error", "exit status -6: "),
    ("import os; os.kill(os.getpid(), 15)", "killed", "by signal 15"),
])
def test_how_a_page_ends_is_told(tmp_path, code, ended, says):
    found = mutants.run_page(book_of_one_page(tmp_path, code), "a-page")
    assert found["ended"] == ended and found["says"].startswith(says)
    assert found["cell"] == (2 if "Error" in says or "Failed" in says else None)


@pytest.mark.parametrize("code, ended, at, says", [
    ("def test_a():\n    assert 1", "survived", None, ""),
    ("def test_a():\n    assert 1 + 1 == 3", "assertion", "test_a", "assert (1 + 1) == 3"),
    ("def test_a():\n    assert 1 + 1 == 3, 'one'", "assertion", "test_a", "AssertionError: one"),
    ("def test_a():\n    {}['a']", "error", "test_a", "KeyError: 'a'"),
    ("class ProofFailed(AssertionError): pass\ndef test_a():\n    raise ProofFailed('no')", "proof",
     "test_a", "test_page.ProofFailed: no"),
    ("import nothing_at_all", "error", None, "ModuleNotFoundError: No module named"),
])
def test_how_a_file_of_tests_ends_is_told(tmp_path, code, ended, at, says):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_page.py").write_text(code)
    found = mutants.run_page(tmp_path, "tests/test_page.py")
    assert found["ended"] == ended and found["says"].startswith(says)
    if at:
        assert found["cell"] == at


def test_a_page_that_does_not_end_is_not_a_catch(tmp_path):
    found = mutants.run_page(book_of_one_page(tmp_path, "while True: pass"), "a-page", limit=3)
    assert found["ended"] == "timed out"
    assert mutants.verdict(FAULTS[0], found) == "timed out"


def test_a_page_that_was_killed_is_not_a_catch():
    assert mutants.verdict(FAULTS[0], {"ended": "killed"}) == "killed"


def test_what_is_called_equivalent_must_not_be_caught():
    fault = replace(FAULTS[0], equivalent="it changes nothing")
    assert mutants.verdict(fault, {"ended": "survived"}) == "equivalent"
    assert mutants.verdict(fault, {"ended": "proof"}) == "caught, though called equivalent"
    fault = replace(fault, equivalent="")
    assert mutants.verdict(fault, {"ended": "survived"}) == "survived"
    assert mutants.verdict(fault, {"ended": "error"}) == "caught"


def test_a_fault_changes_what_an_outcome_is_kept_under(tmp_path):
    book = mutants.copy_book(tmp_path)
    before = mutants.fingerprint(book, FAULTS[0].page)
    assert before == mutants.fingerprint(book, FAULTS[0].page)
    one, other = (mutants.fingerprint(book, f"tests/data/test_{name}.py") for name in ("a", "b"))
    assert one != other
    mutants.plant(FAULTS[0], book)
    assert before != mutants.fingerprint(book, FAULTS[0].page)


def test_a_run_of_some_faults_says_which_and_leaves_the_others_their_provenance():
    row = lambda name, verdict: {"name": name, "verdict": verdict, "ended": "proof"}
    names = [fault.name for fault in FAULTS[:3]]
    before = {"provenance": "old", "minutes": 9, "mutants": [row(names[0], "caught"),
                                                             row(names[1], "survived")]}
    some = mutants.merged(before, [row(each, "caught") for each in names[:0:-1]], {"commit": "new"})
    assert [each["name"] for each in some["mutants"]] == names
    assert some["score"]["caught"] == 3 and some["provenance"] == "old" and some["minutes"] == 9
    assert some["later"] == [{"commit": "new", "faults": names[:0:-1]}]
    last = mutants.merged(some, [row(names[2], "caught")], {"commit": "last"})
    assert last["later"] == [{"commit": "new", "faults": [names[1]]},
                             {"commit": "last", "faults": [names[2]]}]


@pytest.mark.skipif(not mutants.RECORD.exists(), reason="no whole run is recorded: make mutants")
def test_the_record_is_of_these_faults_and_answers_for_each():
    record = json.loads(mutants.RECORD.read_text("utf8"))
    rows = record["mutants"]
    assert [row["name"] for row in rows] == [
        fault.name for fault in FAULTS if fault.name not in AWAITED]
    assert {row["verdict"] for row in rows} <= {"caught", "equivalent"}
    assert record["score"] == mutants.score(rows) and record["minutes"] <= 60
    assert re.fullmatch(r"[0-9a-f]{40}(\+edits)?", record["provenance"]["commit"])
