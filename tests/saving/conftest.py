"""Checkpoints of a short run, made once for each file of tests."""
import shutil

import jax
import pytest
from soak import make_state, train


@pytest.fixture(scope="module")
def key():
    return jax.random.key(7)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with the checkpoints of steps 5 and 10."""
    folder = tmp_path_factory.mktemp("saved")
    train(folder, 10)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of that folder, to be damaged."""
    return shutil.copytree(saved, tmp_path / "run")


@pytest.fixture(scope="module")
def fresh():
    return make_state()
