"""Disks that are full or refuse: a save that fails is one clear error, and ends the run."""
import contextlib
import resource
import shutil
import subprocess

import pytest
from saved_runs import WHERE, at, begun
from soak import train

from meshbook.saving import manifests
from meshbook.saving.checkpoints import NotSaved, restore, steps


@contextlib.contextmanager
def at_most(size):
    """No file of this process may grow beyond this many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_fails_is_a_clear_error(tmp_path, fresh, key):
    with begun(tmp_path, fresh, key) as run:
        run.save(at(fresh, 1), WHERE, key)
        run.wait()
        with at_most(5_000), pytest.raises(NotSaved, match=r"step 2 could not be saved .* newest "
                                            "checkpoint is that of step 1"):
            run.save(at(fresh, 2), WHERE, key)
            run.wait()
        assert not (tmp_path / ".saving").exists()
        run.save(at(fresh, 3), WHERE, key)  # there is room again
    assert steps(tmp_path) == [1, 3]
    assert int(restore(tmp_path, fresh).step) == 3


def test_a_folder_that_cannot_be_made_is_an_error_at_once(tmp_path, fresh, key):
    with begun(tmp_path, fresh, key) as run:
        (tmp_path / ".saving").write_text("a file, where a folder is to be")
        with pytest.raises(NotSaved, match="step 1 could not be saved"):
            run.save(at(fresh, 1), WHERE, key)


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a file system of 500 kB of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=500k", "tmpfs", disk]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can make a small disk")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_disk_that_is_full(small_disk, fresh, key):
    with begun(small_disk / "run", fresh, key, keep=99) as run:
        with pytest.raises(NotSaved, match=r"the disk is full; .*[\d,]+ bytes are free") as end:
            for step in range(1, 99):  # about eight have room
                run.save(at(fresh, step), WHERE, key)
                run.wait()
    before = steps(small_disk / "run")
    assert before and f"newest checkpoint is that of step {before[-1]}" in str(end.value)
    assert int(restore(small_disk / "run", fresh).step) == before[-1]


def test_a_failed_save_ends_the_run_at_the_next_step(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(manifests, "write_manifest", fail)
    with pytest.raises(NotSaved, match="the disk is full.* newest checkpoint does not exist yet"):
        train(tmp_path, 100, every=2)
    assert steps(tmp_path) == []
