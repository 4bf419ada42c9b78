"""The decoder's training step against the same in PyTorch, eager and compiled.

The same parameters, batch, float32 and AdamW; three losses of each agree to a relative 1e-5 before
anything is timed. All take turns in one process, on all cores; a ratio is the median of those of
the rounds. PyTorch has its fused AdamW and its own kernel of attention; this book's layers are one
loop, on eight simulated devices and on one. Where each layer's gradients are summed in the backward
pass, all devices wait for each other in each layer, and two cores have eight of them; so the first
of the contestants sums all gradients once, at the end.
"""

import os

import jax

from benchmarks.decoder_runs import (
    MEDIUM, RATE, SMALL, TINY, Steps, assert_same_losses, begin, fresh_state, host_batch, in_turns,
    rows_of
)
from helpers import sized
from meshbook.models.losses import language_loss
from meshbook.parallel.accumulation import in_microbatches
from meshbook.sharding import Sharding

ROUNDS, CHECKED = 7, 3
OURS = "this book on (8, 1), summed at the end"
BY_LAYER = "this book on (8, 1), summed by layer"
FASTEST = {"remat": "attention", "by_row": True}  # of this book's, on a CPU


def torch_steps(config, rows, compiled=False):
    """The same in PyTorch, from the parameters that this book's decoder begins with."""
    import torch

    from benchmarks import torch_decoder

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    params = jax.device_get(fresh_state(config).params)
    return torch_decoder.training_steps(
        config, params, *host_batch(config, rows).values(), RATE, compiled)


def contestants(config, rows):
    """{name: steps} of all that can run here, and {name: why} of those that cannot."""
    found = {
        OURS: Steps(config, rows, Sharding.data_parallel(), (8, 1),
                    in_microbatches(language_loss, 1), **FASTEST),
        BY_LAYER: Steps(config, rows, Sharding.data_parallel(), (8, 1), **FASTEST),
        "this book on one device": Steps(config, rows, **FASTEST),
        "PyTorch eager": torch_steps(config, rows)}
    losses = {name: steps(CHECKED) for name, steps in found.items()}
    compiled, failed = torch_steps(config, rows, compiled=True), {}
    try:
        losses["PyTorch compiled"] = compiled(CHECKED)
        found["PyTorch compiled"] = compiled
    except Exception as error:  # the compiler needs another one, of C++
        failed["PyTorch compiled"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    assert_same_losses(losses)
    return found, failed


def speeds(config, rows, rounds=ROUNDS):
    """Rows of one size."""
    found, failed = contestants(config, rows)
    shown = f"D {config.embed}, L {config.layers}, {rows * config.tokens:,} tokens: "
    return rows_of(in_turns(found, rounds), OURS, shown) + [
        {"name": shown + name, "value": None, "unit": "ms a step", "note": f"does not run: {why}"}
        for name, why in failed.items()]


def run():
    """Both sizes."""
    begin(8)
    sizes = sized(full=(SMALL, MEDIUM), laptop=(SMALL, MEDIUM), test=(TINY,))
    return [row for size in sizes for row in speeds(*size)]


if __name__ == "__main__":
    for row in run():
        print(row)
