"""In a stranger's runtime: what is asked of pip, and what is left alone."""
import re
import tomllib
from pathlib import Path

import pytest

from meshbook.hosts import notebooks

ROOT = Path(__file__).resolve().parents[2]
COLAB = {"jax": "0.7.2", "jaxlib": "0.7.2", "flax": "0.11.2", "numpy": "2.1.3", "optax": "0.2.8",
         "torchvision": "0.24.0", "tiktoken": "0.14.0"}
PINS = [("flax", "0.12.12", "python_full_version >= '3.12'"), ("jax", "0.12.0", ""),
        ("jaxlib", "0.12.0", ""), ("numpy", "2.5.5", ""), ("tiktoken", "0.14.0", ""),
        ("pooch", "1.9.0", "")]


def test_on_a_cpu_only_what_must_be_ours_is_replaced_and_what_is_missing_added():
    assert notebooks.requirements(PINS, COLAB) == [
        "flax==0.12.12 ; python_full_version >= '3.12'", "jax==0.12.0", "jaxlib==0.12.0",
        "pooch==1.9.0"]


def test_what_one_page_needs_is_not_for_all():
    assert notebooks.requirements([("xprof", "2.24.2", "")], COLAB) == []


def test_what_is_there_is_not_added(monkeypatch):
    monkeypatch.setattr(notebooks, "install", lambda wanted: asked.append(wanted))
    asked = []
    monkeypatch.setattr(notebooks, "packages", lambda: {"xprof": "1.0"})
    notebooks.add("xprof")
    assert asked == []
    monkeypatch.setattr(notebooks, "packages", dict)
    notebooks.add("xprof")
    assert len(asked) == 1 and asked[0][0].startswith("xprof==")


def test_what_pip_refuses_is_an_error_with_its_name(capfd):
    with pytest.raises(RuntimeError, match="could not install .*no-such-package-of-ours==1"):
        notebooks.install(["--no-index", "no-such-package-of-ours==1"])


def test_on_a_gpu_the_plugins_go_with_jax_and_nvidias_libraries_stay():
    gpu = COLAB | {"jax-cuda12-plugin": "0.7.2", "jax-cuda12-pjrt": "0.7.2"}
    asked = notebooks.requirements(PINS, gpu)
    assert {"jax==0.12.0", "jax-cuda12-plugin==0.12.0", "jax-cuda12-pjrt==0.12.0"} <= set(asked)
    assert not [each for each in asked if "nvidia" in each or "[" in each]


def test_on_a_tpu_jax_brings_its_libtpu():
    assert "jax[tpu]==0.12.0" in notebooks.requirements(PINS, COLAB | {"libtpu": "0.0.21.1"})


@pytest.mark.parametrize("packages, kind", [
    ({}, "CPU"), ({"libtpu": "1"}, "TPU"), ({"jax-cuda13-plugin": "1"}, "CUDA 13")])
def test_the_kind_of_a_runtime_is_that_of_its_jax(packages, kind):
    assert notebooks.accelerator(packages) == kind


def test_what_changed_is_said():
    assert notebooks.changes({"jax": "0.7.2", "numpy": "2"}, {
        "jax": "0.12.0", "numpy": "2", "grain": "0.2"}) == "jax 0.7.2 → 0.12.0, new: grain 0.2"
    assert notebooks.changes({"jax": "1"}, {"jax": "1"}) == "nothing to do"


def test_the_pins_are_those_of_the_lock_and_of_all_that_chapters_need():
    lock = (ROOT / "requirements.lock").read_text("utf8")
    held = {(name, version, marker) for name, version, marker in
            re.findall(r"^([\w.-]+)==(\S+)(?: ; (.*?))? \\$", lock, re.MULTILINE)}
    pins = notebooks.pins()
    assert set(pins) <= held
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))["project"]
    extras = {name: packages for name, packages in project["optional-dependencies"].items()
              if name not in ("train", "ray")}  # of train.py and of a test: no chapter runs them
    needed = [*project["dependencies"], *sum(extras.values(), [])]
    names = {re.match(r"[\w-]+", each)[0] for each in needed}
    assert names | {"jaxlib"} == {name for name, _, _ in pins}
