"""Make a corpus with Ray in a network of its own, killing a worker; print what was found as JSON.

    unshare --user --map-root-user --net python tests/support/corpus_by_ray.py INPUTS FOLDER

Ray listens on every address that there is. In this network there is only 127.0.0.1.
"""
import contextlib
import fcntl
import json
import os
import signal
import socket
import struct
import sys
import tempfile
import threading
import time

import psutil
from corpora import ENCODING, small_plan

from meshbook.data.corpus import build_corpus
from meshbook.data.corpus_ray import RayData
from meshbook.data.corpus_workers import check_workers

SET_FLAGS, UP_AND_RUNNING = 0x8914, 0x41  # linux/sockios.h, linux/if.h


def only_loopback():
    """Switch on this network's loopback, and see that it has nothing else."""
    assert [name for _, name in socket.if_nameindex()] == ["lo"], socket.if_nameindex()
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sH14x", b"lo", UP_AND_RUNNING))


@contextlib.contextmanager
def started(cpus):
    """Ray, without its dashboard and usage statistics."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    with tempfile.TemporaryDirectory(prefix="ray") as logs:
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, log_to_driver=False,
                 _node_ip_address="127.0.0.1", logging_level="ERROR", _temp_dir=logs,
                 object_store_memory=100 << 20)
        try:
            yield
        finally:
            ray.shutdown()


def mine():
    """The workers of this process's Ray that have a job at this moment."""
    found = psutil.Process().children(recursive=True)
    return [each for each in found if each.name().startswith(("ray::Map", "ray::_Map"))]


def kill(killed, stopped):
    """Kill the first worker that has a job."""
    while not killed and not stopped.is_set():
        for each in mine()[:1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                os.kill(each.pid, signal.SIGKILL)
                killed.append(each.pid)
        time.sleep(0.5)


def main(inputs, folder):
    plan = small_plan(inputs)
    only_loopback()
    killed, stopped = [], threading.Event()
    with started(2):
        workers = RayData(2)
        seen = check_workers(plan, folder, ENCODING, workers)
        threading.Thread(target=kill, args=(killed, stopped), daemon=True).start()
        try:
            build_corpus(plan, folder, ENCODING, workers)
        finally:
            stopped.set()
    print(json.dumps({"machines": len(seen), "killed": len(killed)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
