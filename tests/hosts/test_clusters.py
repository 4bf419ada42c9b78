"""Processes of one run on this machine: started, ended with one that died, and started again."""
import os
import signal
import sys

import pytest

from meshbook.hosts import clusters


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


@pytest.fixture
def patient(monkeypatch):
    """A launcher that waits longer for the others, so that a busy machine changes nothing."""
    monkeypatch.setattr(clusters, "GRACE", 20.0)


def test_an_error_that_all_have_leaves_each_its_last_word(patient):
    said, script = [], "import sys, os; sys.exit('no ' + os.environ['MESHBOOK_PROCESS'])"
    ended = clusters.launch(python(script), 2, out=said.append)
    assert ended.codes == [1, 1] and sorted(said) == ["[0] no 0", "[1] no 1"]


@pytest.mark.parametrize("heard", ["sys.exit(1)", "os.abort()"])
def test_who_hears_of_a_death_and_ends_at_once_is_not_called_the_victim(heard, patient):
    script = f"""if True:
        import os, signal, sys, time
        if os.environ["MESHBOOK_PROCESS"] == "0":
            {heard}
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)"""
    ended = clusters.launch(python(script), 2)
    assert (ended.first, ended.codes[1]) == (1, -9)


@pytest.mark.parametrize("count", [1, 2])
def test_what_has_died_before_anybody_looked_is_found(count):
    said = []
    with clusters.started(["false"], count) as cluster:
        for each in cluster.processes:
            each.wait()
        ended = cluster.wait()
    assert (ended.first, ended.codes) == (0, [1] * count)
    assert "process 0 failed with 1" in str(ended)
    assert len(clusters.supervise(["false"], count, out=said.append)) == 1
    assert said[0].endswith("; an error would come again, so nothing is restarted")


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


def test_all_lives_of_a_run_have_one_time_at_which_it_was_started():
    said, script = [], """if True:
        import os, signal, time
        print("started", os.environ["MESHBOOK_STARTED"], flush=True)
        time.sleep(1.1)
        os.kill(os.getpid(), signal.SIGKILL)"""
    assert len(clusters.supervise(python(script), 1, restarts=1, out=said.append)) == 2
    times = [line for line in said if "started 2" in line]
    assert len(times) == 2 and len(set(times)) == 1


ASKED = """if True:
    import os, signal, sys, time
    signal.signal(signal.SIGTERM, lambda *_: (print("asked", flush=True), sys.exit({code})))
    print("ready", flush=True)
    time.sleep(60)"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("code", [0, "os.abort()"])
def test_who_asks_the_launcher_to_end_asks_every_process_and_nothing_starts_again(number, code):
    said, before = [], signal.getsignal(number)

    def out(line):
        said.append(line)
        if sum("ready" in each for each in said) == 3 and "ready" in line:
            os.kill(os.getpid(), number)

    lives = clusters.supervise(python(ASKED.format(code=code)), 3, out=out)
    assert len(lives) == 1 and lives[0].well is (code == 0)
    asked = {line for line in said if "asked" in line}
    assert asked == {f"[{i}] asked" for i in range(3)}, said
    assert signal.getsignal(number) == before


def test_who_asks_while_the_processes_are_being_started_is_heard(monkeypatch):
    real, running = clusters.subprocess.Popen, []

    def popen(*given, **more):
        running.append(real(*given, **more))
        if len(running) == 1:
            signal.raise_signal(signal.SIGTERM)
        return running[-1]

    monkeypatch.setattr(clusters.subprocess, "Popen", popen)
    (ended,) = clusters.supervise(["sleep", "60"], 2)
    assert ended.codes == [-signal.SIGTERM] * 2 and len(running) == 2


def test_the_exit_code_of_the_command_line_is_that_of_the_last_life(tmp_path, capfd):
    once = DIES.format(death=KILL)
    assert clusters.main(["2", "--", *python(once), str(tmp_path), "1"]) == 0
    assert clusters.main(["2", "--", *python("import sys; sys.exit(5)")]) == 1
    assert " failed with 5; " in capfd.readouterr().out


def test_a_count_below_one_is_refused():
    with pytest.raises(ValueError, match="at least 1 process with at least 1 device each, found 0"):
        clusters.launch(["true"], 0)
    with pytest.raises(SystemExit):
        clusters.main(["2"])
