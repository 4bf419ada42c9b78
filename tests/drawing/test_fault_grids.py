"""The grid of faults: a dot is large where a proof caught the fault, and shows if it was alone."""
from xml.etree import ElementTree

import pytest

from meshbook.drawing.fault_grids import ALONE, SEVERAL, draw_fault_grid
from meshbook.faults import FAULTS

CAUGHT = {fault.name: fault.caught_by for fault in FAULTS} | {"no fault": ()}
PROOFS = "sharded", "same", "communicates", "divided", "donated", "drawn"


def dots(picture):
    return {tuple(node.get("data-caught").split("|")): node
            for node in ElementTree.fromstring(picture.html).iter() if node.get("data-caught")}


def test_the_large_dots_are_the_catches():
    found = dots(draw_fault_grid(CAUGHT, PROOFS))
    assert found.keys() == {(fault, proof) for fault, by in CAUGHT.items() for proof in by}
    for (fault, _), node in found.items():
        assert node.get("fill") == (ALONE if len(CAUGHT[fault]) == 1 else SEVERAL)


def test_proofs_are_columns_and_faults_are_rows():
    found = dots(draw_fault_grid(CAUGHT, PROOFS))
    x, y = ({pair: float(node.get(name)) for pair, node in found.items()} for name in ("cx", "cy"))
    across = {proof: {x[pair] for pair in found if pair[1] == proof} for proof in PROOFS}
    assert all(len(places) == 1 for places in across.values())
    assert [*across.values()] == sorted(across.values(), key=min)
    down = [y[fault, by[0]] for fault, by in CAUGHT.items() if by]
    assert down == sorted(down) and len(set(down)) == len(FAULTS)


def test_the_words_say_who_caught_what():
    alt = draw_fault_grid({"a": ("same",), "b": ()}, PROOFS).alt
    assert alt == "Which proofs catch which of 2 programs. a: same; b: no proof"


def test_a_proof_without_a_column_is_refused():
    with pytest.raises(ValueError, match="found \\['luck'\\]"):
        draw_fault_grid({"a": ("luck",)}, PROOFS)
