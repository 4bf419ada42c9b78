"""Attention masks: which tokens of a row each token attends to."""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Array, Bool

from meshbook.drawing import svg

SIDE, GAP, TOP = 184.0, 24.0, 22.0


def draw_attention_masks(masks: Mapping[str, Bool[Array | np.ndarray, "T S"]]):
    """Draw masks {title: (T, T)} side by side: row t is filled where token t attends.

    Below each is the share of all pairs that it allows. Raises ValueError for a mask that is not
    square.
    """
    body, told = [], []
    for number, (title, mask_TS) in enumerate(masks.items()):
        mask_TS, x = np.asarray(mask_TS), number * (SIDE + GAP)
        if mask_TS.ndim != 2 or len(mask_TS) != len(mask_TS.T):
            raise ValueError(f"{title}: expected a mask of T·T, found shape {mask_TS.shape}")
        size = SIDE / len(mask_TS)
        body.append(svg.text(x, 12, title, 11, "start", font_weight="600"))
        for row, first, last in runs(mask_TS):
            body.append(svg.rectangle(x + size * first, TOP + size * row, size * (last - first),
                                      size, fill=svg.KINDS[0], shape_rendering="crispEdges"))
        body.append(svg.frame(x, TOP, SIDE, SIDE))
        words = f"{mask_TS.mean():.0%} of all pairs"
        body.append(svg.text(x, TOP + SIDE + 16, words, 11, "start"))
        told.append(f"{title}: {words}")
    width = len(masks) * (SIDE + GAP) - GAP
    body.append(svg.text(0, TOP + SIDE + 33, "row t, column s: token t attends to token s", 11,
                         "start"))
    return svg.picture("".join(body), width + 1, TOP + SIDE + 39, ". ".join(told),
                       shown=1.3 * width)


def runs(mask_TS: Bool[np.ndarray, "T S"]):
    """Yield (row, first column, column after the last) of the runs of True in each row."""
    for row, line in enumerate(mask_TS):
        edges = np.flatnonzero(np.diff(np.concatenate([[False], line, [False]])))
        for first, last in zip(edges[::2].tolist(), edges[1::2].tolist()):
            yield row, first, last
