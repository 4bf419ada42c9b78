"""What a run survives, and how it ends: kill -9, SIGTERM, NaN, a second run in its folder."""
import os
import signal
import subprocess
import sys
import warnings

import pytest
from soak import process, soak, train

from meshbook.saving import checkpoints, manifests, runs


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """The losses of a run of 30 steps that nothing disturbed, by step."""
    folder = tmp_path_factory.mktemp("whole")
    train(folder, 30)
    return runs.read_metrics(folder / "metrics")["loss"]


def test_ten_kills_change_no_loss(tmp_path):
    killed, whole, _ = soak(tmp_path, kills=10, seed=8)
    assert killed == whole and list(whole) == list(range(1, 221))


def test_losses_that_were_resumed_without_their_position_differ(tmp_path, losses, monkeypatch):
    train(tmp_path, 12)
    monkeypatch.setattr(checkpoints, "decode_position", lambda saved: {"next_index": 0})
    train(tmp_path, 30)
    resumed = runs.read_metrics(tmp_path / "metrics")["loss"]
    assert [step for step in losses if resumed[step] != losses[step]][0] == 13


def test_sigterm_saves_and_exits_with_0(tmp_path, losses):
    with process(tmp_path, 10**6, every=10**6) as (run, pipe):
        for _ in range(4):
            pipe.recv()
        run.terminate()
        run.join()
        assert run.exitcode == 0
    (step,) = checkpoints.steps(tmp_path)
    assert step >= 4
    manifests.verify(tmp_path / str(step))
    train(tmp_path, 30)
    assert runs.read_metrics(tmp_path / "metrics")["loss"] == losses


def test_sigterm_after_the_last_step_saves_too(tmp_path):
    def after(step):
        if step == 7:
            signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as end:
        train(tmp_path, 7, after=after)
    assert end.value.code == 0 and checkpoints.steps(tmp_path) == [5, 7]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path, losses):
    with process(tmp_path, 30, fatal=7) as (run, _):
        run.join()
        assert run.exitcode == 1
    assert checkpoints.steps(tmp_path) == [5]
    manifests.verify(tmp_path / "5")
    found = runs.read_metrics(tmp_path / "metrics")["loss"]
    assert [found[step] for step in range(1, 9)] == [losses[step] for step in range(1, 9)]
    assert found[9] != found[9]
    train(tmp_path, 7, fatal=7)  # goes on from step 5
    assert checkpoints.steps(tmp_path) == [5, 7]


def test_the_last_step_is_watched_too(tmp_path):
    with pytest.raises(runs.Diverged, match="step 9: expected a finite loss, found nan"):
        train(tmp_path, 9, fatal=7)
    assert checkpoints.steps(tmp_path) == [5]


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    with pytest.raises(runs.Diverged, match="step 8 is not saved: .* params/w_FC, found NaN"):
        train(tmp_path, 30, every=4, fatal=7)
    assert checkpoints.steps(tmp_path) == [4]


def test_a_second_run_in_a_folder_is_refused_until_the_first_is_dead(tmp_path):
    with process(tmp_path, 10**6) as (first, pipe):
        pipe.recv()
        with pytest.raises(runs.FolderInUse, match=f"another run .process {first.pid} since"):
            train(tmp_path, 1)
        with process(tmp_path, 1) as (second, _):
            second.join()
            assert second.exitcode == 1
        first.kill()
        first.join()
    with warnings.catch_warnings(action="error"):
        train(tmp_path, 20)


def test_the_same_process_is_refused_too_and_a_lock_ends_with_its_block(tmp_path):
    with runs.only_run(tmp_path):
        with pytest.raises(runs.FolderInUse), runs.only_run(tmp_path):
            pass
    with runs.only_run(tmp_path):
        pass


def test_a_lock_does_not_live_on_in_a_fork(tmp_path):
    script = """if True:
        import os, sys, time
        from meshbook.saving import runs
        with runs.only_run(sys.argv[1]):
            if not os.fork():  # the child tells its own number: it has begun
                print(os.getpid(), flush=True)
            time.sleep(60)
        """
    parent = subprocess.Popen([sys.executable, "-c", script, tmp_path], stdout=subprocess.PIPE)
    try:
        child = int(parent.stdout.readline())
        with pytest.raises(runs.FolderInUse), runs.only_run(tmp_path):
            pass
        parent.kill()
        parent.wait()
        with runs.only_run(tmp_path):
            pass
    finally:
        parent.kill()
        parent.stdout.close()
        os.kill(child, signal.SIGKILL)


def test_tensorboard_reads_each_step_once(tmp_path):
    for start, steps in ((1, 6), (4, 9)):  # the second process begins again at step 4
        metrics = runs.Metrics(tmp_path)
        metrics.restart(start)
        for step in range(start, steps):
            metrics.write(step, {"loss": 10 * start + step, "accuracy": 0.1})
        metrics.close()
    found = runs.read_metrics(tmp_path)
    assert found["loss"] == {1: 11, 2: 12, 3: 13, 4: 44, 5: 45, 6: 46, 7: 47, 8: 48}
    assert set(found) == {"loss", "accuracy"}
