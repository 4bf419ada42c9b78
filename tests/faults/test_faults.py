"""Every planted fault is a run gone wrong: exactly its proofs catch it, and nothing else counts."""

import dataclasses

import jax
import numpy as np
import pytest

from meshbook.faults import FAULTS, gallery, networks, right_models, right_programs
from meshbook.faults.wrong_models import MODEL_FAULTS
from meshbook.proofs import ProofFailed

ALL = (*FAULTS, *MODEL_FAULTS)


def named(fault):
    return fault.name.replace(" ", "-")


@pytest.mark.parametrize("make", dict.fromkeys(fault.right for fault in ALL))
def test_right_programs_pass_every_proof(make):
    found = gallery.examine(make().checks())
    assert not any(found.values()), found


@pytest.mark.parametrize("fault", ALL, ids=named)
def test_fault_is_caught_by_its_proofs_and_by_no_other(fault):
    table = gallery.gallery([fault])
    assert table.caught() == {fault.name: fault.caught_by}, table.failures
    for proof, failure in table.failures[fault.name].items():
        if failure is not None:
            assert_says_where(proof, failure)


def assert_says_where(proof, failure):
    message = str(failure)
    if proof == "drawn":  # the figures' own assertion
        assert "device" in message and "holds" in message and "drawn" in message
        return
    assert failure.leaf is not None and "expected" in message and "found" in message
    assert failure.expected != failure.found
    if proof == "sharded":
        assert f"leaf {failure.leaf}" in message and f"device {failure.device}" in message
    if proof == "communicates":
        kind, axes = failure.leaf
        assert message.startswith(f"{kind} along {', '.join(axes)}")


def ran(**caught):
    """A Gallery of faults that were caught so."""
    failures = {name: {proof: ProofFailed("no") if proof in by else None
                       for proof in ("sharded", "same")} for name, by in caught.items()}
    return gallery.Gallery(failures)


def test_which_proof_stands_alone_is_derived_from_what_ran():
    table = ran(one=["sharded"], both=["sharded", "same"], none=[])
    assert table.alone() == {"sharded": ["one"], "same": []}
    assert table.caught() == {"one": ("sharded",), "both": ("sharded", "same"), "none": ()}


def test_without_a_proof_its_faults_go_unnoticed():
    lost = next(fault for fault in FAULTS if fault.caught_by == ("divided",))
    checks = lost.wrong().checks()
    assert gallery.Gallery({lost.name: gallery.examine(checks)}).alone()["divided"] == [lost.name]
    checks["divided"] = lambda: None
    assert gallery.Gallery({lost.name: gallery.examine(checks)}).alone()["divided"] == []


def test_a_crash_is_no_catch():
    crashing = dataclasses.replace(right_programs.right(), order=lambda number: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        gallery.examine(crashing.checks())

    def bare():
        assert False, "not a proof"

    with pytest.raises(AssertionError, match="not a proof"):
        gallery.examine({"sharded": bare})


def test_every_proof_is_expected_to_be_the_only_one_to_catch_something():
    alone = {fault.caught_by[0] for fault in FAULTS if len(fault.caught_by) == 1}
    assert alone == set(networks.PROOFS)


def test_there_are_enough_faults_and_each_has_its_own_name():
    assert len(FAULTS) >= 16 and len(MODEL_FAULTS) >= 6
    assert len({fault.name for fault in ALL}) == len(ALL)


def test_gallery_is_a_table_of_what_ran():
    few = [fault for fault in FAULTS if fault.name in ("an extra psum", "a missing psum")]
    table = gallery.gallery(few)
    assert table.rows()[0] == ("an extra psum", "-", "-", "caught", "-", "-", "-")
    assert "| a missing psum | - | caught | caught | - | - | - |" in table._repr_markdown_()
    assert "along model" in str(table.failures["an extra psum"]["communicates"])


@pytest.mark.parametrize("optimizer", [networks.SGD, networks.ADAM])
def test_gradients_are_compared_under_any_optimizer_and_parameters_under_sgd(optimizer):
    specimen = dataclasses.replace(right_programs.right(), optimizer=optimizer)
    run = specimen.run()
    assert (run.params is None) == (optimizer is networks.ADAM)
    if run.params is not None:
        assert run.params(run.state) is run.state["params"]
    found = run.gradients(run.state, 0)
    _, right = specimen.reference(*jax.device_put((networks.initial_weights(), networks.data(0))))
    for name, expected in right.items():
        np.testing.assert_allclose(found[name], expected, rtol=1e-4, atol=1e-6)


def test_what_is_to_be_learnt_is_not_at_its_own_place_in_the_inputs():
    """The residual alone knows nothing of it, and every step has other examples."""
    x, y = (networks.data(3)[name].reshape(-1, networks.D) for name in "xy")
    both = np.corrcoef(x.T, y.T)[:networks.D, networks.D:]
    where = np.abs(both).argmax(0)
    assert (np.abs(both).max(0) > 0.9).all() and sorted(where) == list(range(networks.D))
    assert (where != np.arange(networks.D)).all() and np.abs(np.diag(both)).max() < 0.2
    assert not np.array_equal(networks.data(3)["x"], networks.data(4)["x"])


@pytest.mark.parametrize("preset", right_models.RULES)
def test_a_vit_gathers_its_parameters_where_they_are_stored_in_parts(preset):
    """Each of them for the forward pass and for the backward pass, in pieces."""
    trial = right_models.vit(preset)
    gathers = trial.traffic.get(("all-gather", ("batch",)), (0, 0))
    stored = [4 * leaf.size // trial.mesh.shape["model"] for leaf in jax.tree.leaves(trial.start)]
    if preset == "fully_sharded":
        assert max(stored) < gathers[1] < 2 * sum(stored) and trial.weights < sum(stored) / 4
    else:
        assert gathers == (0, 0) and trial.weights > sum(stored) / 4
