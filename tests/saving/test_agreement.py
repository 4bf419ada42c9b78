"""What processes tell each other in saving and restoring: no step counts for one alone."""
import itertools
import json
import shutil
import signal

import jax
import numpy as np
import pytest
from many import many

from meshbook.saving import agreement, checkpoints, manifests, parts, runs

SLOW_TO_MAKE_ROOM = """
remove = checkpoints.shutil.rmtree
def slowly(*given, **more):
    time.sleep(0.7)
    remove(*given, **more)
if me == 0:
    checkpoints.shutil.rmtree = slowly
soak.train(folder, 12)
"""


@pytest.fixture(scope="module")
def by_two(tmp_path_factory):
    """The folder of twelve steps by two processes on (4, 2); 10 and 12 are checkpoints."""
    folder = tmp_path_factory.mktemp("two")
    ended, said = many(2, SLOW_TO_MAKE_ROOM, folder)
    assert ended.well, said
    return folder


def test_nobody_writes_before_process_0_has_made_room(by_two):
    assert checkpoints.steps(by_two) == [10, 12]
    for step in (10, 12):
        assert manifests.verify(by_two / str(step))["parts"] == 2


def test_processes_write_about_as_much(by_two):
    sizes = [(by_two / "12" / f"part-{process}.bin").stat().st_size for process in range(2)]
    assert min(sizes) > 0.3 * sum(sizes)


NOT_PUBLISHED = """
from jax.experimental import multihost_utils
write = manifests.write_manifest
def fails_at_10(where, content, files):
    if content["step"] == 10:
        raise OSError(5, "Input/output error")
    write(where, content, files)
manifests.write_manifest = fails_at_10
try:
    soak.train(folder, 12)
except checkpoints.NotSaved as error:
    print(f"NotSaved: {error}", flush=True)
    multihost_utils.sync_global_devices("both have said it")
    raise
"""


def test_what_process_0_cannot_publish_is_saved_by_none(tmp_path):
    ended, said = many(2, NOT_PUBLISHED, tmp_path)
    assert ended.codes[ended.first] == 1 and 0 not in ended.codes  # a slow one is ended
    for process in range(2):
        assert f"[{process}] NotSaved: step 10 could not be saved" in said
    assert "the newest checkpoint is that of step 5" in said
    assert checkpoints.steps(tmp_path) == [5]


FULL = """
write = parts.write_part
def full(*given):
    if me == 1:
        raise OSError(28, "No space left on device")
    return write(*given)
parts.write_part = full
soak.train(folder, 12)
"""


def test_what_one_process_cannot_write_is_saved_by_none(tmp_path):
    ended, said = many(2, FULL, tmp_path)
    assert ended.codes[ended.first] == 1 and 0 not in ended.codes
    assert f"NotSaved: step 5 could not be saved in {tmp_path}: the disk is full" in said
    assert "process 1: OSError: [Errno 28]" in said
    assert checkpoints.steps(tmp_path) == []


TOLD = """
print("restored", int(checkpoints.restore(folder, soak.make_state((1, 8))).step))
print("told", [agreement.told_by_all("number", [me, call]) for call in range(3)])
any_of = agreement.AnyOf()
print("raised", [any_of.raised(me == 1 and call == 2) for call in range(5)])
agreement.check_same("page", {"a": 1, "b": {"c": 2}})
for differs in range(2):
    try:
        agreement.check_same("page", {"a": 1, "b": {"c": 2 + (me == differs)}})
    except ValueError as error:
        print("refused", error)
"""


@pytest.fixture(scope="module")
def told(by_two, tmp_path_factory):
    """What two processes said that go on where one piece of the second's alone is damaged."""
    folder = shutil.copytree(by_two, tmp_path_factory.mktemp("harmed") / "run")
    for index in (folder / "12").glob("part-*.json"):
        for piece in json.loads(index.read_text()):
            if (piece["leaf"], piece["slice"]) == ("params/w_XF", [[0, 64], [16, 32]]):
                with index.with_suffix(".bin").open("r+b") as file:
                    file.seek(piece["offset"] + 5)
                    file.write(b"?")
    ended, said = many(2, TOLD, folder)
    assert ended.well, said
    return [[line.partition("] ")[2] for line in said.splitlines() if line.startswith(f"[{each}]")]
            for each in range(2)]


def test_what_is_damaged_for_one_process_is_skipped_by_all(told):
    for each in told:
        assert "restored 10" in each
        assert any("step 12 is skipped: process 1: " in line and "expected SHA-256" in line
                   for line in each)


def test_all_are_told_what_each_says_now(told):
    for each in told:
        assert "told [[[0, 0], [1, 0]], [[0, 1], [1, 1]], [[0, 2], [1, 2]]]" in each


