"""How many random words one device draws in a compiled program, counted by the xors of Threefry.

Threefry goes through 20 rounds, each of which is the xor of a sum and a rotated word, and at the
end JAX joins two words to one by a last xor, of two sums.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""
import collections
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from meshbook.hlo import execution, module

KEYS = "_threefry_fold_in", "_threefry_split"  # these make keys


def random_words(compiled: Any,
                 taken: Mapping[str, Sequence[float | int | Fraction]] | None = None):
    """Words of 32 bits that one device draws with Threefry, loops multiplied.

    Keys are left out, and arrays of one word. Other generators, such as that of `impl="rbg"`, count
    0. compiled, taken, and what is raised: as of `meshbook.proofs.work`.
    """
    words = execution.tally(module.parse(compiled), _words, taken)["words"]
    return int(words) if words == int(words) else float(words)


def _words(computation, instruction):
    """The words that one instruction is the last step of; None where it is no such step."""
    if instruction.opcode != "xor" or instruction.shape.dtype != "u32":
        return None
    rotated = any(computation[name].opcode == "or" for name in instruction.operands)
    drawn = instruction.op_name.endswith("xor") and not any(
        name in instruction.op_name for name in KEYS)
    size = instruction.shape.size
    return collections.Counter(words=size if drawn and not rotated and size > 1 else 0)
