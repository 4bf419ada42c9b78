"""Run the notebooks where the repository is not, as in Colab: tests/support/stranger.py [NAMES].

A bare environment gets what Colab has (tests/support/colab.txt), a server on loopback gives this
commit as GitHub would, and each notebook runs in an empty folder, at size test. Its first cell
installs the book. Prints one line a notebook. PYTHON chooses the interpreter, as for make.
"""
import functools
import http.server
import itertools
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
UV = Path(sys.executable).with_name("uv")
PYTHON = os.environ.get("PYTHON", "python3.13")
EXECUTE = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], 4)
try:
    NotebookClient(notebook, timeout=900, kernel_name="python3").execute()
finally:
    for cell in notebook.cells[1:3]:
        print(*(each.get("text", "") for each in cell.get("outputs", [])), sep="", end="")
"""


def serve(folder):
    """The address of a server of a folder, on loopback, for as long as this process lives."""
    quiet = type("Quiet", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(quiet, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def environment(folder):
    """The interpreter of a new environment with what Colab has."""
    python = folder / "bin" / "python"
    torch = [line.split(" ")[0] for line in (ROOT / "requirements.lock").read_text().splitlines()
             if line.startswith(("torch==", "torchvision=="))]
    subprocess.run([UV, "venv", "-q", "--seed", "--python", PYTHON, folder], check=True)
    subprocess.run([UV, "pip", "install", "-q", "--python", python,
                    "-r", ROOT / "tests" / "support" / "colab.txt", *torch], check=True)
    return python


def run(name, python, address, folder, devices):
    """(seconds, first lines) of a notebook in an empty folder. RuntimeError where it fails."""
    there = (ROOT / "notebooks" / f"{name}.ipynb").read_text("utf8")
    repository = yaml.safe_load((ROOT / "_config.yml").read_text())["repository"]
    here = there.replace(f"{repository['url']}/archive", address)
    assert here != there, f"{name} does not say where to install the book from"
    folder.mkdir(parents=True)
    (folder / f"{name}.ipynb").write_text(here, "utf8")
    flags = f"--xla_force_host_platform_device_count={devices}" if devices else ""
    clean = {key: value for key, value in os.environ.items()
             if not key.startswith(("MESHBOOK", "PYTHON", "JAX", "XLA"))}
    began = time.perf_counter()
    done = subprocess.run([python, "-c", EXECUTE, f"{name}.ipynb"], cwd=folder, text=True,
                          capture_output=True, env=clean | {"MESHBOOK_SIZE": "test"} | (
                              {"XLA_FLAGS": flags} if devices else {}))
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    return time.perf_counter() - began, done.stdout


def main(names):
    """Run these notebooks, or all, with what devices there are, with one and with four."""
    names = names or sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
    with tempfile.TemporaryDirectory() as work:
        work = Path(work)
        (work / "site").mkdir()
        subprocess.run(["git", "-C", ROOT, "archive", "--format=zip", "--prefix=book/",
                        "-o", work / "site" / "main.zip", "HEAD"], check=True)
        address, python = serve(work / "site"), environment(work / "environment")
        for devices, name in itertools.product((None, 1, 4), names):
            seconds, said = run(name, python, address, work / f"{name}-{devices}", devices)
            print(f"{name:28} {devices or 'all'} devices {seconds:6.1f} s", flush=True)
            print("".join(f"    {line}\n" for line in said.splitlines()), end="", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
