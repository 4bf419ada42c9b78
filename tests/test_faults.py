"""Every planted fault is a run gone wrong; the proof that should catch it does, and no other."""

import pytest

from meshbook import gallery
from meshbook.faults import FAULTS

RIGHT = {fault.right.__name__: fault.right for fault in FAULTS}


@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_pass_every_proof(name):
    found = gallery.examine(RIGHT[name]())
    assert found == dict.fromkeys(gallery.PROOFS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_fault_is_caught_by_its_proofs_and_by_no_other(fault):
    found = gallery.examine(fault.wrong())
    caught = {proof: failure for proof, failure in found.items() if failure is not None}
    assert tuple(caught) == fault.caught_by, {p: str(e) for p, e in caught.items()}
    for proof, failure in caught.items():
        message = str(failure)
        if proof == "drawn":  # the figures' own assertion
            assert "device" in message and "holds" in message and "drawn" in message
            continue
        assert failure.leaf is not None and "expected" in message and "found" in message
        assert failure.expected != failure.found
        if proof == "sharded":
            assert f"leaf {failure.leaf}" in message and f"device {failure.device}" in message
        if proof == "communicates":
            assert ", ".join(failure.leaf) in message


def test_every_proof_is_the_only_one_to_catch_something():
    alone = {fault.caught_by[0] for fault in FAULTS if len(fault.caught_by) == 1}
    assert alone == set(gallery.PROOFS)


def test_there_are_enough_faults_and_each_has_its_own_name():
    assert len(FAULTS) >= 16
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_gallery_is_a_table_of_what_ran():
    few = [fault for fault in FAULTS if fault.name in ("an extra psum", "a missing psum")]
    table = gallery.gallery(few)
    assert table.rows()[0] == ("an extra psum", "-", "-", "caught", "-", "-")
    assert "| a missing psum | - | caught | caught | - | - |" in table._repr_markdown_()
    assert "along model" in str(table.failures["an extra psum"]["communicates"])
