"""A decoder's step by each schedule of one program, on two by four devices, against one device.

In turns in one process; two losses of each are those of one device with the same microbatches. The
devices share this machine's cores: what is seen is the work of a schedule and what its loop costs,
not how it scales.
"""

from dataclasses import replace

from benchmarks.aot_pipeline import SCHEDULES
from benchmarks.decoder_runs import (
    MEDIUM, ONE, TINY, Steps, assert_same_losses, begin, in_turns, rows_of
)
from helpers import sized
from meshbook.models.losses import language_loss
from meshbook.models.pipelined import pipelined
from meshbook.parallel.accumulation import in_microbatches
from meshbook.sharding import Sharding

ROUNDS, MICROBATCHES, SHAPE = 5, 8, (2, 4)


def measured(config, rows, rounds=ROUNDS):
    """Rows: one device, and each schedule, its stages along the mesh axis "model"."""
    config = replace(config, layers=8, remat="attention", by_row=True)
    rules = Sharding.data_parallel().in_stages("model")
    found = {ONE: Steps(config, rows, loss=in_microbatches(language_loss, MICROBATCHES))}
    for name, schedule in SCHEDULES.items():
        found[name] = Steps(config, rows, rules, SHAPE, pipelined(schedule, MICROBATCHES, "model"))
    assert_same_losses({name: steps(2) for name, steps in found.items()})
    notes = {name: [temporaries(steps)] for name, steps in found.items()}
    return rows_of(in_turns(found, rounds, count=1), ONE, notes=notes)


def temporaries(steps):
    """What a device needs besides the state, in words."""
    needed = steps.program.memory_analysis().temp_size_in_bytes
    return f"{needed / 1e6:.1f} MB of temporaries a device"


def run():
    """One size."""
    begin(8)
    half = MEDIUM[0], 16
    return measured(*sized(full=half, laptop=half, test=TINY))


if __name__ == "__main__":
    for row in run():
        print(row)
