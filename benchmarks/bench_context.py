"""A decoder's step on one long row, its tokens on eight devices, by each way to reach the keys.

In turns in one process; two losses of each are those of one device. The devices share this
machine's cores: a way that gives the last device most of the work does not look slow here.
"""

from dataclasses import replace
from functools import partial

from benchmarks.aot_context import in_order
from benchmarks.bench_pipelines import temporaries
from benchmarks.decoder_runs import (
    MEDIUM, ONE, TINY, Steps, assert_same_losses, begin, in_turns, rows_of
)
from helpers import sized
from meshbook.parallel.context import Context
from meshbook.sharding import Sharding

ROUNDS, SHAPE = 7, (1, 8)
WAYS = {"keys gathered": Context("gather", "model"), "ring": Context("ring", "model"),
        "ring in zigzag order": Context("ring", "model", zigzagged=True),
        "Ulysses": Context("ulysses", "model")}
LONG = replace(MEDIUM[0], tokens=2048, remat="attention"), 1


def measured(config, rows, rounds=ROUNDS):
    """Rows: one device, its attention in blocks, and each way on eight."""
    attended = lambda context: partial(in_order, context)
    block = min(256, config.tokens // 16)
    alone = Context("ring", "model", block=block)
    found = {ONE: Steps(config, rows, Sharding.context_parallel(alone), (1, 1), attended(alone))}
    for name, way in WAYS.items():
        context = replace(way, block=block)
        found[name] = Steps(config, rows, Sharding.context_parallel(context), SHAPE,
                            attended(context))
    assert_same_losses({name: steps(2) for name, steps in found.items()})
    notes = {name: [temporaries(steps)] for name, steps in found.items()}
    return rows_of(in_turns(found, rounds, count=1), ONE, notes=notes)


def run():
    """One size."""
    begin(8)
    tiny = replace(TINY[0], heads=8, tokens=64)
    return measured(*sized(full=LONG, laptop=LONG, test=(tiny, 1)))


if __name__ == "__main__":
    for row in run():
        print(row)
