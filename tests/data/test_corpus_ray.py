"""A corpus by Ray, workers killed: the bytes of one process. Ray runs in a network of its own."""
import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from corpora import ENCODING, hashes, small_plan, write_inputs

from meshbook.data.corpus import build_corpus

ROOT = Path(__file__).resolve().parents[2]
OWN = ROOT / ".venv-ray" / "bin" / "python"
PYTHON = sys.executable if find_spec("ray") else str(OWN) if OWN.exists() else None
ALONE = ["unshare", "--user", "--map-root-user", "--net"]


def has_namespaces():
    """Whether this machine lets its users have networks of their own."""
    return bool(shutil.which("unshare")) and not subprocess.run(
        [*ALONE, "true"], capture_output=True).returncode


@pytest.mark.skipif(PYTHON is None, reason="Ray is not installed: make ray")
@pytest.mark.skipif(not has_namespaces(), reason="no network namespaces, and Ray listens on every "
                                                 "address")
def test_ray_makes_the_same_bytes_while_its_workers_are_killed(tmp_path):
    inputs = write_inputs(tmp_path / "inputs")
    build_corpus(small_plan(inputs), tmp_path / "here", ENCODING)
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    done = subprocess.run(
        [*ALONE, PYTHON, ROOT / "tests" / "support" / "corpus_by_ray.py", inputs,
         tmp_path / "there"], capture_output=True, text=True, timeout=500,
        env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["machines"] == 1 and said["killed"] >= 1
    assert hashes(tmp_path / "there") == hashes(tmp_path / "here")
