"""train.py in several processes, as a reader starts it: killed, resumed, and refused."""
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import train

from meshbook.hosts import clusters
from meshbook.saving import progress
from meshbook.saving.runs import read_metrics

ROOT = pathlib.Path(__file__).parents[2]
SMALL = ("--steps 12 --warmup 2 --save-every 4 --validate-every 6 --validation-batches 2 "
         "--batch 8 --sample 0 --compare-every 5 --model.embed 16 --model.hidden 32 "
         "--model.heads 4 --model.layers 2 --model.tokens 16 ")


def command(folder, count, flags="", devices=2):
    """The command that a reader types; flags may begin with a preset."""
    preset, words = "laptop", flags.split()
    if words and words[0] in train.PRESETS:
        preset, *words = words
    return [sys.executable, "-m", "meshbook.hosts.clusters", str(count), "--devices", str(devices),
            "--", sys.executable, "train.py", preset, *SMALL.split(), *words, "--out", str(folder)]


def run(*given):
    """(exit code, what was printed) of that command."""
    done = subprocess.run(command(*given), cwd=ROOT, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


def losses(folder):
    return read_metrics(folder / "metrics")["loss"]


def pids_of(parent):
    """The processes that a process has started, in their order."""
    children = pathlib.Path(f"/proc/{parent}/task/{parent}/children")
    return [int(pid) for pid in children.read_text().split()]


def done_steps(folder):
    known = (folder / "progress").exists()
    return sum(len(each.steps) for each in progress.read_progress(folder)) if known else 0


@pytest.mark.skipif(not pathlib.Path("/proc/self/task").exists(), reason="needs Linux's /proc")
def test_four_processes_are_killed_go_on_and_end_like_a_run_that_was_not(tmp_path):
    code, said = run(tmp_path, 4, "--run whole --sample 4")
    assert code == 0 and "step 12: By the sea" in said and "goodput" in said, said
    assert said.count("to go on: --run whole") == 1  # one process speaks for all
    with subprocess.Popen(command(tmp_path, 4, "--run killed"), cwd=ROOT, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as launcher:
        while done_steps(tmp_path / "killed") < 6:
            assert launcher.poll() is None, launcher.stdout.read()
            time.sleep(0.05)
        os.kill(pids_of(launcher.pid)[2], signal.SIGKILL)
        said, _ = launcher.communicate(timeout=300)
    assert launcher.returncode == 0, said
    assert "process 2 was ended by SIGKILL; processes 0, 1 and 3 ended with it; all are" in said
    found, whole = losses(tmp_path / "killed"), losses(tmp_path / "whole")
    assert list(whole) == list(range(1, 13)) and found == whole
    lives = progress.read_progress(tmp_path / "killed")
    assert len(lives) == 2 and lives[1].came_from in (4, 8)


@pytest.mark.parametrize("count, flags", [
    (4, "--mesh data=2,model=4 --rules tensor_parallel"),  # two processes hold the same rows
    # large enough for sums inside of a device that are split over threads
    (2, "--mesh data=4,model=2 --rules tensor_parallel --model.tokens 128 --model.embed 32 "
        "--model.hidden 64 --batch 32"),
    (2, "--mesh data=2,stage=2,model=2 --rules fully_sharded --microbatches 4 --sample 4"),
    (2, "jaxformer-laptop --model.latent 8 --model.rotary 4 --model.layers 4 --batch 16 "
        "--mesh expert=2,stage=2,model=2 --microbatches 2 --schedule gpipe"),
    (2, "--mesh data=2,context=4"),
])
def test_processes_over_any_mesh_train_as_one_process_does(count, flags, tmp_path):
    for name, each in (("many", count), ("one", 1)):
        code, said = run(tmp_path, each, f"{flags} --run {name}", 8 // each)
        assert code == 0, said
    assert losses(tmp_path / "many") == losses(tmp_path / "one")


def test_a_fresh_process_simulates_the_devices_that_its_mesh_needs(tmp_path):
    """`python train.py` alone: nothing may ask JAX for its devices before their number is known."""
    words = [*SMALL.split(), "--mesh", "data=8", "--out", str(tmp_path), "--run", "run"]
    done = subprocess.run([sys.executable, "train.py", "laptop", *words], cwd=ROOT,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "8 simulated CPU devices" in done.stdout, done.stderr
    assert len(losses(tmp_path / "run")) == 12


@pytest.mark.parametrize("flags, words", [
    ("--mesh data=16", "start(16) needs 16 devices, but JAX already runs with 4 (cpu): give each "),
    ("--mesh data=2", "'model': 1} has 2 devices, and 2 processes have 4: expected a mesh of all"),
    ("--mesh data=4 --batch 7", "batch_size 7 does not divide among the processes"),
])
def test_what_cannot_be_is_one_sentence(flags, words, tmp_path):
    code, said = run(tmp_path, 2, flags)
    assert code == 1 and words in said and "Traceback" not in said, said


def test_processes_of_other_settings_are_named(tmp_path):
    script = tmp_path / "start.sh"
    script.write_text(f"exec {sys.executable} {ROOT / 'train.py'} laptop {SMALL} --out {tmp_path} "
                      "--batch $((8 + 4 * MESHBOOK_PROCESS))\n")
    said = []
    ended = clusters.launch(["sh", str(script)], 2, 2, {"PYTHONPATH": str(ROOT)}, said.append)
    assert set(ended.codes) == {1}
    assert any("ValueError: process 1 has another configuration than process 0: batch: expected 8, "
               "found 12" in line for line in said), said
