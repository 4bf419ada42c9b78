"""Numbers and tables as text."""

from collections.abc import Sequence

import numpy as np


def sized_bytes(count: int | float | np.number) -> str:
    """A number of bytes in the unit that keeps three digits, decimal: 5.30 MB."""
    return scaled(count, "B")


def scaled(count: int | float | np.number, unit: str) -> str:
    """A number with a decimal prefix: 23.4 GFLOP."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(count) < 1000 or prefix == "T":
            digits = 0 if prefix == "" else 2 - int(np.log10(max(abs(count), 1)) // 1)
            return f"{count:.{max(digits, 0)}f} {prefix}{unit}"
        count /= 1000


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 0) -> str:
    """A table as text; the last `numbers` columns stand to the right."""
    widths = [max(len(row[at]) for row in [header, *rows]) for at in range(len(header))]
    left = len(header) - numbers
    lines = (
        [cell.ljust(width) if at < left else cell.rjust(width)
         for at, (cell, width) in enumerate(zip(row, widths, strict=True))]
        for row in [header, *rows]
    )
    return "\n".join("  ".join(line).rstrip() for line in lines)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 0) -> str:
    """A table as Markdown; the last `numbers` columns stand to the right."""
    rule = [":--"] * (len(header) - numbers) + ["--:"] * numbers
    cells = [header, rule, *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
                     for row in cells)
