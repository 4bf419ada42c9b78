"""TensorBoard on the book's own runs: found by name, read over HTTP and in a browser, and ended."""

import collections
import functools
import gzip
import io
import json
import re
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from browsers import CHROMIUM
from jax.sharding import NamedSharding, PartitionSpec as P
from screenshots import choose, find, listed, open_profiles, open_trace

from meshbook.profiling import tensorboard as module
from meshbook.profiling.tensorboard import complete_runs, tensorboard
from meshbook.profiling.traces import read_trace, trace
from meshbook.sharding import make_mesh

NAMES = ["mesh_4_2_batch_64", "mesh_8_1_batch_64"]
STEPS = 3
in_a_browser = pytest.mark.skipif(not CHROMIUM, reason="no chromium on the PATH")


def step_on(mesh):
    """Two layers, the second one's sum over 'model' made by hand, on this mesh."""
    put = lambda shape, *spec: jax.device_put(
        np.ones(shape, np.float32), NamedSharding(mesh, P(*spec)))
    arrays = put((64, 128), "batch"), put((128, 256), None, "model"), put((256, 128), "model")

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, out_specs=P("batch"),
                       in_specs=(P("batch"), P(None, "model"), P("model")))
    def two_layers(x, w_in, w_out):
        return jax.lax.psum(jnp.tanh(x @ w_in) @ w_out, "model")

    return lambda number: two_layers(*arrays)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two complete runs, and three that are not."""
    folder = tmp_path_factory.mktemp("profiles")
    for name, shape in zip(NAMES, ((4, 2), (8, 1)), strict=True):
        trace(step_on(make_mesh(shape)), name, 1, STEPS, folder)
    for name in ("nothing_in_it", ".still_recording"):
        (folder / name / "plugins" / "profile" / "2026_01_01_00_00_00").mkdir(parents=True)
    unwritten = folder / "unwritten" / "plugins" / "profile" / "2026_01_01_00_00_00"
    unwritten.mkdir(parents=True)
    (unwritten / "host.xplane.pb").touch()
    return folder


@pytest.fixture(scope="module")
def board(folder):
    with tensorboard(folder) as board:
        yield board


def session(board, name):
    """What XProf calls the run of this name."""
    (found,) = [each for each in board.runs() if each.startswith(f"{name}/")]
    return found


def children():
    return psutil.Process().children()


def test_only_complete_runs_are_named(folder, tmp_path):
    assert complete_runs(folder) == NAMES
    assert complete_runs(tmp_path) == complete_runs(tmp_path / "nowhere") == []


def test_xprof_lists_the_runs_by_name_and_offers_no_tool_for_an_unfinished_one(board):
    for name in NAMES:
        assert {"trace_viewer@", "memory_viewer", "graph_viewer"} <= set(
            board.tools(session(board, name)))
    assert board.tools(session(board, "nothing_in_it")) == []


@pytest.mark.parametrize("name", NAMES)
def test_the_trace_viewer_has_the_events_that_read_trace_has(board, folder, name):
    answer = json.loads(board.answer(session(board, name), "trace_viewer@"))
    theirs, ours = collections.defaultdict(list), collections.defaultdict(list)
    for record in read_trace(folder / name).records:
        ours[record.operation].append(record.duration * 1e3)
    for event in answer["traceEvents"]:
        if event["ph"] == "X" and event["name"] in ours:
            theirs[event["name"]].append(event["dur"])
    assert any(len(each) == 8 * STEPS for each in ours.values())
    assert {name: pytest.approx(sorted(each), abs=1e-3) for name, each in ours.items()} == {
        name: sorted(each) for name, each in theirs.items()}


@pytest.mark.parametrize("packed", [gzip.compress, bytes])
def test_a_reply_may_be_compressed_or_not(packed):
    words = "a plain × text, " * 20
    assert module._text(io.BytesIO(packed(words.encode()))) == words


def test_the_graph_viewer_has_the_program_that_ran(board, folder):
    run = session(board, NAMES[0])
    (program,) = [each for each in board.programs(run) if each.startswith("jit_two_layers(")]
    text = board.answer(run, "graph_viewer", module_name=program, type="long_txt")
    operations = read_trace(folder / NAMES[0]).by_operation()
    assert operations and all(f"%{operation} =" in text for operation in operations)


def test_what_xprof_refuses_is_an_error_in_its_words(board):
    with pytest.raises(ValueError, match=r"XProf refuses data .*graph_viewer.*: .*jit_none\(99\)"):
        board.answer(session(board, NAMES[0]), "graph_viewer", module_name="jit_none(99)")


@in_a_browser
def test_the_runs_are_found_by_name_in_the_browser_and_a_trace_is_read(board, folder, browser):
    tab, plugin = open_profiles(browser, board.address)
    shown = listed(plugin, 0).all_inner_texts()
    assert set(NAMES) <= {text.strip().split("/")[0] for text in shown}
    plugin.locator("mat-option").first.click()
    choose(plugin, 0, NAMES[1])
    viewer = open_trace(plugin, NAMES[0])
    ours = read_trace(folder / NAMES[0])
    operation = next(each for each in ours.operations() if each.kind == "collective").operation
    details = find(viewer, operation)
    assert re.search(rf"Title\s+{re.escape(operation)}\s", details)
    nanoseconds = int(re.search(r"Wall Duration\s+([\d,]+) ns", details)[1].replace(",", ""))
    assert nanoseconds in {round(each.duration * 1e6) for each in ours.records
                           if each.operation == operation}
    tab.close()


def test_it_listens_on_the_loopback_interface_alone_and_ends_with_the_block(folder):
    before = children()
    with pytest.raises(KeyError, match="of the block"), tensorboard(folder) as board:
        (process,) = set(children()) - set(before)
        listening = [each.laddr for each in process.net_connections("inet")
                     if each.status == psutil.CONN_LISTEN]
        assert [f"http://{each.ip}:{each.port}/" for each in listening] == [board.address]
        assert board.address.startswith("http://127.0.0.1:") and process.children() == []
        raise KeyError("of the block")
    assert not process.is_running() and children() == before


def test_a_folder_without_a_run_is_refused_before_anything_starts(folder, tmp_path):
    before = children()
    with (pytest.raises(FileNotFoundError, match=f"expected runs in {tmp_path}, found none yet"),
          tensorboard(tmp_path)):
        pass
    assert children() == before


@pytest.mark.parametrize("program, said", [
    ("import sys; sys.exit('the port is taken')", "it said: the port is taken"),
    ("import time; time.sleep(600)", "it said: nothing")])
def test_one_that_does_not_start_is_reported_and_ended(folder, monkeypatch, program, said):
    monkeypatch.setattr(module, "command", lambda *_: [sys.executable, "-c", program])
    before = children()
    with pytest.raises(RuntimeError, match=said), tensorboard(folder, patience=3):
        pass
    assert children() == before


def on_the_command_line(folder):
    return [sys.executable, "-m", "meshbook.profiling.tensorboard", str(folder)]


def test_the_command_says_in_one_line_that_there_is_no_run(tmp_path):
    done = subprocess.run(on_the_command_line(tmp_path), capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert re.fullmatch(r"No TensorBoard: expected runs in .*, found none yet: .*\n", done.stderr)


# In the background a shell's commands do not hear Ctrl+C, and hand that on to theirs.
HEARING = """import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])"""


def test_the_command_names_the_runs_and_serves_until_it_is_interrupted(folder, tmp_path):
    said = tmp_path / "said"
    with said.open("w") as log:
        command = [sys.executable, "-c", HEARING, *map(str, on_the_command_line(folder))]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_for(said, process, " at http://127.0.0.1:")
            assert f"The runs in {folder}: {', '.join(NAMES)}" in said.read_text()
            process.send_signal(signal.SIGINT)
            process.wait(20)
        finally:
            process.kill()
            process.wait()


def wait_for(file, process, text):
    """Wait until a process has written a text into a file."""
    end = time.monotonic() + 120
    while text not in file.read_text():
        assert process.poll() is None and time.monotonic() < end, file.read_text()
        time.sleep(0.1)
