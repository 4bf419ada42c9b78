"""Downloads against a server on this machine that misbehaves in every way we could think of."""
import errno
import hashlib
import http.server
import io
import os
import sys
import tarfile
import threading

import pytest

from meshbook.data import downloads


def tar_of(members):
    """The bytes of a tar.gz with the given names and contents."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


NOISE = os.urandom(1_000_000)  # does not compress, so the archive is large enough to cut
ARCHIVE = tar_of({"pictures/a": NOISE, "pictures/b": b"two"})
SHA256 = hashlib.sha256(ARCHIVE).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves ARCHIVE; what goes wrong is the first part of the path."""

    def do_GET(self):
        manner = self.path.split("/")[1]
        self.server.requests.append((manner, self.headers.get("Range")))
        if manner == "missing":
            return self.send_error(404)
        if manner == "busy" and len(self.server.requests) < 3:
            return self.send_error(503)
        body = ARCHIVE[:-1] + b"!" if manner == "wrong" else ARCHIVE
        start = int(self.headers.get("Range", "bytes=0-")[6:-1])
        start = 0 if manner == "norange" else start
        if start >= len(body):
            return self.send_error(416)
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        cut = manner in ("cut", "dead") and (start == 0 or manner == "dead")
        self.wfile.write(body[start:start + 300_000] if cut else body[start:])

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        httpd.requests = []
        httpd.url = f"http://127.0.0.1:{httpd.server_port}"
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield httpd
        httpd.shutdown()
        thread.join()


def fetch(server, folder, *manners, sha256=SHA256):
    mirrors = [f"{server.url}/{manner}/archive.tar.gz" for manner in manners]
    needed = 2 * len(ARCHIVE)
    return downloads.fetch_tar(mirrors, sha256, needed, folder, "pictures", tries=3, wait=0.01)


def assert_whole(folder):
    assert sorted(os.listdir(folder)) == ["pictures"]
    assert (folder / "pictures" / "a").read_bytes() == NOISE
    assert (folder / "pictures" / "b").read_bytes() == b"two"


def test_a_good_mirror(server, tmp_path):
    assert fetch(server, tmp_path / "new", "good") == tmp_path / "new" / "pictures"
    assert_whole(tmp_path / "new")


def test_a_dropped_connection_is_resumed_where_it_ended(server, tmp_path):
    fetch(server, tmp_path, "cut")
    assert_whole(tmp_path)
    (_, first), (_, second) = server.requests
    assert first is None
    assert 0 < int(second[6:-1]) <= 300_000


def test_a_mirror_that_ignores_ranges_starts_again(server, tmp_path):
    work = tmp_path / ".pictures.unfinished"
    work.mkdir()
    downloads.part_of(work).write_bytes(ARCHIVE[:1000])
    fetch(server, tmp_path, "norange")
    assert_whole(tmp_path)
    assert server.requests == [("norange", "bytes=1000-")]


def test_the_next_mirror_continues_what_another_began(server, tmp_path):
    fetch(server, tmp_path, "dead", "good")
    assert_whole(tmp_path)
    assert server.requests[-1][0] == "good" and server.requests[-1][1] is not None


def test_the_next_run_continues_what_the_network_cut_short(server, tmp_path):
    with pytest.raises(downloads.DownloadError, match="dead"):
        fetch(server, tmp_path, "dead")
    assert os.listdir(tmp_path) == [".pictures.unfinished"]
    fetch(server, tmp_path, "good")
    assert_whole(tmp_path)
    assert server.requests[-1][1] is not None


@pytest.mark.parametrize("rubbish", [b"x" * 1000, b"x" * len(ARCHIVE), b"x" * 2 * len(ARCHIVE)])
def test_a_spoilt_part_is_thrown_away(server, tmp_path, rubbish):
    work = tmp_path / ".pictures.unfinished"
    work.mkdir()
    downloads.part_of(work).write_bytes(rubbish)
    fetch(server, tmp_path, "good")
    assert_whole(tmp_path)


def test_a_wrong_byte_is_found_before_unpacking(server, tmp_path):
    with pytest.raises(downloads.DownloadError) as failure:
        fetch(server, tmp_path, "wrong", "missing")
    assert SHA256 in str(failure.value) and "404" in str(failure.value)
    assert os.listdir(tmp_path) == []
    fetch(server, tmp_path, "wrong", "good")
    assert_whole(tmp_path)


def test_a_busy_server_is_asked_again_and_a_missing_file_is_not(server, tmp_path):
    fetch(server, tmp_path, "missing", "busy")
    assert_whole(tmp_path)
    assert [manner for manner, _ in server.requests] == ["missing", "busy", "busy"]


