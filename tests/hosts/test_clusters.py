"""Processes of one run on this machine: started, ended with one that died, and started again."""
import json
import os
import pathlib
import signal
import sys

import pytest
from soak import soak_many

from meshbook.hosts import clusters, places
from meshbook.saving import progress, runs

SUPPORT = pathlib.Path(__file__).parents[1] / "support"
PATH = {"PYTHONPATH": os.pathsep.join([str(SUPPORT), *filter(None, sys.path)])}


def python(script):
    return [sys.executable, "-c", script]


def test_each_process_has_a_place_and_its_lines_are_marked():
    said, script = [], """
import os
print(*(os.environ[f"MESHBOOK_{name}"] for name in ("PROCESS", "PROCESSES")),
      os.environ["JAX_NUM_CPU_DEVICES"], os.environ["MESHBOOK_COORDINATOR"].split(":")[0])
print("[Gloo] Rank 1 is connected to 3 peer ranks. "
      "Expected number of connected peer ranks is : 3")
"""
    assert clusters.launch(python(script), 3, 2, out=said.append).codes == [0, 0, 0]
    assert sorted(said) == [f"[{i}] {i} 3 2 127.0.0.1" for i in range(3)]


def test_when_one_dies_the_others_are_ended_and_it_is_named():
    script = """if True:
        import os, signal, time
        if os.environ["MESHBOOK_PROCESS"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)"""
    ended = clusters.launch(python(script), 3)
    assert (ended.first, ended.codes, ended.well) == (1, [-9, -9, -9], False)
    assert str(ended) == "process 1 was ended by SIGKILL; processes 0 and 2 ended with it"


def test_an_error_that_all_have_leaves_each_its_last_word():
    said, script = [], "import sys, os; sys.exit('no ' + os.environ['MESHBOOK_PROCESS'])"
    ended = clusters.launch(python(script), 2, out=said.append)
    assert ended.codes == [1, 1] and sorted(said) == ["[0] no 0", "[1] no 1"]


def test_no_process_outlives_the_block():
    with clusters.started(python("import time; time.sleep(60)"), 2) as cluster:
        running = cluster.processes
        assert [each.poll() for each in running] == [None, None]
    assert [each.poll() for each in running] == [-9, -9]


DIES = """if True:
    import os, pathlib, signal, sys
    marks = pathlib.Path(sys.argv[1])
    if os.environ["MESHBOOK_PROCESS"] == "0":
        (marks / str(len(list(marks.iterdir())))).touch()
        if len(list(marks.iterdir())) <= int(sys.argv[2]):
            {death}"""
KILL, FAIL = "os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(3)"


@pytest.mark.parametrize("death, deaths, lives, last", [
    (KILL, 2, 3, "all are started again (2 of 3)"), (KILL, 9, 4, "3 restarts have been made"),
    (FAIL, 1, 1, "process 0 failed with 3; process 1 ended with it; an error would come again")])
def test_supervise_starts_again_what_was_killed(tmp_path, death, deaths, lives, last):
    said = []
    found = clusters.supervise(
        [*python(DIES.format(death=death)), str(tmp_path), str(deaths)], 2, out=said.append)
    assert len(found) == lives and last in said[-1]
    assert found[-1].well is (death == KILL and deaths < 4)


def test_ten_kills_of_one_of_two_processes_change_no_loss(tmp_path):
    killed, whole, _ = soak_many(tmp_path, kills=10, seed=3, processes=2)
    assert killed == whole and list(whole) == list(range(1, 131))
    found = progress.goodput(progress.read_progress(tmp_path / "killed"))
    assert found.kept == 130 and 0 < found.share < 1


def test_a_run_under_supervision_survives_a_kill(tmp_path):
    strike = {"process": 1, "step": 8, "signal": signal.SIGKILL, "marker": str(tmp_path / "sent")}
    command = [sys.executable, str(SUPPORT / "clustered.py")]
    said, options = [], [json.dumps({"strike": strike}), "{}"]
    lives = clusters.supervise([*command, str(tmp_path / "run"), "12", options[0]], 2, 4,
                               out=said.append)
    assert [each.first for each in lives] == [1, None], said
    assert any("process 1 was ended by SIGKILL; process 0 ended with it" in line for line in said)
    assert clusters.launch([*command, str(tmp_path / "whole"), "12", options[1]], 2, 4).well
    losses = [runs.read_metrics(tmp_path / name / "metrics")["loss"] for name in ("run", "whole")]
    assert losses[0] == losses[1] and len(losses[0]) == 12
    lives = progress.read_progress(tmp_path / "run")
    assert [each.came_from for each in lives] == [-1, 5]
    assert lives[0].ended is None and lives[1].ended


LISTENS = """if True:
    from meshbook.hosts.places import connect
    connect(60)
    import jax, os
    jax.jit(jax.numpy.sum)(jax.make_array_from_callback((2,), jax.sharding.NamedSharding(
        jax.make_mesh((2,), "x"), jax.P("x")), lambda _: jax.numpy.ones(1)))
    ours = {os.path.realpath(f"/proc/self/fd/{each}").rpartition("socket:[")[2][:-1]
            for each in os.listdir("/proc/self/fd")}
    for kind in ("tcp", "tcp6"):
        for line in open(f"/proc/net/{kind}").readlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and rest[5] in ours:
                print("listens", local.split(":")[0])"""


@pytest.mark.skipif(not pathlib.Path("/proc/net/tcp").exists(), reason="needs Linux's /proc")
def test_nothing_listens_on_every_interface():
    said = []
    assert clusters.launch(python(LISTENS), 2, out=said.append).well, said
    where = {line.split()[-1] for line in said if "listens" in line}
    loopback = {"0100007F", "0000000000000000FFFF00000100007F"}  # as /proc writes 127.0.0.1
    assert where and where <= loopback


SLURM = {"SLURM_JOB_ID": "4097", "SLURM_NTASKS": "4", "SLURM_PROCID": "3"}


@pytest.mark.parametrize("nodes, host", [
    ("node7", "node7"), ("node7,other", "node7"), ("node[007-009,12],other", "node007"),
    ("gpu-a[3,5]", "gpu-a3"), ("localhost", "localhost")])
def test_slurms_variables_give_a_place(nodes, host):
    assert places.place_of(SLURM | {"SLURM_STEP_NODELIST": nodes}) == places.Place(
        f"{host}:61441", 4, 3)


def test_without_a_cluster_there_is_no_place():
    assert places.place_of({}) is None
    assert places.place_of(SLURM) is None  # in a batch script, outside srun


@pytest.mark.parametrize("given, words", [
    (("host:80", "2", None), "MESHBOOK_COORDINATOR and the numbers .* found host:80, 2, None"),
    (("host:80", "two", "0"), "found host:80, two, 0"),
    (("host", "2", "0"), "written as host:port"),
    (("host:80", "2", "2"), "expected a process from 0 to 1, found process 2")])
def test_a_place_that_is_none_is_refused(given, words):
    names = (places.ADDRESS, places.COUNT, places.INDEX)
    with pytest.raises(ValueError, match=words):
        places.place_of({name: each for name, each in zip(names, given) if each})


def test_a_count_below_one_is_refused():
    with pytest.raises(ValueError, match="at least 1 process with at least 1 device each, found 0"):
        clusters.launch(["true"], 0)
    with pytest.raises(SystemExit):
        clusters.main(["2"])
