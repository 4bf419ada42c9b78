"""Four proofs for any parallel program: none of them is implied by the others.

1. It is really sharded: `assert_sharded`, `by_letters`, `sharding_table`, `assert_replicas_equal`.
2. It is the same training: `assert_same_training`.
3. It communicates what was predicted: `collectives`, `assert_communicates`.
4. The work is divided: `work`, `assert_divided`.

Beside them, of memory: the state is donated, `assert_donated`. They take any pytree and any
compiled program, and need only jax and numpy: use them in the tests of your own project. Each
`assert_` returns a verdict that prints as one line, or raises ProofFailed.
"""

from meshbook.hlo.collectives import Moved, Traffic, collectives
from meshbook.hlo.execution import UnknownTripCount
from meshbook.hlo.flops import work
from meshbook.proofs.communicates import assert_communicates
from meshbook.proofs.divided import assert_divided, assert_donated
from meshbook.proofs.same_training import Run, assert_same_training
from meshbook.proofs.sharded import assert_replicas_equal, assert_sharded, by_letters
from meshbook.proofs.table import sharding_table
from meshbook.proofs.verdicts import ProofFailed, Verdict

__all__ = [
    "Moved", "ProofFailed", "Run", "Traffic", "UnknownTripCount", "Verdict",
    "assert_communicates", "assert_divided", "assert_donated", "assert_replicas_equal",
    "assert_same_training", "assert_sharded", "by_letters", "collectives", "sharding_table", "work",
]
