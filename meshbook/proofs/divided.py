"""Is the work divided, and the old state's memory used again? Read from the compiled program."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from meshbook.hlo.flops import work
from meshbook.hlo.liveness import donated_arguments
from meshbook.hlo.module import parse
from meshbook.proofs.verdicts import ProofFailed, Verdict, leaf_count, path_name
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
    Raises ProofFailed with both figures; ValueError where there is no useful work; and what `work`
    raises.

    >>> assert_divided(compiled, mesh.size, useful=3 * 2 * B * D * F)
    work divided: 23.4 GFLOP per device x 8 = 1.000 x 187 GFLOP useful
    """
    if useful <= 0 or factor <= 0:
        raise ValueError(f"expected useful work and a factor above 0, found {useful} and {factor}")
    each = work(compiled, taken)
    found = each * devices / useful
    line = (f"{scaled(each, 'FLOP')} per device x {devices} = {found:.3f} x "
            f"{scaled(useful, 'FLOP')} useful")
    if abs(found - factor) > rtol * factor:
        raise ProofFailed(f"work: expected {factor:.3f} x the useful FLOPs over {devices} devices, "
                          f"found {line}", leaf="work", expected=factor, found=found)
    return Verdict(f"work divided: {line}", flops=each, factor=found)


def assert_donated(compiled: Any, held: int | np.integer,
                   state: int | str | Sequence[int | str] = 0):
    """Prove that a step returns its new state in the memory of the old one.

    compiled: `jax.stages.Compiled`. held: bytes of the state on one device, from a formula; so many
    bytes of the state must be aliased with results. state: which argument of the step it is, or
    which ones: positions, not counting static arguments, or names of arguments given by name.
    Raises ProofFailed with both figures, or with the leaves that are not donated; ValueError where
    there is no such argument or no byte to hold, and where the program does not say whose the
    aliased bytes are: it leaves arguments out that it does not use, and something else is donated
    besides the state.

    >>> assert_donated(compiled, held=3 * 4 * weights)
    donated: 1.37 MB per device, all of the state
    """
    if held <= 0:
        raise ValueError(f"expected a state of at least one byte, found {held}")
    found = compiled.memory_analysis().alias_size_in_bytes
    keys = [state] if isinstance(state, int | str) else list(state)
    others, kept = _others_and_kept(compiled, keys)
    if found >= held and kept:  # a TPU's tiles may make it more
        raise ProofFailed(f"donation: expected all leaves of the state to be donated, found "
                          f"{', '.join(kept[:4])} kept, {leaf_count(kept)} in all; the "
                          f"{found:,} bytes that are aliased are those of others",
                          leaf=kept[0], expected=held, found=0)
    found -= _aliased(compiled, others) if others and found >= held else 0
    if found < held:
        raise ProofFailed(f"donation: expected the {held:,} bytes of the state on one device to "
                          f"become the new state, found {found:,} bytes aliased",
                          leaf="donation", expected=held, found=found)
    return Verdict(f"donated: {sized_bytes(held)} per device, all of the state", bytes=found)


def _others_and_kept(compiled, keys):
    """(numbers of donated leaves that are not the state's, names of its leaves that are not)."""
    args, kwargs = compiled.args_info
    known = {**dict(enumerate(args)), **kwargs}
    if unknown := [key for key in keys if key not in known]:
        raise ValueError(f"expected arguments of the step, {', '.join(map(str, known))} (those "
                         f"that are not static); found {unknown[0]!r}")
    leaves = jax.tree_util.tree_leaves_with_path((args, kwargs))
    of_state = [path[1].key if isinstance(path[1], jax.tree_util.DictKey) else path[1].idx
                for path, _ in leaves]
    others = [number for number, (_, info) in enumerate(leaves)
              if info.donated and of_state[number] not in keys]
    kept = [path_name(path[2:]) for number, (path, info) in enumerate(leaves)
            if of_state[number] in keys and not info.donated]
    return others, kept


def _aliased(compiled, numbers):
    """How many bytes of these leaves of the arguments are aliased on one device."""
    program = parse(compiled)
    entry = program.computations[program.entry].instructions.values()
    parameters = {int(each.literal): each.shape for each in entry if each.opcode == "parameter"}
    if len(parameters) != len(jax.tree.leaves(compiled.args_info)):
        raise ValueError("expected that only the state is donated, or that all arguments are used; "
                         f"found {len(numbers)} more donated leaves, and only {len(parameters)} "
                         f"of {len(jax.tree.leaves(compiled.args_info))} leaves used")
    return sum(parameters[number].tiled_bytes for number in set(donated_arguments(program).values())
               if number in numbers)
