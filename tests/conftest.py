"""Every test runs on eight simulated devices, chosen before JAX starts; some in one browser."""
import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(scope="module")
def browser():
    """Chromium, for the tests of one file."""
    from browsers import CHROMIUM  # neither is there where only programs for TPUs are compiled
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()
