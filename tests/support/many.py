"""Scripts that run as several processes of one run, as tests write them: what they did and said."""
import os
import pathlib
import sys
import threading

from meshbook.hosts import clusters

SUPPORT = pathlib.Path(__file__).parent
IMPORTS = """
import dataclasses, itertools, json, os, pathlib, sys, time
from meshbook.hosts.places import connect
connect(60)
import jax, numpy as np, soak
from meshbook.saving import agreement, checkpoints, manifests, parts, runs
me, folder = jax.process_index(), pathlib.Path(sys.argv[1])
"""
LIMIT = 120  # seconds after which processes that wait for each other are ended


def many(count, script, *arguments, devices=8):
    """How so many processes Ended that ran a script, or "train", and what they printed."""
    code = [SUPPORT / "clustered.py"] if script == "train" else ["-c", IMPORTS + script]
    path = {"PYTHONPATH": os.pathsep.join([str(SUPPORT), *filter(None, sys.path)])}
    command, said = [sys.executable, *map(str, code), *map(str, arguments)], []
    with clusters.started(command, count, devices // count, path, said.append) as cluster:
        stop = threading.Timer(LIMIT, lambda: [each.kill() for each in cluster.processes])
        stop.start()
        ended = cluster.wait()
        stop.cancel()
    return ended, "\n".join(said)