def test_a_flag_of_one_is_raised_for_all_one_call_later(told):
    for each in told:
        assert "raised [False, False, False, True, False]" in each


def test_another_value_of_either_process_is_refused_by_both(told):
    for each in told:
        assert [line for line in each if line.startswith("refused")] == [
            "refused process 1 has another page than process 0: b/c: expected 3, found 2",
            "refused process 1 has another page than process 0: b/c: expected 2, found 3"]


class Silent:
    """A store in which a process says nothing, and a clock that goes on while one waits for it."""

    def __init__(self):
        self.now, self.waits = 0.0, []

    def blocking_key_value_get(self, key, milliseconds):
        self.waits.append(milliseconds)
        self.now += milliseconds / 1000
        raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}")


@pytest.mark.parametrize("patience, waits", [
    (25, [10_000, 10_000, 5_000, 100]), (4, [4_000, 100]), (0, [100])])
def test_a_process_is_waited_for_until_patience_is_over_and_every_ten_seconds_it_is_said(
        monkeypatch, capsys, patience, waits):
    store = Silent()
    monkeypatch.setattr(agreement.time, "monotonic", lambda: store.now)
    with pytest.raises(agreement.Missing, match="process 0 waits for process 3 at 'lock'"):
        agreement.waited_for(store, "lock", 0, 3, patience)
    assert store.waits == waits
    assert capsys.readouterr().err.count("waits for process 3") == len(waits) - 1


def test_another_error_of_the_store_is_no_silence():
    def broken(key, milliseconds):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: the coordinator is gone")

    store = Silent()
    store.blocking_key_value_get = broken
    with pytest.raises(jax.errors.JaxRuntimeError, match="UNAVAILABLE"):
        agreement.waited_for(store, "lock", 0, 3, 1e9)


def test_the_first_fault_is_told_with_its_process():
    assert agreement.first_fault(["", "", "full"]) == "process 2: full"
    assert agreement.first_fault(["full"]) == "full" and agreement.first_fault(["", ""]) == ""


@pytest.mark.parametrize("name", ["part-3.bin", "part-3.json"])
def test_a_part_that_the_disk_changed_is_not_taken_for_written(tmp_path, monkeypatch, name):
    sync = manifests.sync

    def changing(path):
        sync(path)
        if path.name == name:
            path.write_bytes(path.read_bytes().replace(b"0", b"1"))

    x = np.frombuffer(b"0000" * 6, np.float32).reshape(2, 3)
    parts.write_part(tmp_path / "sound", 3, {"x": [([[0, 2], [0, 3]], x)]})
    monkeypatch.setattr(manifests, "sync", changing)
    with pytest.raises(manifests.Damaged, match="part-3"):
        parts.write_part(tmp_path / "changed", 3, {"x": [([[0, 2], [0, 3]], x)]})


def test_every_slice_of_a_leaf_is_put_together_from_the_pieces_of_all(tmp_path):
    x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    cut = lambda *where: ([list(each) for each in where], x[tuple(slice(*each) for each in where)])
    parts.write_part(tmp_path, 0, {"x": [cut((0, 2), (3, 6)), cut((2, 4), (0, 3))]})
    parts.write_part(tmp_path, 1, {"x": [cut((2, 4), (3, 6)), cut((0, 2), (0, 3))]})
    found = parts.Parts(tmp_path, {"x": {"shape": [4, 6], "dtype": "float32"}}, 2)["x"]
    for a, b in itertools.combinations(range(5), 2):
        for c, d in itertools.combinations(range(7), 2):
            np.testing.assert_array_equal(found[a:b, c:d], x[a:b, c:d])


def test_a_piece_that_is_missing_is_not_invented(tmp_path):
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    leaves = {"x": {"shape": [3, 4], "dtype": "float32"}}
    parts.write_part(tmp_path, 0, {"x": [([[0, 2], [0, 4]], x[:2])]})
    found = parts.Parts(tmp_path, leaves, 1)["x"]
    np.testing.assert_array_equal(found[:2, :], x[:2])
    with pytest.raises(manifests.Damaged, match="expected 12 elements of x.* found 8 in its parts"):
        found[:, :]


def test_sigterm_of_one_process_saves_all(tmp_path, by_two):
    strike = {"process": 1, "step": 4, "signal": signal.SIGTERM, "marker": str(tmp_path / "sent")}
    options = {"strike": strike, "every": 10**6}
    ended, said = many(2, "train", tmp_path / "run", 500, json.dumps(options))
    assert ended.codes == [0, 0], said
    (step,) = checkpoints.steps(tmp_path / "run")
    assert step in (5, 6)
    assert many(2, "train", tmp_path / "run", 12)[0].well
    found = [runs.read_metrics(each / "metrics")["loss"] for each in (tmp_path / "run", by_two)]
    assert found[0] == found[1]
