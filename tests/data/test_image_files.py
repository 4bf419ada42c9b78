"""The files of CIFAR-10: what is damaged is refused and named, and what is missing downloaded."""
import hashlib
import os
import pickle
import pathlib
import subprocess
import sys
import types

import pytest

from meshbook.data import downloads, images

CIFAR = os.environ.get("MESHBOOK_DATA")
needs_cifar = pytest.mark.skipif(not CIFAR, reason="MESHBOOK_DATA names no folder with CIFAR-10")


@pytest.fixture
def small(tmp_path):
    """A data set of three small files with its md5 sums, like torchvision's class."""
    contents = {"one": b"1" * 100, "two": b"2" * 100, "meta": b"3" * 100}
    (tmp_path / "base").mkdir()
    for name, content in contents.items():
        (tmp_path / "base" / name).write_bytes(content)
    md5 = {name: hashlib.md5(content).hexdigest() for name, content in contents.items()}
    return types.SimpleNamespace(
        base_folder="base", train_list=[["one", md5["one"]]], test_list=[["two", md5["two"]]],
        meta={"filename": "meta", "md5": md5["meta"]}, folder=tmp_path, md5=md5)


def test_an_intact_folder_passes(small):
    images.check_folder(small.folder, small)


@pytest.mark.parametrize("name", ["one", "two", "meta"])
@pytest.mark.parametrize("damage", [lambda b: b[:50], lambda b: b[:7] + b"!" + b[8:]])
def test_a_damaged_file_is_named_with_both_sums(small, name, damage):
    path = small.folder / "base" / name
    path.write_bytes(damage(path.read_bytes()))
    found = hashlib.md5(path.read_bytes()).hexdigest()
    with pytest.raises(ValueError) as failure:
        images.check_folder(small.folder, small)
    for word in (str(path), small.md5[name], found, f"{path.stat().st_size} bytes"):
        assert word in str(failure.value)


def test_a_missing_file_is_named(small):
    (small.folder / "base" / "two").unlink()
    with pytest.raises(FileNotFoundError, match="base/two.*make data"):
        images.check_folder(small.folder, small)


def test_a_missing_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHBOOK_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match="nowhere.*expected CIFAR-10"):
        images.load()


class Trap:
    """A pickle that leaves a mark when somebody opens it."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (open, (str(self.mark), "w"))


def test_nothing_is_unpickled_before_its_sum_is_right(tmp_path):
    folder, mark = tmp_path / "cifar-10-batches-py", tmp_path / "mark"
    folder.mkdir()
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"]:
        (folder / name).write_bytes(pickle.dumps(Trap(mark)))
    with pytest.raises(ValueError, match="data_batch_1 is damaged"):
        images.load(tmp_path)
    assert not mark.exists()


@needs_cifar
@pytest.mark.parametrize("name", ["data_batch_3", "test_batch", "batches.meta"])
def test_one_flipped_byte_of_cifar10_is_found(tmp_path, name):
    real, copy = pathlib.Path(CIFAR, "cifar-10-batches-py"), tmp_path / "cifar-10-batches-py"
    copy.mkdir()
    for path in real.iterdir():
        (copy / path.name).symlink_to(path)
    content = bytearray((real / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / name).unlink()
    (copy / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} is damaged: expected md5 .* found "):
        images.load(tmp_path)


def test_the_command_downloads_only_what_is_missing(monkeypatch, tmp_path, capsys):
    calls = []

    def check(folder, dataset):
        if not calls:
            raise FileNotFoundError("nothing there")

    monkeypatch.setattr(images, "check_folder", check)
    monkeypatch.setattr(downloads, "fetch_tar", lambda *a: calls.append(a))
    images.main(tmp_path)
    images.main(tmp_path)
    (mirrors, sha256, needed, folder, unpacked), = calls
    assert len(mirrors) >= 2 and len(set(mirrors)) == len(mirrors)
    assert all(url.startswith("https://") and url.endswith("/cifar-10-python.tar.gz")
               for url in mirrors)
    assert len(sha256) == 64 and needed > 350e6
    assert (folder, unpacked) == (tmp_path, "cifar-10-batches-py")
    first, second = capsys.readouterr().out.splitlines()
    assert f"MESHBOOK_DATA={tmp_path}" in first and "already" in second


def test_the_command_without_a_folder_says_how_it_is_used():
    out = subprocess.run([sys.executable, "-m", "meshbook.data.images"], text=True,
                         capture_output=True, cwd=pathlib.Path(images.__file__).parents[2])
    assert out.returncode == 1 and out.stderr.startswith("usage: python -m meshbook.data.images DIR")
