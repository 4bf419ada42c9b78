"""helpers.py: devices, sizes, and code shown on a page."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import helpers

ROOT = Path(__file__).resolve().parents[2]


def run(code, **environ):
    """Run a few lines in a Python of their own, where JAX has not started."""
    clean = {name: value for name, value in os.environ.items()
             if not name.startswith(("MESHBOOK_", "JAX_", "XLA_"))}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
        env={**clean, "PYTHONPATH": str(ROOT), **environ},
    )


def test_start_simulates_devices_and_prints_one_line():
    done = run("from helpers import start\nprint(len(start()))")
    summary, count = done.stdout.splitlines()
    assert count == "8"
    assert "8 simulated CPU devices" in summary
    assert "size laptop" in summary and "data embedded" in summary
    assert done.stderr == ""


def test_start_twice_is_the_same_as_once():
    done = run("from helpers import start\nassert start() == start(4)")
    assert done.returncode == 0, done.stderr


def test_start_respects_devices_forced_by_a_flag():
    done = run("from helpers import start\nprint(len(start()))",
               XLA_FLAGS="--xla_force_host_platform_device_count=8")
    assert done.stdout.splitlines()[-1] == "8", done.stderr


def test_start_after_jax_has_started_says_what_to_do():
    done = run("import jax; jax.devices()\nfrom helpers import start\nstart()")
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1] == (
        "RuntimeError: start(8) needs 8 devices, but JAX already runs with 1 (cpu): "
        "restart the kernel and call start() before any other JAX operation"
    )


def test_a_quick_start_optimises_less_and_keeps_what_was_asked_for():
    given = "--xla_cpu_parallel_codegen_split_count=7"
    code = ("import os, jax\nfrom helpers import start\n{}\n"
            "print(jax.config.read('jax_disable_most_optimizations'), os.environ['XLA_FLAGS'])")
    plain, flags = run(code.format("start()")).stdout.splitlines()[-1].split(" ", 1)
    assert plain == "False" and "split_count" not in flags
    quick, flags = run(code.format("start(quick=True)")).stdout.splitlines()[-1].split(" ", 1)
    assert quick == "True" and flags.count("split_count=1") == 1
    flags = run(code.format("start(quick=True)"), XLA_FLAGS=given).stdout
    assert given in flags and flags.count("split_count") == 1
    assert "False" in run(code.format("start(quick=True); start()")).stdout
    both = run(code.format(
        "from meshbook.hlo.options import optimised\nstart(quick=True)\nwith optimised():\n"
        "    print(jax.config.read('jax_disable_most_optimizations'))")).stdout
    assert [line.split()[0] for line in both.splitlines()[-2:]] == ["False", "True"]


def test_start_keeps_programs_in_the_repository_unless_jax_has_a_folder_for_them(tmp_path):
    code = "import jax\nfrom helpers import start\nstart(1)\nprint({})"
    code = code.format("jax.config.jax_compilation_cache_dir")
    assert run(code).stdout.splitlines()[-1] == str(ROOT / "_build" / "compiled")
    given = run(code, JAX_COMPILATION_CACHE_DIR=str(tmp_path)).stdout
    assert given.splitlines()[-1] == str(tmp_path)


def test_an_option_of_kept_programs_that_the_environment_has_stays():
    option = "jax_persistent_cache_min_compile_time_secs"
    code = f"import jax\nfrom helpers import start\nstart(1)\nprint(jax.config.{option})"
    assert run(code, **{option.upper(): "0.2"}).stdout.splitlines()[-1] == "0.2"


def test_start_names_the_data_folder_but_not_where_it_is():
    done = run("from helpers import start\nstart(1)", MESHBOOK_DATA="/somewhere/cifar/")
    assert "data cifar" in done.stdout and "somewhere" not in done.stdout


@pytest.mark.parametrize("size", helpers.SIZES)
def test_sized_picks_by_the_environment(monkeypatch, size):
    monkeypatch.setenv("MESHBOOK_SIZE", size)
    assert helpers.sized("full", laptop="laptop", test="test") == size


def test_sized_is_laptop_on_cpu(monkeypatch):
    monkeypatch.delenv("MESHBOOK_SIZE", raising=False)
    assert helpers.sized(3, laptop=2, test=1) == 2


def test_an_unknown_size_is_refused(monkeypatch):
    monkeypatch.setenv("MESHBOOK_SIZE", "huge")
    with pytest.raises(ValueError, match="'huge'; expected one of full, laptop, test"):
        helpers.sized(3, laptop=2, test=1)
    with pytest.raises(ValueError, match="MESHBOOK_SIZE"):
        helpers.start()


def before(x):
    return x + 1


def after(x):
    return x + 2


def test_show_is_a_fence_of_the_source():
    shown = helpers.show(before)
    assert shown._repr_markdown_() == "```python\ndef before(x):\n    return x + 1\n```"
    assert repr(shown) == "def before(x):\n    return x + 1"


def test_show_of_a_method_begins_at_the_margin():
    assert repr(helpers.show(helpers.Bar.__repr__)).startswith("def __repr__(self):\n    full")


def test_show_against_is_a_diff():
    lines = helpers.show(after, against=before)._repr_markdown_().splitlines()
    assert lines[0] == "```diff" and lines[-1] == "```"
    assert "-    return x + 1" in lines and "+    return x + 2" in lines


def test_refused_is_the_message_of_the_error():
    assert helpers.refused(int, "x").startswith("ValueError: invalid literal")
    with pytest.raises(AssertionError, match="int was expected to refuse"):
        helpers.refused(int, "1")


def test_refused_for_another_reason_is_a_crash():
    assert helpers.refused(int, "x", by=ValueError).startswith("ValueError: invalid literal")
    with pytest.raises(TypeError):
        helpers.refused(int, None, by=ValueError)


def test_helpers_stay_thin():
    assert len((ROOT / "helpers.py").read_text().splitlines()) <= 200


def test_the_progress_bar_fills_up_with_the_steps(capsys):
    on_step = helpers.progress(7)
    for _ in range(7):
        on_step(None, None)
    first, *between, last = capsys.readouterr().out.splitlines()
    assert (first, last) == ("░" * 60, "█" * 60)
    assert [line.count("█") for line in between] == [60 * step // 7 for step in range(1, 7)]


def test_a_fold_is_a_fence_below_its_summary():
    fold = helpers.folded("a < b, 2 lines", "x = 1\ny = 2\n", "python")
    assert fold._repr_markdown_() == (
        "<details><summary>a &lt; b, 2 lines</summary>\n\n"
        "```python\nx = 1\ny = 2\n```\n\n</details>")
    assert repr(fold) == "x = 1\ny = 2"


def test_profiles_go_to_the_repository_wherever_a_notebook_runs(tmp_path):
    done = run(f"import os; os.chdir({str(tmp_path)!r})\n"
               "from helpers import profiles\nprint(profiles())")
    assert done.stdout.strip() == str(ROOT / "_build" / "profiles")


def test_without_the_repository_profiles_go_to_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(helpers, "__file__", str(tmp_path / "site-packages" / "helpers.py"))
    monkeypatch.chdir(tmp_path)
    assert helpers.profiles() == tmp_path / "_build" / "profiles"
