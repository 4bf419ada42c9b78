"""Checkpoints by several processes: restored by any number on any mesh, and agreed by all."""
import json
import shutil

import numpy as np
import pytest
from many import many
from saved_runs import assert_equal
from soak import make_state, train

from meshbook.saving import checkpoints, manifests, parts, progress, runs

@pytest.fixture(scope="module")
def by_two(tmp_path_factory):
    """The folder of twelve steps by two processes on (4, 2); checkpoints of steps 10 and 12."""
    folder = tmp_path_factory.mktemp("two")
    ended, said = many(2, "train", folder, 12)
    assert ended.well, said
    return folder


def test_each_process_wrote_what_it_owns_and_both_wrote_everything_once(by_two):
    manifest = manifests.verify(by_two / "12")
    assert manifest["parts"] == 2 and manifest["step"] == 12
    leaves, seen = manifest["leaves"], dict.fromkeys(manifest["leaves"], 0)
    for process in range(2):
        pieces = json.loads((by_two / "12" / f"part-{process}.json").read_text())
        assert pieces
        for piece in pieces:
            seen[piece["leaf"]] += int(np.prod([b - a for a, b in piece["slice"]]))
    assert seen == {name: int(np.prod(leaf["shape"])) for name, leaf in leaves.items()}


def test_one_process_goes_on_where_two_have_stopped(by_two, tmp_path):
    folder = shutil.copytree(by_two, tmp_path / "run")
    state = checkpoints.restore(folder, make_state())
    assert int(state.step) == 12
    train(folder, 15)
    assert checkpoints.steps(folder) == [12, 15]
    assert "parts" not in manifests.verify(folder / "15")
    ended, said = many(2, "train", folder, 18)  # and two go on where one has stopped
    assert ended.well and "skipped" not in said
    assert checkpoints.steps(folder) == [15, 18]


COPY = """
state = checkpoints.restore(folder, soak.make_state((2, 4)))
with checkpoints.Checkpoints(sys.argv[2]) as run:
    run.resume(state, soak.make_stream(), jax.random.key(7))
    run.save(state, {"next_index": 12}, jax.random.key(7))
"""


def test_four_processes_on_another_mesh_restore_every_bit(by_two, tmp_path):
    ended, said = many(4, COPY, by_two, tmp_path)
    assert ended.well, said
    assert len(list((tmp_path / "12").glob("part-*.bin"))) == 4
    assert_equal(checkpoints.restore(by_two, make_state()),
                 checkpoints.restore(tmp_path, make_state((8, 1))))


@pytest.mark.parametrize("harm, words", [
    (lambda path: path.unlink(), "part-1.bin: expected .* found none"),
    (lambda path: path.write_bytes(path.read_bytes()[:-1]), "part-1.bin: expected .* found"),
    (lambda path: path.write_bytes(b"x" + path.read_bytes()[1:]),
     r"part-1.bin: expected SHA-256 \w+ of .*, found \w+"),
    (lambda path: path.with_suffix(".json").write_text("[]"), "part-1.json: expected .* found"),
])
def test_a_part_that_is_not_as_it_was_written_is_named_and_its_step_skipped(
        by_two, tmp_path, harm, words):
    folder = shutil.copytree(by_two, tmp_path / "run")
    part = folder / "12" / "part-1.bin"
    assert part.stat().st_size > 0
    harm(part)
    with pytest.warns(UserWarning, match=f"step 12 is skipped: .*{words}"):
        state = checkpoints.restore(folder, make_state())
    assert int(state.step) == 10


def test_a_fault_that_one_process_finds_is_one_of_all(by_two, tmp_path):
    folder = shutil.copytree(by_two, tmp_path / "run")
    (folder / "12" / "part-1.bin").unlink()
    ended, said = many(2, "train", folder, 12)
    assert ended.well
    for process in range(2):
        assert f"[{process}]" in said and "step 12 is skipped: process " in said
    assert (folder / "12.damaged").exists() and manifests.verify(folder / "12")["step"] == 12


SLOW = """
write = parts.write_part
def slow(*given):
    time.sleep(2 * me)
    return write(*given)
parts.write_part = slow
soak.train(folder, 40, every=30, after=lambda step: time.sleep(0.02))
"""


def test_steps_go_on_while_a_process_writes(tmp_path):
    ended, said = many(2, SLOW, tmp_path)
    assert ended.well, said
    (stretch,) = progress.read_progress(tmp_path)
    (_, saved), *_ = [each for each in stretch.saved if each[0] == 30]
    during = [step for step, at in stretch.steps if step > 30 and at < saved]
    assert len(during) > 5


OTHER = """
stream = soak.images.batches(soak.make_stream().data, 8, seed=1 + (me == 1))
with checkpoints.Checkpoints(folder) as run:
    run.resume(soak.make_state(), stream, jax.random.key(7))
"""


def test_a_process_with_another_configuration_is_named(tmp_path):
    ended, said = many(2, OTHER, tmp_path)
    assert set(ended.codes) == {1}
    assert said.count("ValueError: process 1 has another run than process 0: data/seed: "
                      "expected 1, found 2") == 2


WAITS = """
agreement.QUIET = 0.3
if me == 1:
    time.sleep(1.5)
print(agreement.told_by_all("roll", me))
try:
    print(me == 1 or agreement.told_by_all("more", me, patience=1))
except agreement.Missing as error:
    print("Missing:", error)
"""


def test_who_waits_says_for_whom(tmp_path):
    ended, said = many(2, WAITS, tmp_path)
    assert ended.well, said
    assert "[0] process 0 waits for process 1 at 'roll'" in said
    assert "[0] [0, 1]" in said and "[1] [0, 1]" in said
    assert "[0] Missing: process 0 waits for process 1 at 'more'" in said


def test_a_folder_in_use_is_refused_by_every_process(tmp_path):
    with runs.only_run(tmp_path):
        ended, said = many(2, "train", tmp_path, 5)
    assert set(ended.codes) == {1} and said.count("FolderInUse: ") == 2


def test_of_replicas_one_is_owned():
    owned = parts.own_shards(checkpoints.arrays(make_state()))
    assert sorted(where for where, _ in owned["params/w_XF"]) == [
        [[0, 64], [0, 16]], [[0, 64], [16, 32]]]
    assert [x.shape for _, x in owned["params/w_XF"]] == [(64, 16), (64, 16)]
    assert [where for where, _ in owned["step"]] == [[]]
