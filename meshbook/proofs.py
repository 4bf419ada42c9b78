"""Four proofs for any parallel program: none of them is implied by the others.

1. It is really sharded: `assert_sharded`, `by_letters`, `sharding_table`, `assert_replicas_equal`.
2. It is the same training: `assert_same_training`.
3. It communicates what was predicted: `collectives`, `assert_communicates`.
4. The work is divided: `work`, `assert_divided`.

Beside them, of memory: the state is donated, `assert_donated`. They take any pytree and any
compiled program, and need only jax and numpy: use them in the tests of your own project. Each
`assert_` returns a verdict that prints as one line, or raises ProofFailed.
"""

from meshbook.flops import work
from meshbook.sameness import Run, assert_same_training
from meshbook.sharding_table import sharding_table
from meshbook.shards import assert_replicas_equal, assert_sharded, by_letters
from meshbook.tallies import UnknownTripCount
from meshbook.traffic import KINDS, Moved, Traffic, collectives
from meshbook.verdicts import ProofFailed, Verdict, scaled, sized_bytes

__all__ = [
    "Moved", "ProofFailed", "Run", "Traffic", "UnknownTripCount", "Verdict",
    "assert_communicates", "assert_divided", "assert_donated", "assert_replicas_equal",
    "assert_same_training", "assert_sharded", "by_letters", "collectives", "sharding_table", "work",
]


def assert_communicates(compiled, mesh, expected):
    """Prove that a program moves exactly what was predicted, by kind of collective and mesh axes.

    compiled: `jax.stages.Compiled`, or HLO text. expected: {(kind, axes): (count, bytes)}, such as
    {("all-reduce", "model"): (8, 8 * 4 * B * T * D)}: how many collectives one device takes part
    in, and the bytes of all their results on it; axes are a name or a tuple of names. What is not
    named must not be there. A count of None leaves the number open, where a compiler merges as it
    likes. What a step sends outside of the program is not seen here: `assert_same_training` refuses
    it, and `meshbook.transfers` counts it.
    Raises ProofFailed, naming kind, axes, expected and found; ValueError for a kind or an axis that
    does not exist; and what `collectives` raises.

    >>> assert_communicates(compiled, mesh, {("all-reduce", "batch"): (1, 4 * (weights + 1))})
    communicates as predicted: all-reduce along batch 1.07 MB in 1
    """
    wanted = dict(_prediction(key, moved, mesh) for key, moved in expected.items())
    found = collectives(compiled, mesh)
    for kind, axes in sorted(wanted.keys() | found.keys()):
        predicted = wanted.get((kind, axes), Moved(0, 0))
        moved = found.get((kind, axes), Moved(0, 0))
        if predicted.bytes != moved.bytes or predicted.count not in (None, moved.count):
            raise ProofFailed(
                f"{kind} along {', '.join(axes)}: expected {_amount(predicted)} on one device, "
                f"found {_amount(moved)}. All that moves:\n{found!r}",
                leaf=(kind, axes), expected=predicted, found=moved)
    parts = [f"{kind} along {', '.join(axes)} {sized_bytes(each.bytes)} in {each.count}"
             for (kind, axes), each in found.items()]
    return Verdict(f"communicates as predicted: {'; '.join(parts) or 'nothing'}", moved=found)


def _prediction(key, moved, mesh):
    """((kind, axes in the order of the mesh), Moved), as `collectives` has them."""
    if not (isinstance(key, tuple) and isinstance(moved, tuple) and len(key) == len(moved) == 2):
        raise ValueError(f"expected {{(kind, axes): (count, bytes)}}, found {key!r}: {moved!r}")
    kind, axes = key
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    names = tuple(mesh.axis_names) if mesh is not None else ()
    if kind not in KINDS:
        raise ValueError(f"expected a kind among {', '.join(KINDS)}, found {kind!r}")
    if unknown := set(axes) - set(names):
        raise ValueError(f"expected axes among {', '.join(names)}, found {sorted(unknown)[0]!r}")
    return (kind, tuple(sorted(axes, key=names.index))), Moved(*moved)


def _amount(moved):
    count = "" if moved.count is None else f"{moved.count:,} with "
    return f"{count}{moved.bytes:,} bytes of results"


def assert_divided(compiled, devices, useful, factor=1.0, rtol=0.01, taken=None):
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


def assert_donated(compiled, held):
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
