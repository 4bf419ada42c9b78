"""What rematerialisation costs: the decoder's step by what its layers keep.

On (8, 1), in turns in one process. The work is counted in the compiled program, and equals the
formula's; temporaries are the compiler's, of one device.
"""

from benchmarks.decoder_runs import Steps, assert_same_losses, begin, in_turns, middle, rows_of
from meshbook.models.decoder_config import POLICIES
from meshbook.costs.plans import Plan
from meshbook.costs.step import describe
from meshbook.costs.work import step_work
from meshbook.proofs import work
from meshbook.sharding import Sharding

ROUNDS, SHAPE = 7, (8, 1)
NONE = "none"


def measured(config, rows, rounds=ROUNDS):
    """Rows: each policy, and both ways of attention where all is kept."""
    ways = {name: {"remat": name} for name in sorted(POLICIES, key=lambda name: name != NONE)}
    ways["none, attention by row"] = {"remat": NONE, "by_row": True}
    ways["attention, by row"] = {"remat": "attention", "by_row": True}
    found = {name: Steps(config, rows, Sharding.data_parallel(), SHAPE, **way)
             for name, way in ways.items()}
    assert_same_losses({name: steps(2) for name, steps in found.items()})
    done = {name: work(steps.program) for name, steps in found.items()}
    useful = step_work(describe(config, Plan(8), rows)).useful
    held = {name: steps.program.memory_analysis().temp_size_in_bytes
            for name, steps in found.items()}
    notes = {name: [f"{done[name] / useful:.3f} of the useful work", f"{held[name] / 1e6:.1f} MB "
                    "of temporaries a device"] for name in found}
    made = rows_of(in_turns(found, rounds), NONE, notes=notes)
    return [row | {"work": done[row["name"]] / done[NONE], "temporaries": held[row["name"]]}
            for row in made]


def run():
    """One size."""
    begin(8)
    return measured(*middle())


if __name__ == "__main__":
    for row in run():
        print(row)
