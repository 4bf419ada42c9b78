"""Damaged checkpoints: each is named, set aside and never deleted, and the step before is used."""
import os
import random
import shutil

import pytest
from saved_runs import WHERE, at
from soak import make_stream, train

from meshbook.saving import manifests
from meshbook.saving.checkpoints import Checkpoints, restore, steps


def flip(path, draw):
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


DAMAGE = {
    "flipped": flip,
    "truncated": lambda path, draw: os.truncate(path, draw.randrange(1, path.stat().st_size)),
    "emptied": lambda path, draw: os.truncate(path, 0),
    "deleted": lambda path, draw: path.unlink(),
    "replaced by a folder": lambda path, draw: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_every_damaged_file_is_named_and_the_step_before_it_is_used(folder, fresh, how):
    draw, whole = random.Random(how), folder.with_name("whole")
    shutil.copytree(folder / "10", whole)
    names = [path.relative_to(whole) for path in sorted(whole.rglob("*")) if path.is_file()]
    known = {"manifest.json", "manifest.ocdbt", "_METADATA", "_CHECKPOINT_METADATA"}
    assert known <= {name.name for name in names}
    assert sum(name.parent.name == "d" for name in names) > 2  # of data, as many as it happens
    for name in names:
        DAMAGE[how](folder / "10" / name, draw)
        with pytest.warns(UserWarning, match=f"step 10 is skipped: .*{name}: expected .* found "):
            assert int(restore(folder, fresh).step) == 5
        shutil.rmtree(folder / "10")
        shutil.copytree(whole, folder / "10")
    assert int(restore(folder, fresh).step) == 10


def test_every_byte_of_a_manifest_counts(tmp_path):
    (tmp_path / "a").write_text("a")
    manifests.write_manifest(tmp_path, {"step": 1, "what": [1.5, None, "ü"]})
    assert manifests.verify(tmp_path) == {"step": 1, "what": [1.5, None, "ü"]}
    path = tmp_path / manifests.NAME
    data = path.read_bytes()
    for byte in range(len(data)):
        changed = bytearray(data)
        changed[byte] ^= 1 << byte % 8
        path.write_bytes(changed)
        with pytest.raises(manifests.Damaged):
            manifests.verify(tmp_path)


def test_a_file_is_named_with_what_was_expected_and_found(tmp_path):
    (tmp_path / "a").write_text("abc")
    (tmp_path / "b").write_text("b")
    manifests.write_manifest(tmp_path, {})
    (tmp_path / "a").write_text("abcd")
    (tmp_path / "b").unlink()
    with pytest.raises(manifests.Damaged) as damage:
        manifests.verify(tmp_path)
    first, second = str(damage.value).split("; ")
    assert first.startswith(f"{tmp_path}/a: expected 3 bytes of SHA-256 ba7816bf")
    assert "found 4 bytes of SHA-256 88d4266f" in first
    assert second.startswith(f"{tmp_path}/b: expected 1 bytes") and second.endswith("found none")


def test_a_step_under_another_name_is_damaged(folder, fresh):
    os.rename(folder / "10", folder / "11")
    with pytest.warns(UserWarning, match="expected step 11, found step 10"):
        assert int(restore(folder, fresh).step) == 5


def test_a_checkpoint_without_an_identity_is_skipped(folder, fresh):
    content = manifests.verify(folder / "10")
    (folder / "10" / manifests.NAME).unlink()
    manifests.write_manifest(folder / "10", {name: x for name, x in content.items() if name != "identity"})
    with pytest.warns(UserWarning, match="step 10 is skipped: expected the identity of a run"):
        assert int(restore(folder, fresh).step) == 5


def test_stray_folders_are_ignored(folder, fresh, key):
    for name in ("notes", "12.tmp", "007", "-3", "10.damaged", ".saving/15"):
        (folder / name).mkdir(parents=True)
    (folder / "99").write_text("a file")
    (folder / "98").mkdir()
    assert steps(folder) == [5, 10, 98]
    with pytest.warns(UserWarning, match="step 98 is skipped: .* expected a manifest, found none"):
        assert int(restore(folder, fresh).step) == 10
    with pytest.warns(UserWarning, match="98"), Checkpoints(folder, keep=1) as run:
        state, _ = run.resume(fresh, make_stream(), key)
        for step in (98, 99):
            run.save(at(state, step), WHERE, key)
    assert steps(folder) == [99]
    assert {"notes", "12.tmp", "007", "-3", "98.damaged", "99.damaged"} <= set(os.listdir(folder))


def test_damaged_checkpoints_are_set_aside_and_never_deleted(folder, fresh):
    flip(folder / "10" / "_METADATA", random.Random(0))
    with pytest.warns(UserWarning, match="step 10 is skipped"):
        train(folder, 20)  # keeps two
    assert steps(folder) == [15, 20] and (folder / "10.damaged").is_dir()
    flip(folder / "20" / "_METADATA", random.Random(0))
    with pytest.warns(UserWarning, match="step 20 is skipped"):
        train(folder, 19)
    assert steps(folder) == [15, 19, 20]  # known to be damaged: it does not count


def test_nothing_intact(folder, fresh, key):
    for step in (5, 10):
        (folder / str(step) / manifests.NAME).unlink()
    with pytest.warns(UserWarning), pytest.raises(FileNotFoundError, match="found none that is"):
        restore(folder, fresh)
    with pytest.warns(UserWarning), Checkpoints(folder) as run:
        assert run.resume(fresh, make_stream(), key) == (fresh, key)
