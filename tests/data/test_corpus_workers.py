"""Workers are looked at before they start; a bucket that fails costs time, and nothing else."""
import json
import os

import pytest
from corpora import ENCODING, clear_memory, failing, hashes, small_plan, write_inputs
from fsspec.implementations.memory import MemoryFileSystem

from meshbook.data import buckets
from meshbook.data.buckets import Place
from meshbook.data.corpus import build_corpus
from meshbook.data.corpus_workers import InProcess, Processes, check_workers
from meshbook.data.shards import read_corpus


@pytest.fixture
def inputs(tmp_path):
    return write_inputs(tmp_path / "inputs")


def test_every_process_answers_once_and_leaves_nothing(inputs, tmp_path):
    found = check_workers(small_plan(inputs), tmp_path / "x", ENCODING, Processes(3))
    assert len({each["worker"] for each in found}) == 3
    assert {each["their tokens"] for each in found} == {found[0]["their tokens"]}
    assert Place(tmp_path / "x").names() == ["plan.json"]


class Strange(InProcess):
    """Two workers, the second of which answers otherwise."""

    def __init__(self, **answers):
        self.answers = answers

    def everywhere(self, job):
        return [job(0), job(1) | {"worker": "host-7, process 5"} | self.answers]


@pytest.mark.parametrize("answers, said", [
    ({"tiktoken": "0.1"}, "is not like this process: expected tiktoken .*, found 0.1"),
    ({"their tokens": "abc"}, "is not like this process: expected their tokens .*, found abc"),
    ({"first bytes of the input": "abc"}, "expected first bytes of the input .*, found abc"),
    ({"failure": "PermissionError: no"}, "cannot do its work: PermissionError: no")])
def test_a_worker_that_differs_is_named(inputs, tmp_path, answers, said):
    with pytest.raises(RuntimeError, match=f"the worker host-7, process 5 {said}|{said}"):
        check_workers(small_plan(inputs), tmp_path / "x", ENCODING, Strange(**answers))


def test_an_output_that_cannot_be_written_is_found_before_the_work(inputs, tmp_path, monkeypatch):
    write = Place.write
    monkeypatch.setattr(Place, "write", lambda self, name, content: (
        write(self, name, content[:-1] if name.startswith("test/") else content)))
    with pytest.raises(RuntimeError, match="cannot do its work: .* has other bytes than were"):
        check_workers(small_plan(inputs), tmp_path / "x", ENCODING, InProcess())


def test_an_error_of_a_job_arrives_with_its_message(inputs, tmp_path):
    with open(inputs / "a.jsonl", "a") as file:
        file.write('{"text": 1}\n')
    with pytest.raises(ValueError, match="a.jsonl, line 203 is a JSON object without a text"):
        build_corpus(small_plan(inputs), tmp_path / "x", ENCODING, Processes(2))


def dies_at_three(item):
    if item == 3:
        os._exit(1)
    return 10 * item


def test_what_arrived_before_a_worker_died_is_kept_and_counted():
    found = Processes(1).run(dies_at_three, iter(range(5)))
    assert [next(found) for _ in range(3)] == [0, 10, 20]
    with pytest.raises(RuntimeError, match="a worker ended .* 3 of 5 results had arrived"):
        next(found)


@pytest.fixture
def bucket(inputs, monkeypatch):
    """The inputs in a bucket in memory."""
    monkeypatch.setattr(buckets, "WAIT", 0)
    clear_memory()
    for path in inputs.iterdir():
        MemoryFileSystem().pipe_file(f"/bucket/in/{path.name}", path.read_bytes())
    return "memory://bucket"


def shards(folder):
    """{name: bytes} of the token files of a place."""
    return {name: bytes(Place(folder).read(name)) for name in Place(folder).names()
            if name.endswith(".tokens")}


def test_a_bucket_gives_the_shards_of_a_folder(inputs, bucket, tmp_path):
    build_corpus(small_plan(inputs), tmp_path / "x", ENCODING)
    build_corpus(small_plan(f"{bucket}/in"), f"{bucket}/out", ENCODING)
    assert shards(f"{bucket}/out") == shards(tmp_path / "x") and len(hashes(tmp_path / "x")) > 8
    assert set(Place(f"{bucket}/out").names()) == {path.name for path in (tmp_path / "x").iterdir()}


@pytest.mark.parametrize("share", [0.1, 0.38])
def test_a_bucket_that_fails_in_the_middle(inputs, bucket, tmp_path, share):
    """Often enough, so that some calls give up: going on finishes, and the bytes are the same."""
    build_corpus(small_plan(inputs), tmp_path / "x", ENCODING)
    made, gave_up = small_plan(f"{bucket}/in"), []
    with failing(seed=1, share=share) as failures:
        for _ in range(60):
            try:
                build_corpus(made, f"{bucket}/out", ENCODING)
                break
            except OSError as error:
                gave_up.append(str(error))
        else:
            pytest.fail("never finished")
    assert len(failures) > 5 and (share < 0.2 or gave_up)
    assert all("4 attempts failed, the last with" in each for each in gave_up)
    assert shards(f"{bucket}/out") == shards(tmp_path / "x")
    json.loads(bytes(Place(f"{bucket}/out").read("index.json")))
    assert Place(f"{bucket}/out").names("pieces") == []


def test_shards_of_a_bucket_are_kept_in_a_folder(bucket, tmp_path):
    build_corpus(small_plan(f"{bucket}/in"), f"{bucket}/out", ENCODING)
    first = read_corpus(f"{bucket}/out", cache=tmp_path / "cache").train.open(0)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".tokens"]
    again = read_corpus(f"{bucket}/out", cache=tmp_path / "cache").train
    with failing(seed=0, share=1.0):
        assert (again.open(0).ids == first.ids).all()
    path = next((tmp_path / "cache").iterdir())
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="is not whole"):
        again.open(0)
