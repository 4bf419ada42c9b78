"""Training runs of two processes of which one is killed, again and again, and no loss changes."""
import json
import pathlib
import signal
import sys

from soak import soak_many

from meshbook.hosts import clusters
from meshbook.saving import progress, runs

SUPPORT = pathlib.Path(__file__).parents[1] / "support"


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
