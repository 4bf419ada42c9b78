"""A run of several processes on this machine: how they start, what ends them, and what restarts.

    python -m meshbook.hosts.clusters 4 -- python train.py laptop --mesh data=8

starts four processes on this machine with two simulated devices each. On a cluster the processes
are started by what the cluster has for it (`launch/`). In both cases a script calls
places.connect().
"""
from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from meshbook.hosts.places import ADDRESS, COUNT, INDEX, STARTED
from meshbook.hosts.roll_call import processes as named

NOISE = re.compile(  # that Gloo, by which simulated devices of several processes talk, prints
    r"\[Gloo\] Rank \d+ is connected to \d+ peer ranks. Expected number of connected peer ranks "
    r"is : \d+")
GRACE = 2.0  # seconds in which the others may end by themselves when one has died


@dataclass(frozen=True)
class Ended:
    """How the processes ended: the code of each (0, or minus a signal's number); who was first.

    first: the process that died and for which the others were ended, or None.
    """

    codes: list[int]
    first: int | None = None

    @property
    def well(self):
        return not any(self.codes)

    def __str__(self):
        if self.well:
            return "all processes have ended well"
        others = named([i for i in range(len(self.codes)) if i != self.first]) if len(
            self.codes) > 1 else "no other"
        return f"process {self.first} {died_of(self.codes[self.first])}; {others} ended with it"


def died_of(code: int):
    """What a process died of, in words."""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with {code}"


class Cluster:
    """Processes of one run on this machine, while they run: `processes` are subprocess.Popen."""

    def __init__(self, processes: Sequence[subprocess.Popen], readers: Sequence[threading.Thread]):
        self.processes, self.readers = processes, readers

    def wait(self):
        """Return how they Ended, once all have. When one dies the others are ended, too.

        They could not go on: a collective waits for every process, the dead one too.
        """
        while not self.dead() and any(each.poll() is None for each in self.processes):
            time.sleep(0.02)
        first = self.died_first() if self.dead() else None
        for each in self.processes:
            if first is not None and each.poll() is None:
                each.kill()
            each.wait()
        for reader in self.readers:
            reader.join()
        return Ended([each.returncode for each in self.processes], first)

    def dead(self):
        """Which of them have died so far."""
        return [i for i, each in enumerate(self.processes) if each.poll()]

    def died_first(self):
        """Whose death it was: where others notice within moments, that of a signal."""
        dead = self.dead()
        end = time.monotonic() + GRACE
        while time.monotonic() < end and any(each.poll() is None for each in self.processes):
            time.sleep(0.02)
        # SIGABRT is how JAX ends a process that has heard of another one's death
        struck = [i for i, each in enumerate(self.processes)
                  if (each.poll() or 0) < 0 and each.poll() != -signal.SIGABRT]
        return (struck or dead)[0]

    def terminate(self):
        """Ask every process to save and end."""
        for each in self.processes:
            if each.poll() is None:
                each.terminate()


