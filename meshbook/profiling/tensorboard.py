"""TensorBoard with XProf over a folder of runs, for this machine alone.

`tensorboard` starts it and ends it with its block; the `Board` that it gives is asked over HTTP
what XProf's own pages ask. `python -m meshbook.profiling.tensorboard FOLDER` opens one until
Ctrl+C.
"""

import contextlib
import gzip
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from numbers import Real
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import ProxyHandler, build_opener

# XProf says in the log whatever it does; only its errors are of interest.
QUIET = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
DIRECT = build_opener(ProxyHandler({}))  # a proxy does not know this machine's own addresses


def complete_runs(folder: str | os.PathLike):
    """The names of the runs in a folder that have a profile, sorted.

    A run is a folder `NAME/plugins/profile/SESSION` with a file `*.xplane.pb` in it, as
    `meshbook.profiling.traces.trace` writes it. One that was never finished has no profile, or an
    empty one; it is not among them.
    """
    profiles = pathlib.Path(folder).glob("[!.]*/plugins/profile/*/*.xplane.pb")
    return sorted({path.parents[3].name for path in profiles if path.stat().st_size})


def command(folder: str | os.PathLike, *options: str):
    """The command that starts TensorBoard on the runs of a folder, on the loopback interface.

    Raises FileNotFoundError where the folder has no complete run.
    """
    if not complete_runs(folder):
        raise FileNotFoundError(f"expected runs in {folder}, found none yet: chapter 9 writes "
                                "some, and `meshbook.profiling.traces.trace` does for any step")
    return [sys.executable, "-m", "tensorboard.main", f"--logdir={folder}", "--host=127.0.0.1",
            "--load_fast=false", *options]  # one process, which ends as a whole


@contextlib.contextmanager
def tensorboard(folder: str | os.PathLike, patience: Real = 120):
    """Run TensorBoard on a folder of runs as long as a `with` block lasts; gives its Board.

    patience: how many seconds it may take to start. Raises FileNotFoundError where the folder has
    no complete run, RuntimeError with its own words where TensorBoard does not start.

    >>> with tensorboard("_build/profiles") as board:
    ...     board.runs()
    """
    # Appended to: otherwise reading the log here would move the place where the other one writes.
    with tempfile.TemporaryFile("a+") as log:
        process = subprocess.Popen(command(folder, "--port=0"), env=QUIET, stdin=subprocess.DEVNULL,
                                   stdout=log, stderr=log)
        try:
            yield Board(_address(process, log, time.monotonic() + patience))
        finally:
            _end(process)


def _address(process, log, deadline):
    """Where TensorBoard says that it is."""
    while process.poll() is None and time.monotonic() < deadline:
        log.seek(0)
        if found := re.search(r" at (http://127\.0\.0\.1:\d+/)", log.read()):
            return found[1]
        time.sleep(0.1)
    log.seek(0)
    raise RuntimeError("expected TensorBoard to start and say where; it said: "
                       f"{log.read()[-2000:].strip() or 'nothing'}")


def _end(process):
    """End a process, by force if it does not go."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Board:
    """A running TensorBoard: what XProf's pages would draw, as the text that they ask for."""

    def __init__(self, address: str):
        self.address = address

    def runs(self):
        """The runs that XProf lists, sorted: NAME/SESSION."""
        return sorted(json.loads(self.ask("runs")))

    def tools(self, run: str):
        """The tools that XProf offers for a run."""
        return json.loads(self.ask("run_tools", run=run))

    def programs(self, run: str):
        """The compiled programs in a run, each with its id: jit_train_step(4)."""
        return self.ask("module_list", run=run).split(",")

    def answer(self, run: str, tool: str, **options: str):
        """What one of XProf's tools answers to its page: JSON, for the graph viewer plain text.

        options: what else the page sends: `module_name`, one of `programs`, for graph_viewer and
        memory_viewer; `type="long_txt"` for the program's text from graph_viewer. Raises
        ValueError with XProf's words where it refuses.
        """
        host = json.loads(self.ask("hosts", run=run, tag=tool))[0]["hostname"]
        return self.ask("data", run=run, tag=tool, host=host, **options)

    def ask(self, route: str, **query: str):
        """The text at one of XProf's addresses; ValueError with its words where it refuses."""
        try:
            reply = DIRECT.open(f"{self.address}data/plugin/profile/{route}?{urlencode(query)}")
        except HTTPError as error:
            raise ValueError(f"XProf refuses {route} {query}: {_text(error)}") from None
        with reply:
            return _text(reply)


def _text(reply):
    """The body of a reply, which may be compressed."""
    body = reply.read()
    return (gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body).decode()


def main(folder: str | os.PathLike):
    """Open TensorBoard on a folder of runs, until Ctrl+C."""
    try:
        start = command(folder)
    except FileNotFoundError as error:
        sys.exit(f"No TensorBoard: {error}")
    print(f"The runs in {folder}: {', '.join(complete_runs(folder))}", flush=True)
    os.execve(start[0], start, QUIET)


if __name__ == "__main__":
    main(*sys.argv[1:])
