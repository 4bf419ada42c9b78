"""Each preset of the decoder on eight simulated devices against one device, one global batch.

In turns in one process; two losses of each are those of one device before anything is timed. The
devices share this machine's cores: what is seen is what a preset adds on the same hardware, not how
it scales.
"""

from functools import partial

from benchmarks.decoder_runs import ONE, Steps, assert_same_losses, begin, in_turns, middle, rows_of
from meshbook.costs.plans import PRESETS
from meshbook.proofs import collectives
from meshbook.sharding import Sharding

ROUNDS, REMAT = 7, "attention"
WAYS = PRESETS | {
    "sequence_parallel, overlapped": partial(Sharding.sequence_parallel, overlapped=True)}


def shape_of(preset):
    """The mesh of a preset: its own axis has the devices, or both have some."""
    return (4, 2) if preset.startswith(("tensor", "sequence")) else (8, 1)


def measured(config, rows, rounds=ROUNDS):
    """Rows: one device, and each preset."""
    found = {ONE: Steps(config, rows, remat=REMAT)}
    for name, preset in WAYS.items():
        shape = shape_of(name)
        found[f"{name} on {shape}"] = Steps(config, rows, preset(), shape, remat=REMAT)
    assert_same_losses({name: steps(2) for name, steps in found.items()})
    notes = {name: [sent(steps)] for name, steps in found.items()}
    return rows_of(in_turns(found, rounds), ONE, notes=notes)


def sent(steps):
    """What a step's collectives give each device, in words."""
    moved = collectives(steps.program, steps.state.program.mesh)
    return f"{sum(each.bytes for each in moved.values()) / 1e6:.1f} MB of collectives' results"


def run():
    """One size."""
    begin(8)
    return measured(*middle())


if __name__ == "__main__":
    for row in run():
        print(row)
