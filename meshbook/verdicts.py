"""What a proof answers: a verdict in one line, or an error that says where it failed."""

import jax
import numpy as np


class ProofFailed(AssertionError):
    """A proof did not hold; the message names what was expected and what was found.

    Where the kind of fault has them, `leaf` (a path), `device`, `expected` and `found` are set.
    """

    def __init__(self, message, leaf=None, device=None, expected=None, found=None):
        super().__init__(message)
        self.leaf, self.device, self.expected, self.found = leaf, device, expected, found


class Verdict:
    """A proof that held: prints as one line; the figures behind it are attributes."""

    def __init__(self, line, **figures):
        self.line = line
        self.__dict__.update(figures)

    def __repr__(self):
        return self.line


def path_name(path):
    """The path of a leaf as readers write it: params/blocks/0/kernel."""
    return jax.tree_util.keystr(path, simple=True, separator="/") or "the array"


def named_leaves(tree, is_leaf=None):
    """The leaves of any pytree by the name of their path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return {path_name(path): leaf for path, leaf in leaves}


def device_name(device):
    """A device as messages call it: device 3 (cpu)."""
    return f"device {device.id} ({device.platform})"


def leaf_count(leaves):
    """How many leaves, in words: 1 leaf, 34 leaves."""
    return f"{len(leaves)} lea{'f' if len(leaves) == 1 else 'ves'}"


def sized_bytes(count):
    """A number of bytes in the unit that keeps three digits, decimal: 5.30 MB."""
    return scaled(count, "B")


def scaled(count, unit):
    """A number with a decimal prefix: 23.4 GFLOP."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(count) < 1000 or prefix == "T":
            digits = 0 if prefix == "" else 2 - int(np.log10(max(abs(count), 1)) // 1)
            return f"{count:.{max(digits, 0)}f} {prefix}{unit}"
        count /= 1000


def aligned(header, rows, numbers=0):
    """A table as text; the last `numbers` columns stand to the right."""
    widths = [max(len(row[at]) for row in [header, *rows]) for at in range(len(header))]
    left = len(header) - numbers
    lines = (
        [cell.ljust(width) if at < left else cell.rjust(width)
         for at, (cell, width) in enumerate(zip(row, widths, strict=True))]
        for row in [header, *rows]
    )
    return "\n".join("  ".join(line).rstrip() for line in lines)


def markdown(header, rows, numbers=0):
    """A table as Markdown; the last `numbers` columns stand to the right."""
    rule = [":--"] * (len(header) - numbers) + ["--:"] * numbers
    cells = [header, rule, *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
                     for row in cells)
