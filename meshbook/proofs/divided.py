"""Is the work divided, and the old state's memory used again? Read from the compiled program."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshbook.hlo.flops import work
from meshbook.proofs.verdicts import ProofFailed, Verdict
from meshbook.text import scaled, sized_bytes


def assert_divided(
    compiled: Any, devices: int | np.integer, useful: int | float | np.number,
    factor: int | float | np.number = 1.0, rtol: int | float = 0.01,
    taken: Mapping[str, Sequence[float | int]] | None = None,
):
    """Prove that the devices together do the useful work `factor` times, and no more or less.

    compiled: `jax.stages.Compiled`, or HLO text. devices: how many run it. useful: the FLOPs of
    the products that the whole step needs, from a formula. factor: 1.0, or 4/3 where the forward
    pass is computed again. taken: the shares of a conditional's branches, as in `work`.
    Raises ProofFailed with both figures; and what `work` raises.

    >>> assert_divided(compiled, mesh.size, useful=3 * 2 * B * D * F)
    work divided: 23.4 GFLOP per device x 8 = 1.000 x 187 GFLOP useful
    """
    each = work(compiled, taken)
    found = each * devices / useful
    line = (f"{scaled(each, 'FLOP')} per device x {devices} = {found:.3f} x "
            f"{scaled(useful, 'FLOP')} useful")
    if abs(found - factor) > rtol * factor:
        raise ProofFailed(f"work: expected {factor:.3f} x the useful FLOPs over {devices} devices, "
                          f"found {line}", leaf="work", expected=factor, found=found)
    return Verdict(f"work divided: {line}", flops=each, factor=found)


def assert_donated(compiled: Any, held: int | np.integer):
    """Prove that a step returns its new state in the memory of the old one.

    compiled: `jax.stages.Compiled`. held: bytes of the state on one device, from a formula; so many
    bytes of the arguments must be aliased with results. Raises ProofFailed with both figures.

    >>> assert_donated(compiled, held=3 * 4 * weights)
    donated: 1.37 MB per device, all of the state
    """
    found = compiled.memory_analysis().alias_size_in_bytes
    if found < held:  # a TPU's tiles may make it more
        raise ProofFailed(f"donation: expected the {held:,} bytes of the state on one device to "
                          f"become the new state, found {found:,} bytes aliased",
                          leaf="donation", expected=held, found=found)
    return Verdict(f"donated: {sized_bytes(held)} per device, all of the state", bytes=found)
