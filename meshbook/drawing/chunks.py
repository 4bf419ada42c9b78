"""The loss in chunks: what would be in memory at once, and whose tokens a chunk has."""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Array, Bool, Int

from meshbook.drawing import svg


def draw_scores(tokens: int, embed: int, vocabulary: int, chunk: int):
    """Draw hidden states times head, and of the scores those of one chunk of tokens; float32.

    The areas are not to scale; their sizes in bytes are written on them.
    """
    bytes_of = lambda *shape: svg.size_text(4 * np.prod(shape, dtype=float))
    left, top, thin, wide, high, band = 2.0, 22.0, 66.0, 236.0, 150.0, 22.0
    x, y = left + thin + 16, top + 44 + 16  # of the scores
    at = y + 52  # of the chunk
    fill, mark = svg.KINDS[2], svg.KINDS[1]
    body = [
        svg.text(x, 14, f"head: D = {embed} rows, V = {vocabulary:,} columns", 10.5, "start"),
        svg.rectangle(x, top, wide, 44, fill=fill, fill_opacity=0.35, rx=2),
        svg.frame(x, top, wide, 44),
        svg.text(x + wide / 2, top + 26, bytes_of(embed, vocabulary), 11, font_weight="600"),
        svg.rectangle(left, y, thin, high, fill=fill, fill_opacity=0.35, rx=2),
        svg.frame(left, y, thin, high),
        svg.text(left + thin / 2, y + 18, "hidden", 10.5),
        svg.text(left + thin / 2, y + 33, bytes_of(tokens, embed), 11, font_weight="600"),
        svg.rectangle(x, y, wide, high, rx=2, stroke="currentColor", stroke_dasharray="4 3"),
        svg.text(x + wide / 2, y + 20, f"all scores: {tokens:,} x {vocabulary:,}", 11),
        svg.text(x + wide / 2, y + 36, bytes_of(tokens, vocabulary), 13, font_weight="600"),
        svg.rectangle(left, at, thin, band, fill=mark, rx=2),
        svg.rectangle(x, at, wide, band, fill=mark, rx=2),
        svg.text(x + wide / 2, at + 15, f"one chunk of {chunk:,} tokens: "
                 f"{bytes_of(chunk, vocabulary)}", 11, fill=svg.ink(mark), font_weight="600"),
        svg.arrow(x + wide / 2, at + band + 5, x + wide / 2, y + high - 6),
        svg.text(x + wide / 2 + 10, at + band + 34, "chunk after chunk", 10.5, "start"),
    ]
    alt = (f"Hidden states of {tokens:,} tokens times a head of {vocabulary:,} columns. All scores "
           f"take {bytes_of(tokens, vocabulary)}; those of a chunk of {chunk:,} tokens take "
           f"{bytes_of(chunk, vocabulary)}, and the loop goes from chunk to chunk.")
    return svg.picture("".join(body), x + wide + 2, y + high + 3, alt, shown=420)


def draw_chunks(owners_BT: Int[Array | np.ndarray, "B T"],
                chunks: Mapping[str, Bool[Array | np.ndarray, "B T"]], names: Sequence[str]):
    """Draw a batch for each way of cutting it, with the tokens of its first chunk filled.

    owners_BT: the number of the group that holds each token, whose device colour it has;
    chunks {title: which tokens are in the first turn of the loop}; names: of the groups.
    """
    owners_BT = np.asarray(owners_BT)
    (B, T), gap, wide = owners_BT.shape, 22.0, 112.0
    size, body, told = wide / T, [], []
    for number, (title, chunk_BT) in enumerate(chunks.items()):
        x = number * (wide + gap)
        body.append(svg.text(x, 12, title, 11, "start", font_weight="600"))
        busy = set()
        for (b, t), inside in np.ndenumerate(np.asarray(chunk_BT)):
            colour = svg.device_colour(int(owners_BT[b, t]))
            busy |= {int(owners_BT[b, t])} if inside else set()
            body.append(svg.rectangle(
                x + t * size, 22 + b * size, size - 1.5, size - 1.5, fill=colour, rx=1.5,
                fill_opacity=1 if inside else 0.2))
        words = f"{len(busy)} of {len(names)} groups work"
        body.append(svg.text(x, 40 + B * size, words, 10, "start"))
        told.append(f"{title}: in the first turn {words}")
    y, colours = 52 + B * size, {name: svg.device_colour(i) for i, name in enumerate(names)}
    width = len(chunks) * (wide + gap) - gap
    squares, high = svg.key(colours, width)
    body.append(svg.element("g", "".join(squares), transform=f"translate(0 {svg.number(y)})"))
    return svg.picture("".join(body), width, y + high, ". ".join(told), shown=1.3 * width)
