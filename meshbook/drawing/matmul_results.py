"""The arrays that the matmuls of programs write, all at one scale: where the parentheses matter."""

import math
from collections.abc import Mapping
from typing import Any

from meshbook.drawing import lowering, svg
from meshbook.hlo import flops

HIGH, COLUMN = 118.0, 48.0  # the longest side, and the least room for one array, pixels


def draw_matmul_results(programs: Mapping[str, Any]):
    """Draw the result of every matmul of compiled programs {title: program}, side by side.

    Sizes are those of one device, as in the compiled program, and below each title stand the FLOPs
    of all its matmuls. Raises ValueError where a program has no matmul, or one whose result is not
    a matrix.
    """
    found = {title: _results(title, program) for title, program in programs.items()}
    scale = HIGH / max(side for shapes in found.values() for dims in shapes for side in dims)
    body, x, said = [], 0.0, []
    for title, shapes in found.items():
        done = f"{flops.work(programs[title]) / 1e6:,.0f} MFLOP"
        body += [svg.text(x, 12, title, 12, "start", font_weight="600"),
                 svg.text(x, 28, done, 12, "start")]
        left = x
        for rows, columns in shapes:
            wide, high = max(columns * scale, 2.0), max(rows * scale, 2.0)
            room = max(wide, COLUMN)
            body.append(svg.rectangle(left + (room - wide) / 2, 40 + (HIGH - high) / 2, wide, high,
                                      fill=svg.KINDS[0], data_shape=f"{rows}x{columns}"))
            body.append(svg.text(left + room / 2, HIGH + 56, f"{rows}×{columns}", 11))
            left += room + 6
        x = max(left, x + svg.text_width(title, 12)) + 14
        listed = ", ".join(f"{rows} by {columns}" for rows, columns in shapes)
        said.append(f"{title}: {listed}; {done}")
    alt = f"The results of the matmuls at one scale. {'. '.join(said)}"
    return svg.picture("".join(body), x - 14, HIGH + 62, alt, shown=1.3 * x)


def _results(title, program):
    shapes = [each.dims for each in lowering.operations(program) if each.kind == "matmul"]
    if not shapes or any(len(dims) != 2 or not math.prod(dims) for dims in shapes):
        raise ValueError(f"expected matmuls that write matrices in {title!r}; found {shapes}")
    return shapes
