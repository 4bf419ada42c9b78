"""Traces of a run that goes on for long: a few of its steps, whenever somebody asks."""
from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax


def traced_on_demand(folder: str | os.PathLike, steps: int = 3):
    """A callback for every step of a run, which traces some after `touch folder/profile`.

    steps: how many; their traces go to folder/profiles, which TensorBoard and `read_trace` read.
    The callback is given what the step returned, whose arrays the last of them waits for.
    """
    asked, traces, left = Path(folder, "profile"), Path(folder, "profiles"), 0

    def after(results: Any):
        nonlocal left
        if left:
            left -= 1
            if not left:
                jax.block_until_ready(results)
                jax.profiler.stop_trace()
        elif asked.exists():
            asked.unlink()
            jax.block_until_ready(results)
            jax.profiler.start_trace(traces)
            left = steps

    return after
