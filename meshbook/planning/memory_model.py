"""What a TPU's compiler asks for, predicted: the formula's bytes, and two constants per TPU.

`meshbook.costs` counts what a training step must hold. A compiler adds what it works with,
keeps some arrays in the chip's own memory instead, and leaves gaps between buffers. Here its
answers are compared with the formula, constants are fitted to them, and the fit is cross-validated.
"""
import itertools
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from meshbook.costs.timeline import step_peak
from meshbook.planning.programs import step_of
from meshbook.planning.topologies import Compilation

OTHER_PROGRAMS = ("layout", "checkpoint", "parts", "undone", "dropout", "dtype",
                  "loss")  # no formula here
ENOUGH = 10  # programs of the ViT that a TPU must have for constants of its own


class Cell(NamedTuple):
    """A program that was compiled for a TPU, in bytes per device.

    formula: `step_peak`. live: what arrays fill when they fill most, `Compilation.held`.
    peak: what the program asks for, with the gaps between them; this has to fit.
    """

    name: str
    tpu: str
    formula: int | float
    live: int | float
    peak: int | float


class Errors(NamedTuple):
    """Of one prediction: predicted ÷ found - 1, for the live bytes and for the peak."""

    live: float
    peak: float

    @property
    def worst(self):
        """The larger of the two, without its sign."""
        return max(map(abs, self))


class Constants(NamedTuple):
    """What a compiler adds to the formula.

    scratch: bytes that do not grow with the batch; below 0 where the chip has memory of its own
    that takes more than that. fragmentation: the peak ÷ the live bytes.
    """

    scratch: float
    fragmentation: float

    def live(self, formula: int | float):
        """The live bytes at the peak of a step that by formula holds so many."""
        return formula + self.scratch

    def peak(self, formula: int | float):
        """The bytes that the compiler asks for."""
        return self.fragmentation * self.live(formula)

    def errors(self, cells: Iterable[Cell]):
        """{name: Errors} of cells."""
        return {cell.name: Errors(self.live(cell.formula) / cell.live - 1,
                                  self.peak(cell.formula) / cell.peak - 1) for cell in cells}


FORMULA_ALONE = Constants(0.0, 1.0)


def sort_out(record: Mapping[str, Compilation]):
    """(Cells that the formula is about, {name: why not} of the others), of `topologies.recorded`.

    Apart are programs that do not fit, those in which memory ran short and operations were
    rematerialised (how much a step holds is then up to the compiler), and other programs.
    """
    cells, apart = [], {}
    for name, found in record.items():
        other = [word for word in re.findall(r"(\w+)=", name) if word in OTHER_PROGRAMS]
        if other:
            apart[name] = f"another program: {' and '.join(other)}"
        elif not found.fits:
            apart[name] = "does not fit"
        elif found.rematerialised:
            apart[name] = f"{found.rematerialised} operations rematerialised"
        else:
            formula = step_peak(step_of(name, found.mesh))
            cells.append(Cell(name, found.topology, formula, found.held, found.peak))
    return cells, apart


def fit(cells: Sequence[Cell]):
    """The Constants that suit these cells: scratch by least squares of the relative errors of
    live bytes, then the mean fragmentation. Raises ValueError without cells.
    """
    if not cells:
        raise ValueError("expected at least one cell to fit constants to; found none")
    weights = [1 / cell.live**2 for cell in cells]
    missing = [weight * (cell.live - cell.formula)
               for weight, cell in zip(weights, cells, strict=True)]
    scratch = sum(missing) / sum(weights)
    return Constants(scratch, statistics.mean(
        cell.peak / (cell.formula + scratch) for cell in cells))


def cross_validate(cells: Sequence[Cell], chosen: int):
    """[{name: Errors}], one for every choice of so many cells to fit: errors on the others.

    Raises ValueError where no cell would be left.
    """
    if not 0 < chosen < len(cells):
        raise ValueError(f"expected to choose from 1 to {len(cells) - 1} of {len(cells)} cells; "
                         f"found {chosen}")
    return [fit(some).errors(cell for cell in cells if cell not in some)
            for some in itertools.combinations(cells, chosen)]


def leave_one_out(cells: Sequence[Cell]):
    """{name: Errors} of each cell, predicted with constants fitted on all the others."""
    return {name: each for errors in cross_validate(cells, len(cells) - 1)
            for name, each in errors.items()}


def _vits(cells):
    """{TPU: its programs of the ViT}."""
    found = {}
    for cell in cells:
        if "MiniGPT" not in cell.name:
            found.setdefault(cell.tpu, []).append(cell)
    return found


def own_cells(cells: Iterable[Cell]):
    """{TPU: its programs of the ViT}, of the TPUs that have enough for constants of their own."""
    return {tpu: own for tpu, own in _vits(cells).items() if len(own) >= ENOUGH}


def shared_constants(cells: Iterable[Cell]):
    """The Constants of all other TPUs: those that suit the programs of `own_cells` together."""
    return fit(list(itertools.chain(*own_cells(cells).values())))


def unseen_errors(cells: Sequence[Cell]):
    """{who: {name: Errors}} of all cells, each predicted by constants that have not seen it.

    A TPU of `own_cells` has constants from its other programs; other TPUs together have the shared
    ones, and MiniGPT, which is another model, has the formula alone.
    """
    own, vits = own_cells(cells), _vits(cells)
    others = [tpu for tpu in vits if tpu not in own]
    found = {tpu.removesuffix("-8"): leave_one_out(own[tpu]) for tpu in own}
    title = ", ".join(sorted(re.match(r"v\w+", tpu)[0] for tpu in others))
    found[title] = shared_constants(cells).errors(
        cell for tpu in others for cell in vits[tpu])
    found["MiniGPT"] = FORMULA_ALONE.errors(cell for cell in cells if "MiniGPT" in cell.name)
    return found
