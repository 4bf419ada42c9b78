"""Folders and buckets: whole or not at all, tried again where that helps, sealed facts."""
import errno
import os

import numpy as np
import pytest
from corpora import clear_memory, failing

from meshbook.data import buckets
from meshbook.data.buckets import Place, again, sealed, unsealed


@pytest.fixture(params=["folder", "bucket"])
def place(request, tmp_path, monkeypatch):
    monkeypatch.setattr(buckets, "WAIT", 0)
    clear_memory()
    return Place(tmp_path / "x" if request.param == "folder" else "memory://b/x/")


def test_what_is_written_is_read(place):
    assert place.names() == [] and place.names("below") == []
    for name in ("a", "below/c", "below/b"):
        place.write(name, name.encode() * 3)
        assert bytes(place.read(name)) == name.encode() * 3
    assert place.names() == ["a", "below"] and place.names("below") == ["b", "c"]
    place.write("a", b"")
    assert place.read("a").shape == (0,) and place.read("a").dtype == np.uint8
    place.remove("below")
    place.remove("below")
    assert place.names() == ["a"]
    with pytest.raises(FileNotFoundError):
        place.read("below/b")


def test_a_folder_is_read_as_a_memory_map(tmp_path):
    Place(tmp_path).write("a", b"abc")
    assert isinstance(Place(tmp_path).read("a"), np.memmap)
    assert Place(tmp_path).is_local and not Place("memory://b").is_local


def test_a_write_that_fails_leaves_the_earlier_file(tmp_path, monkeypatch):
    place = Place(tmp_path)
    place.write("a", b"before")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.raises(OSError, match="the disk is full: .* nothing half-written was kept"):
        place.write("a", b"after")
    assert bytes(place.read("a")) == b"before" and place.names() == ["a"]


def test_a_bucket_is_tried_again_and_then_gives_up(monkeypatch):
    waited = []
    monkeypatch.setattr(buckets.time, "sleep", waited.append)
    clear_memory()
    place, content = Place("memory://b"), bytes(range(256)) * 10
    with failing(seed=0, share=0.4) as failures:
        for number in range(20):
            place.write(f"{number}", content)
            assert bytes(place.read(f"{number}")) == content
    assert failures.count("read") > 3 and failures.count("write") > 3
    waited.clear()
    with failing(seed=0, share=1.0), pytest.raises(
            OSError, match="memory://b/y could not be written: 4 attempts failed, the last with"):
        place.write("y", content)
    assert waited == [0.25, 0.5, 1.0]


def test_what_cannot_change_is_not_tried_again(monkeypatch):
    monkeypatch.setattr(buckets.time, "sleep", lambda _: pytest.fail("waited"))

    def missing():
        raise FileNotFoundError("gone")

    with pytest.raises(FileNotFoundError, match="^gone$"):
        again("it failed", missing)
    with pytest.raises(ZeroDivisionError):
        again("it failed", lambda: 1 / 0)


def test_sealed_facts_come_back_and_any_changed_byte_is_noticed():
    content = sealed({"format": "f", "name": "é", "list": [1, 2]})
    found = unsealed("x", content, "f")
    assert found.pop("sha256") and found == {"format": "f", "name": "é", "list": [1, 2]}
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1
        with pytest.raises(ValueError, match="x is damaged, or of another kind"):
            unsealed("x", bytes(changed), "f")
    for other in (content[:-1], b"", b"[]", b"{}", b"\xff"):
        with pytest.raises(ValueError, match="expected a 'f' with its own SHA-256, found"):
            unsealed("x", other, "f")
    with pytest.raises(ValueError, match="expected a 'g'"):
        unsealed("x", content, "g")
