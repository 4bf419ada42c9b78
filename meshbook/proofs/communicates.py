"""Does it communicate what was predicted, and nothing else? Read from the compiled program."""

from collections.abc import Mapping
from typing import Any

from meshbook.hlo.collectives import Moved, collectives
from meshbook.hlo.opcodes import COLLECTIVE
from meshbook.proofs.verdicts import ProofFailed, Verdict
from meshbook.text import sized_bytes


def assert_communicates(compiled: Any, mesh: Any, expected: Mapping,
                        taken: Mapping | None = None):
    """Prove that a program moves exactly what was predicted, by kind of collective and mesh axes.

    compiled: `jax.stages.Compiled`, or HLO text. expected: {(kind, axes): (count, bytes)}, such as
    {("all-reduce", "model"): (8, 8 * 4 * B * T * D)}: how many collectives one device takes part
    in, and the bytes of all their results on it; axes are a name or a tuple of names. What is not
    named must not be there. A count of None leaves the number open, where a compiler merges as it
    likes. taken: shares of the branches of conditionals, as `collectives` takes them. What a step
    sends outside of the program is not seen here: `assert_same_training` refuses
    it, and `meshbook.proofs.transfers` counts it.
    Raises ProofFailed, naming kind, axes, expected and found; ValueError for a kind or an axis that
    does not exist; and what `collectives` raises.

    >>> assert_communicates(compiled, mesh, {("all-reduce", "batch"): (1, 4 * (weights + 1))})
    communicates as predicted: all-reduce along batch 1.07 MB in 1
    """
    wanted = dict(_prediction(key, moved, mesh) for key, moved in expected.items())
    found = collectives(compiled, mesh, taken)
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
    if kind not in COLLECTIVE:
        raise ValueError(f"expected a kind among {', '.join(sorted(COLLECTIVE))}; found {kind!r}")
    if unknown := set(axes) - set(names):
        raise ValueError(f"expected axes among {', '.join(names)}, found {sorted(unknown)[0]!r}")
    return (kind, tuple(sorted(axes, key=names.index))), Moved(*moved)


def _amount(moved):
    count = "" if moved.count is None else f"{moved.count:,} with "
    return f"{count}{moved.bytes:,} bytes of results"
