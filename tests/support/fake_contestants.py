"""A process that measures for test_accelerator.py: contestants that sleep, break, and want much."""
import os
import sys
import time

from benchmarks.accelerator_worker import Timer, answer, contest


def contestant(call):
    return Timer(call, lambda _: None), {"useful flops": 1e9, "moved bytes": 1e6}


def breaks():
    raise ValueError("this one breaks when it runs")


KINDS = {
    "quick": lambda: contestant(lambda: time.sleep(0.01)),
    "slow": lambda: contestant(lambda: time.sleep(0.04)),
    "large": lambda: MemoryError("RESOURCE_EXHAUSTED: wants 29.6GiB, has 7.48GiB of hbm"),
    "broken": lambda: contestant(breaks),
    "deadly": lambda: contestant(lambda: os._exit(3)),
    "endless": lambda: contestant(lambda: time.sleep(3600)),
}


if __name__ == "__main__":
    answer(sys.argv[1], contest(lambda cell: {name: KINDS[name]() for name in cell["names"]}))
