"""The package alone, as a stranger's project has it: what a wheel holds, and the proofs in a test."""
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
THEIRS = '''
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from meshbook.proofs import assert_sharded


def test_my_weights_are_split():
    mesh = jax.make_mesh((4, 2), ("batch", "model"))
    w = jax.device_put(np.ones((8, 8)), NamedSharding(mesh, P(None, {axis})))
    assert_sharded({{"w": w}}, P(None, "model"))
'''


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with what the wheel holds, and nothing else of this repository."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    tracked = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True)
    if tracked.returncode:
        pytest.skip("this is no checkout of git: its files are not known")
    for name in tracked.stdout.decode().split("\0"):
        if name and (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w",
         folder, source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = folder.glob("meshbook-*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def run(installed, folder, *command):
    """Run Python in a folder, with the wheel's content before everything else."""
    environment = os.environ | {"PYTHONPATH": str(installed), "JAX_NUM_CPU_DEVICES": "8"}
    return subprocess.run([sys.executable, "-P", *command], cwd=folder, text=True,
                          capture_output=True, env=environment)


def test_modules_and_records_are_there_and_nothing_of_the_book(installed):
    there = {path.relative_to(installed).parts[0] for path in installed.iterdir()}
    assert {each for each in there if not each.endswith(".dist-info")} == {"meshbook", "helpers.py"}
    modules = lambda root: {path.relative_to(root) for path in root.glob("meshbook/**/*.py")}
    assert modules(installed) == modules(ROOT)
    assert (installed / "meshbook" / "hosts" / "pins.txt").exists()


def test_the_pages_name_what_an_installation_brings(installed):
    (metadata,) = installed.glob("meshbook-*.dist-info/METADATA")
    lines = re.findall(r"^Requires-Dist: ([\w-]+)([^\n]*)", metadata.read_text("utf8"), re.M)
    needed = {name for name, rest in lines if "extra ==" not in rest}
    (newest,) = re.findall(r"setuptools>=(\d+)", (ROOT / "pyproject.toml").read_text("utf8"))
    for page in "README.md", "book/api.md", "book/start-here.md":
        text = (ROOT / page).read_text("utf8")
        _, found, rest = text.partition("pip install git+https://github.com/mesh-book/mesh-book")
        assert found and all(re.search(rf"\b{name}\b", rest[:400]) for name in needed), page
        assert page.endswith("start-here.md") or f"setuptools {newest} or newer" in rest[:700]


def test_recorded_results_are_read_from_the_package(installed, tmp_path):
    done = run(installed, tmp_path, "-c", "import json; from meshbook.planning import topologies;"
               "print(json.dumps([str(topologies.RESULTS), len(topologies.recorded())]))")
    assert done.returncode == 0, done.stderr
    folder, count = json.loads(done.stdout)
    recorded = json.loads((ROOT / "results" / "tpu.json").read_text())["cells"]
    assert Path(folder).is_relative_to(installed) and count == len(recorded)


@pytest.mark.parametrize("axis, passes", [('"model"', True), ("None", False)])
def test_a_proof_works_in_the_tests_of_a_stranger(installed, tmp_path, axis, passes):
    (tmp_path / "test_theirs.py").write_text(THEIRS.format(axis=axis))
    done = run(installed, tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert (done.returncode == 0) == passes, done.stdout + done.stderr
    assert passes or "leaf w, device 0" in done.stdout