@contextlib.contextmanager
def started(command: Sequence[str], processes: int, devices: int = 1,
            environment: Mapping[str, str] | None = None, out: Callable = print):
    """A Cluster of `processes` processes on this machine; none of them outlives the block.

    Each has so many simulated `devices` and its place in its environment. XLA splits a large sum
    of one device over the threads of its process, one for each device or core; NPROC gives all
    processes, however many there are, as many threads as there are devices, so that the same mesh
    makes the same bits. out is given each line that one prints, with its number in front. Raises
    ValueError for a count below 1.
    """
    if processes < 1 or devices < 1:
        raise ValueError("expected at least 1 process with at least 1 device each, found "
                         f"{processes} with {devices}")
    address = f"127.0.0.1:{free_port()}"
    threads = str(max(processes * devices, os.cpu_count()))
    base = {"NPROC": threads, **os.environ, STARTED: time.strftime("%Y%m%d-%H%M%S"),
            **(environment or {}),
            "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "PYTHONUNBUFFERED": "1",
            ADDRESS: address, COUNT: str(processes)}
    running = [subprocess.Popen(  # in a session of its own: Ctrl-C is for the launcher
        command, env=base | {INDEX: str(index)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", start_new_session=True) for index in range(processes)]
    readers = [threading.Thread(target=hand_on, args=(each.stdout, index, out))
               for index, each in enumerate(running)]
    for reader in readers:
        reader.start()
    try:
        yield Cluster(running, readers)
    finally:
        for each in running:
            each.kill()
            each.wait()
        for reader in readers:
            reader.join()


def hand_on(lines: io.TextIOBase, index: int, out: Callable):
    """Give every line of a process to out(), as it comes; not empty ones and what Gloo prints."""
    with lines:
        for line in lines:
            if rest := NOISE.sub("", line).rstrip():
                out(f"[{index}] {rest}")


def free_port():
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        return any_port.getsockname()[1]


def launch(command: Sequence[str], processes: int, devices: int = 1,
           environment: Mapping[str, str] | None = None, out: Callable = print):
    """Run the command as so many processes: see started(). Returns how they Ended."""
    with started(command, processes, devices, environment, out) as cluster:
        return cluster.wait()


def supervise(command: Sequence[str], processes: int, devices: int = 1, restarts: int = 3,
              environment: Mapping[str, str] | None = None, out: Callable = print):
    """The same, started again when one was ended by a signal: a list of Ended, one per life.

    The command has to go on by itself at its newest checkpoint, as train.py does. At most
    `restarts` times. A process that fails with an error would fail again: that ends it all.
    SIGTERM and Ctrl-C are handed on to every process, so that the run saves, and nothing starts
    again.
    """
    environment = {STARTED: time.strftime("%Y%m%d-%H%M%S"), **(environment or {})}
    lives, running, asked = [], [], []
    with handed_on(running, asked):
        while True:
            with started(command, processes, devices, environment, out) as cluster:
                running[:] = [cluster]
                if asked:  # while they were being started
                    cluster.terminate()
                lives.append(cluster.wait())
            if lives[-1].well or asked:
                return lives
            struck = lives[-1].codes[lives[-1].first] < 0
            again = struck and len(lives) <= restarts
            out(f"{lives[-1]}; " + (
                f"all are started again ({len(lives)} of {restarts})" if again else
                f"{restarts} restarts have been made" if struck else
                "an error would come again, so nothing is restarted"))
            if not again:
                return lives


@contextlib.contextmanager
def handed_on(running: list[Cluster], asked: list):
    """SIGTERM and SIGINT go to every process of what is running, and are noted in `asked`."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python hears signals in its main thread only
        return

    def hand(number, _):
        asked.append(number)
        for cluster in running:
            cluster.terminate()

    before = {each: signal.signal(each, hand) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for each, old in before.items():
            signal.signal(each, old or signal.SIG_DFL)


def main(arguments: Sequence[str]):
    """The command line; returns an exit code."""
    parser = argparse.ArgumentParser(
        "python -m meshbook.hosts.clusters", usage="%(prog)s [options] "
        "PROCESSES -- COMMAND", description="Start a command as several processes "
        "on this machine, with simulated devices, and start it again when one is killed.")
    parser.add_argument("processes", type=int)
    parser.add_argument("--devices", type=int, default=2, help="of each process (default: 2)")
    parser.add_argument("--restarts", type=int, default=3, help="at most (default: 3)")
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    given, command = parser.parse_args(arguments[:cut]), arguments[cut + 1:]
    if not command or shutil.which(command[0]) is None:
        parser.error("expected a command after --, such as: 4 -- python train.py laptop --mesh "
                     f"data=8; found {command[0] if command else 'none'}")
    lives = supervise(command, given.processes, given.devices, given.restarts,
                      out=lambda line: print(line, flush=True))
    return 0 if lives[-1].well else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
