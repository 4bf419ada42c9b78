"""Who predicts which recorded program: constants that have not seen it, and nobody twice."""

import pytest

from meshbook.planning import memory_model, topologies
from meshbook.planning.memory_model import Cell, Constants

CELLS, _ = memory_model.sort_out(topologies.recorded())


def made(tpu, constants, count, model=""):
    """Programs that these constants predict without error."""
    return [Cell(f"{tpu} (8, 1) {size}{model}", tpu, size * 1e6, constants.live(size * 1e6),
                 constants.peak(size * 1e6)) for size in range(100, 100 + count)]


def test_every_program_is_predicted_once():
    errors = memory_model.unseen_errors(CELLS)
    names = [name for each in errors.values() for name in each]
    assert sorted(names) == sorted(cell.name for cell in CELLS)
    assert list(errors) == ["v2", "v5e", "v6e", "v3, v4, v5p", "MiniGPT"]
    assert all("MiniGPT" in name for name in errors["MiniGPT"])


def test_constants_of_its_own_need_enough_programs_of_the_vit():
    few, many = Constants(5e6, 1.2), Constants(1e6, 1.05)
    cells = [*made("v2-8", many, memory_model.ENOUGH),
             *made("v3-8", few, memory_model.ENOUGH - 1),
             *made("v3-8", few, 3, " model=MiniGPT")]
    assert set(memory_model.own_cells(cells)) == {"v2-8"}
    assert memory_model.shared_constants(cells) == pytest.approx(tuple(many))
    errors = memory_model.unseen_errors(cells)
    assert max(each.worst for each in errors["v2"].values()) < 1e-9
    assert len(errors["v3"]) == memory_model.ENOUGH - 1
    assert min(each.worst for each in errors["v3"].values()) > 0.1
    by_formula = errors["MiniGPT"]["v3-8 (8, 1) 100 model=MiniGPT"]
    assert by_formula.live == pytest.approx(100e6 / few.live(100e6) - 1)


def test_a_program_of_a_tpu_has_no_part_in_the_constants_that_predict_it():
    cells = made("v2-8", Constants(0.0, 1.0), memory_model.ENOUGH)
    wrong = cells[0]._replace(live=2 * cells[0].live, peak=2 * cells[0].peak)
    errors = memory_model.unseen_errors([wrong, *cells[1:]])["v2"]
    assert errors[wrong.name].live == errors[wrong.name].peak == pytest.approx(-0.5)
