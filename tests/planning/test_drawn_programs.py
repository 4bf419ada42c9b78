"""Programs that a seed draws: possible ones, of all TPUs, written down before they are compiled."""
import dataclasses
from collections import Counter

import pytest
from benchmarks.aot_drawn import COUNT, TPUS, cells, drawn

from meshbook.costs.devices import GIB
from meshbook.costs.plans import Plan
from meshbook.costs.ranking import SPARE, impossible
from meshbook.costs.timeline import step_peak
from meshbook.planning.clocks import device_of
from meshbook.planning.recorded_steps import asked_step
from meshbook.planning.topologies import recorded


@pytest.fixture(scope="module")
def chosen():
    return drawn(1)


def test_a_seed_draws_the_same_programs_again_and_another_seed_others(chosen):
    assert drawn(1) == chosen and {cell.seed for cell in chosen} == {1}
    names = {cell.name for cell in chosen}
    assert len(names) == COUNT and not names & {cell.name for cell in drawn(2)}


def test_they_are_possible_and_fit_by_the_formula_of_the_day(chosen):
    assert Counter(cell.tpu for cell in chosen) == dict.fromkeys(TPUS, COUNT // len(TPUS))
    for cell in chosen:
        step = asked_step("tpu-drawn", dataclasses.asdict(cell))
        assert not impossible(step.config, Plan(**cell.plan), cell.rows)
        assert cell.formula == step_peak(step)
        assert GIB < cell.formula <= (1 - SPARE) * device_of(cell.tpu).memory


def test_each_that_was_written_down_is_recorded_with_what_the_formula_said_before():
    found = {name: each.cell for name, each in recorded("tpu-drawn").items()}
    assert found == {cell.name: dataclasses.asdict(cell) for cell in cells()}
    assert len(found) == 3 * COUNT and set(Counter(
        cell["seed"] for cell in found.values()).values()) == {COUNT}
