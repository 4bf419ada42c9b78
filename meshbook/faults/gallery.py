"""How proofs are fooled: every fault against every proof, by running them."""

from collections.abc import Callable, Iterable, Mapping

from meshbook.faults.programs import Fault
from meshbook.proofs import ProofFailed
from meshbook.text import markdown_table, text_table


def examine(checks: Mapping[str, Callable]):
    """Run every check: {its name: the ProofFailed that it raised, or None}.

    Only ProofFailed is a catch: whatever else a check raises is raised here, too.
    """
    return {proof: _failure(check) for proof, check in checks.items()}


def _failure(check):
    try:
        check()
    except ProofFailed as failure:
        return failure
    return None


class Gallery:
    """Faults against proofs, as they ran: `failures[name][proof]` is what it raised, or None."""

    def __init__(self, failures: Mapping[str, Mapping[str, ProofFailed | None]]):
        self.failures = failures
        self.proofs = tuple(next(iter(failures.values())))
        self.header = ("fault", *self.proofs)

    def caught(self):
        """The proofs that caught each fault: {fault: (proof, ...)}."""
        return {name: tuple(proof for proof, failure in found.items() if failure)
                for name, found in self.failures.items()}

    def alone(self):
        """The faults that one proof caught and no other: {proof: [fault, ...]}."""
        caught = self.caught().items()
        return {proof: [name for name, by in caught if by == (proof,)] for proof in self.proofs}

    def rows(self):
        """One row per fault: its name, then what each proof said."""
        return [(name, *("caught" if found[proof] else "-" for proof in self.proofs))
                for name, found in self.failures.items()]

    def __repr__(self):
        return text_table(self.header, self.rows())

    def _repr_markdown_(self):
        return markdown_table(self.header, self.rows())


def gallery(faults: Iterable[Fault]):
    """Run every fault, and every proof on it: a Gallery, which shows as a table."""
    return Gallery({fault.name: examine(fault.wrong().checks()) for fault in faults})
