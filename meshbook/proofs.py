"""Four proofs for any parallel program: none of them is implied by the others.

1. It is really sharded: `assert_sharded`, `sharding_table`, `assert_replicas_equal`.
2. It is the same training: `assert_same_training`.
3. It communicates what was predicted: `collectives`, `assert_communicates`.
4. The work is divided: `work`, `assert_divided`.

They take any pytree and any compiled program, and need only jax and numpy: use them in the tests of
your own project. Each `assert_` returns a verdict that prints as one line, or raises ProofFailed.
"""

from meshbook.flops import work
from meshbook.sameness import Run, assert_same_training
from meshbook.shards import assert_replicas_equal, assert_sharded, sharding_table
from meshbook.tallies import UnknownTripCount
from meshbook.traffic import Moved, Traffic, collectives
from meshbook.verdicts import ProofFailed, Verdict, scaled, sized_bytes

__all__ = [
    "Moved", "ProofFailed", "Run", "Traffic", "UnknownTripCount", "Verdict",
    "assert_communicates", "assert_divided", "assert_replicas_equal", "assert_same_training",
    "assert_sharded", "collectives", "sharding_table", "work",
]


def assert_communicates(compiled, mesh, expected):
    """Prove that a program moves exactly the predicted bytes along each set of mesh axes.

    compiled: `jax.stages.Compiled`, or HLO text. expected: bytes of results on one device by axis,
    such as {"model": 4 * numbers, ("batch", "model"): 4}; an axis that is not named must move
    nothing. Raises ProofFailed, naming axes, expected and found; and what `collectives` raises.

    >>> assert_communicates(compiled, mesh, {"batch": 4 * (local_weights + 1)})
    communicates as predicted: batch 1.07 MB in 3 collectives
    """
    names = lambda axes: (axes,) if isinstance(axes, str) else tuple(axes)
    order = [*(mesh.axis_names if mesh is not None else ()), "?"]
    wanted = {tuple(sorted(names(axes), key=_place(order, axes))): count
              for axes, count in expected.items()}
    moved = collectives(compiled, mesh)
    found = {axes: moved.along(*axes) for _, axes in moved}
    for axes in sorted(wanted.keys() | found.keys()):
        predicted, bytes_found = wanted.get(axes, 0), found.get(axes, Moved(0, 0)).bytes
        if predicted != bytes_found:
            raise ProofFailed(
                f"along {', '.join(axes)}: expected {predicted:,} bytes on one device, found "
                f"{bytes_found:,}. All that moves:\n{moved!r}",
                leaf=axes, expected=predicted, found=bytes_found)
    parts = [f"{', '.join(axes)} {sized_bytes(each.bytes)} in {each.count}"
             for axes, each in found.items()]
    if parts:
        parts[0] += " collective" + "s" * (next(iter(found.values())).count != 1)
    return Verdict(f"communicates as predicted: {'; '.join(parts) or 'nothing'}", moved=moved)


def _place(order, axes):
    def place(name):
        if name not in order:
            raise ValueError(f"expected axes among {', '.join(order[:-1])}, found {axes!r}")
        return order.index(name)

    return place


def assert_divided(compiled, devices, useful, factor=1.0, rtol=0.01):
    """Prove that the devices together do the useful work `factor` times, and no more or less.

    compiled: `jax.stages.Compiled`, or HLO text. devices: how many run it. useful: the FLOPs of
    the products that the whole step needs, from a formula. factor: 1.0, or 4/3 where the forward
    pass is computed again. Raises ProofFailed with both figures; and what `work` raises.

    >>> assert_divided(compiled, mesh.size, useful=3 * 2 * B * D * F)
    work divided: 23.4 GFLOP a device x 8 = 1.000 x 187 GFLOP useful
    """
    each = work(compiled)
    found = each * devices / useful
    line = (f"{scaled(each, 'FLOP')} a device x {devices} = {found:.3f} x "
            f"{scaled(useful, 'FLOP')} useful")
    if abs(found - factor) > rtol * factor:
        raise ProofFailed(f"work: expected {factor:.3f} x the useful FLOPs over {devices} devices, "
                          f"found {line}", leaf="work", expected=factor, found=found)
    return Verdict(f"work divided: {line}", flops=each, factor=found)
