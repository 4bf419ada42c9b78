"""Every test runs on eight simulated devices, chosen before JAX starts; some in one browser.

The types of the package's arguments are checked whenever a test calls it.
"""
from pathlib import Path

import jax
import pytest

from meshbook.hlo.options import keep_programs
from meshbook.sharding import make_mesh

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
keep_programs(Path(__file__).resolve().parents[1] / "_build" / "compiled")


@pytest.fixture(scope="module")
def browser():
    """Chromium, for the tests of one file. It reaches 127.0.0.1 and nothing else."""
    from browsers import CHROMIUM  # neither is there where only programs for TPUs are compiled
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"])
        yield browser
        browser.close()


@pytest.fixture(autouse=True, scope="module")
def forget():
    """What JAX traced for one file of tests is of no use to the next, and fills the memory."""
    yield
    jax.clear_caches()


@pytest.fixture
def one_device():
    """A mesh of one device around a test, for models that are called by themselves."""
    with jax.set_mesh(make_mesh((1, 1))):
        yield