def test_nobody_answers(tmp_path):
    with pytest.raises(downloads.DownloadError, match="127.0.0.1"):
        downloads.fetch_tar(["http://127.0.0.1:9/x"], SHA256, 0, tmp_path, "pictures", 2, 0.01)
    assert os.listdir(tmp_path) == []


def test_a_damaged_copy_is_replaced(server, tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a").write_bytes(b"damaged")
    fetch(server, tmp_path, "good")
    assert_whole(tmp_path)


class FullDisk:
    """A file that takes some bytes and then has no room."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, chunk):
        self.room -= len(chunk)
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.file.write(chunk)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()


def test_a_disk_that_is_full_while_downloading(server, tmp_path, monkeypatch):
    monkeypatch.setattr(downloads, "open", lambda *a: FullDisk(open(*a), 200_000), raising=False)
    with pytest.raises(OSError, match="disk is full: .* found") as failure:
        fetch(server, tmp_path, "good")
    assert failure.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == []


def test_a_disk_without_the_room_is_found_before_downloading(server, tmp_path):
    with pytest.raises(OSError, match=f"room for {10**18:,} bytes in {tmp_path}, found"):
        downloads.fetch_tar([f"{server.url}/good/x"], SHA256, 10**18, tmp_path, "pictures")
    assert server.requests == [] and os.listdir(tmp_path) == []


def test_a_disk_that_is_full_while_unpacking(server, tmp_path, monkeypatch):
    def half(archive, folder):
        folder.mkdir()
        (folder / "half").write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(downloads, "unpack", half)
    (tmp_path / "pictures").mkdir()
    with pytest.raises(OSError, match="disk is full"):
        fetch(server, tmp_path, "good")
    assert os.listdir(tmp_path) == ["pictures"]


def test_a_reader_who_stops_can_go_on(server, tmp_path, monkeypatch):
    def stop(response, part, have):
        part.write_bytes(ARCHIVE[:5000])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(downloads, "save", stop)
        fetch(server, tmp_path, "good")
    fetch(server, tmp_path, "good")
    assert_whole(tmp_path)
    assert server.requests[-1][1] == "bytes=5000-"


@pytest.mark.parametrize("name", ["../outside", "folder/../../outside", "/{}/outside"])
def test_a_member_outside_the_folder_is_refused(tmp_path, name):
    archive, name = tmp_path / "bad.tar.gz", name.format(tmp_path)
    archive.write_bytes(tar_of({name: b"x"}))
    with pytest.raises(downloads.DownloadError, match="found '.*outside'"):
        downloads.unpack(archive, tmp_path / "inside")
    assert not (tmp_path / "outside").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_what_is_no_file_is_refused(tmp_path, kind):
    with tarfile.open(tmp_path / "bad.tar", "w") as tar:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = kind, "../outside"
        tar.addfile(link)
    with pytest.raises(downloads.DownloadError, match="expected files and folders .* 'link'"):
        downloads.unpack(tmp_path / "bad.tar", tmp_path / "inside")
    assert not (tmp_path / "inside").exists()


def fetch_file(server, path, *manners, needed=len(ARCHIVE)):
    mirrors = [f"{server.url}/{manner}/archive.tar.gz" for manner in manners]
    return downloads.fetch_file(mirrors, SHA256, needed, path, tries=3, wait=0.01)


def test_a_single_file_is_resumed_verified_and_put_in_its_place(server, tmp_path):
    path = tmp_path / "new" / "stories.txt"
    with pytest.raises(downloads.DownloadError):
        fetch_file(server, path, "wrong", "dead")
    assert os.listdir(path.parent) == [".stories.txt.unfinished"]
    assert fetch_file(server, path, "missing", "cut") == path
    assert os.listdir(path.parent) == ["stories.txt"] and path.read_bytes() == ARCHIVE
    assert server.requests[-1][1] is not None
    path.write_bytes(b"damaged")
    fetch_file(server, path, "good")
    assert path.read_bytes() == ARCHIVE


def test_a_single_file_without_room_keeps_nothing(server, tmp_path):
    with pytest.raises(OSError, match="the disk is full") as failure:
        fetch_file(server, tmp_path / "stories.txt", "good", needed=10**18)
    assert failure.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == []


def test_a_command_takes_one_folder_and_says_what_went_wrong_in_a_sentence(monkeypatch):
    def main(folder):
        asked.append(folder)
        raise OSError(28, f"no room in {folder}")

    asked = []
    monkeypatch.setattr(sys, "argv", ["images.py", "DATA"])
    with pytest.raises(SystemExit, match="no room in DATA"):
        downloads.command(main, "python images.py DIR")
    for more in ([], ["DATA", "AGAIN"]):
        monkeypatch.setattr(sys, "argv", ["images.py", *more])
        with pytest.raises(SystemExit, match="usage: python images.py DIR"):
            downloads.command(main, "python images.py DIR")
    assert asked == ["DATA"]
