"""What a matrix takes in memory where it is stored in whole tiles."""

from collections.abc import Mapping

from meshbook.drawing import svg

WIDE = 384.0  # pixels of the widest matrix


def draw_padding(matrices: Mapping[str, tuple[int, int]], tile: tuple[int, int] = (8, 128)):
    """Draw matrices {title: (rows, columns)} in their tiles, all to one scale.

    tile: rows and columns of a tile; the default is a TPU's. What the matrix fills is coloured,
    what its last tiles hold besides is left empty. Raises ValueError for sizes that are not
    positive.
    """
    stored = {title: tuple(-(-size // step) * step for size, step in zip(shape, tile, strict=True))
              for title, shape in matrices.items()}
    if not matrices or min(min(shape) for shape in matrices.values()) < 1:
        raise ValueError(f"expected matrices of at least one row and one column; found {matrices}")
    scale = WIDE / max(columns for _, columns in stored.values())
    body, told, y = [], [], 0.0
    for title, (rows, columns) in matrices.items():
        high, wide = stored[title]
        share = rows * columns / (high * wide)
        size = f"{rows:,} x {columns:,} in {high:,} x {wide:,}: {share:.0%} used"
        body += [svg.text(1, y + 12, title, 11, "start", font_weight="600"),
                 svg.text(1, y + 27, size, 11, "start")]
        y += 34
        body.append(svg.rectangle(1, y, scale * columns, scale * rows, fill=svg.KINDS[2],
                                  data_matrix=title))
        lines = [svg.line(1, y + scale * at, 1 + scale * wide, y + scale * at, 0.5,
                          stroke_opacity=0.6) for at in range(0, high + 1, tile[0])]
        lines += [svg.line(1 + scale * at, y, 1 + scale * at, y + scale * high, 1)
                  for at in range(0, wide + 1, tile[1])]
        body += lines
        y += scale * high + 12
        told.append(f"{title}: {size}")
    alt = f"Matrices in tiles of {tile[0]} x {tile[1]} elements. " + "; ".join(told)
    return svg.picture("".join(body), WIDE + 2, y - 8, alt, shown=480)
