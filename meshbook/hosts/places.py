"""Which process of a run this is: its place, from what started it, and how it joins the others."""
from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType

import jax

from meshbook.hosts.roll_call import meet, split_address
from meshbook.saving.agreement import told_by_all

ADDRESS, COUNT, INDEX, STARTED = (
    f"MESHBOOK_{name}" for name in ("COORDINATOR", "PROCESSES", "PROCESS", "STARTED"))
LAST_WORDS = 1.0  # seconds in which others may say theirs: without process 0 JAX aborts them
SLURM_PORTS = 61440, 4096  # the first of the ports that jobs use by turns, and how many


@dataclass(frozen=True)
class Place:
    """Which process this is: `index` of `count`, and where process 0 is ("host:port")."""

    address: str
    count: int
    index: int


def place_of(environment: Mapping[str, str]):
    """The Place that the environment gives this process, or None: it is the only one.

    From MESHBOOK_COORDINATOR, MESHBOOK_PROCESSES and MESHBOOK_PROCESS, as launch() sets them, or
    from what Slurm's srun sets. Raises ValueError where they are incomplete.
    """
    ours = [environment.get(name) for name in (ADDRESS, COUNT, INDEX)]
    if any(ours):
        if not all(ours) or not all(each.isdecimal() for each in ours[1:]):
            raise ValueError(f"expected {ADDRESS} and the numbers {COUNT} and {INDEX} together, "
                             f"found {', '.join(map(str, ours))}")
        place = Place(ours[0], *map(int, ours[1:]))
    elif "SLURM_STEP_NODELIST" in environment:
        first, many = SLURM_PORTS
        port = first + int(environment["SLURM_JOB_ID"]) % many
        place = Place(f"{first_host(environment['SLURM_STEP_NODELIST'])}:{port}",
                      tasks_of_step(environment), int(environment["SLURM_PROCID"]))
    else:
        return None
    split_address(place.address)
    if not place.index < place.count:
        raise ValueError(f"expected a process from 0 to {place.count - 1}, found process "
                         f"{place.index}")
    return place


def first_host(nodes: str):
    """The first host of Slurm's list: "node007" of "node[007-009,12],other"."""
    name, bracket, rest = nodes.partition("[")
    if "," in name or not bracket:
        return name.partition(",")[0]
    return name + rest.replace("-", ",").replace("]", ",").partition(",")[0]


def tasks_of_step(environment: Mapping[str, str]):
    """How many tasks a Slurm step has: fewer than its job, where `srun` was told so."""
    return int(environment.get("SLURM_STEP_NUM_TASKS") or environment["SLURM_NTASKS"])


def missing_tasks(environment: Mapping[str, str]):
    """One sentence about the tasks of a Slurm job that are not in this step, or ""."""
    if "SLURM_STEP_NUM_TASKS" not in environment or "SLURM_NTASKS" not in environment:
        return ""
    own, all_of_job = tasks_of_step(environment), int(environment["SLURM_NTASKS"])
    if own >= all_of_job:
        return ""
    return (f"this Slurm step has {own} of the {all_of_job} tasks of its job, and is a run of its "
            f"own: nobody waits for the other {all_of_job - own}")


def connect(patience: float = 300.0):
    """Join the other processes of this run, if there are any; comes before all else of JAX.

    patience: seconds to wait for them. The coordinator of process 0 listens on the address that
    was given, and on no other. From here on an error ends the process at once, with one line for
    a ValueError, RuntimeError or OSError: JAX would wait at its end for processes that wait for
    this one. Raises roll_call.NotTogether, ValueError.
    """
    place = place_of(os.environ)
    sys.excepthook = ends
    if place is None:
        return
    if missing := missing_tasks(os.environ):
        say(missing)
    meet(place.address, place.count, place.index, patience, say)
    jax.distributed.initialize(
        place.address, place.count, place.index, coordinator_bind_address=place.address,
        initialization_timeout=int(patience), cluster_detection_method="deactivate")


def started():
    """When this run was started, such as "20261128-093000": a name for it, equal in all processes.

    It stays the same when clusters.supervise() starts them again.
    """
    return told_by_all("started", os.environ.get(STARTED) or time.strftime("%Y%m%d-%H%M%S"))[0]


def say(sentence: str):
    """One line for whoever watches the run."""
    print(sentence, file=sys.stderr, flush=True)


def ends(kind: type[BaseException], error: BaseException, trace: TracebackType | None):
    """For sys.excepthook: say the error, and end now."""
    if issubclass(kind, (ValueError, RuntimeError, OSError, FloatingPointError)):
        say(f"{kind.__name__}: {error}" + "".join(f"\n{note}" for note in
                                                  getattr(error, "__notes__", ())))
    else:
        sys.__excepthook__(kind, error, trace)
    sys.stdout.flush()
    if jax.distributed.is_initialized():
        if jax.process_index() == 0:
            time.sleep(LAST_WORDS)
        os._exit(130 if issubclass(kind, KeyboardInterrupt) else 1)
