"""How proofs are fooled: every fault against every proof, by running them.

`examine` puts the proofs to one specimen; `gallery` does it for all faults and makes the table.
"""

import functools

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

from meshbook import proofs, specimens
from meshbook.drawings import assert_tiles, draw_sharding
from meshbook.faults import FAULTS
from meshbook.verdicts import aligned, markdown

PROOFS = ("sharded", "same", "communicates", "divided", "drawn")


def examine(specimen):
    """Put the four proofs to a specimen, and the check of a drawing: what each raised, or None."""
    checks = {
        "sharded": lambda: _sharded(specimen),
        "same": lambda: proofs.assert_same_training(
            _run(specimen), _run(_one_device(specimen.reference)), range(20)),
        "communicates": lambda: proofs.assert_communicates(
            specimen.compiled, specimen.mesh, specimen.predicted),
        "divided": lambda: proofs.assert_divided(
            specimen.compiled, specimen.mesh.size, specimens.USEFUL, specimen.factor),
        "drawn": lambda: _drawn(specimen),
    }
    return {proof: _failure(check) for proof, check in checks.items()}


def _failure(check):
    try:
        check()
    except AssertionError as failure:
        return failure
    return None


def _sharded(specimen):
    """After a step every device holds its slice, and copies are copies."""
    batch = specimen.batch(0)
    state, _ = specimen.compiled(specimen.state(), batch)
    table = {"params": specimens.SPECS, "moments": specimens.SPECS, "batch": P("batch")}
    proofs.assert_sharded({**state, "batch": batch}, table, specimen.mesh)
    proofs.assert_replicas_equal(state)


def _drawn(specimen):
    """The drawing of a weight shows the shards that the devices hold."""
    w_in_DF = specimen.state()["params"]["w_in"]
    assert_tiles(draw_sharding(specimen.drawn(w_in_DF)), w_in_DF)


def _run(specimen):
    """A specimen as a run to compare; after the first step its moments are its gradients."""
    def step(state, number):
        return specimen.compiled(state, specimen.batch(number))

    return proofs.Run(step, specimen.state(),
                      gradients=lambda state, number: step(state, number)[0]["moments"],
                      params=lambda state: state["params"])


@functools.cache
def _one_device(value_and_grad):
    """The reference: the same network on one device."""
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("batch", "model"))
    return specimens.Specimen(mesh, value_and_grad, {})


class Gallery:
    """Faults against proofs, as they ran: `failures[name][proof]` is what it raised, or None."""

    header = ("fault", *PROOFS)

    def __init__(self, failures):
        self.failures = failures

    def rows(self):
        """One row a fault: its name, then what each proof said."""
        return [(name, *("caught" if found[proof] else "-" for proof in PROOFS))
                for name, found in self.failures.items()]

    def __repr__(self):
        return aligned(self.header, self.rows())

    def _repr_markdown_(self):
        return markdown(self.header, self.rows())


def gallery(faults=FAULTS):
    """Run every fault, and every proof on it: a Gallery, which shows as a table."""
    return Gallery({fault.name: examine(fault.wrong()) for fault in faults})
