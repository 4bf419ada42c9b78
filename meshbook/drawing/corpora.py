"""A corpus: the way of documents into shards, and where the rows of batches come from."""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from meshbook.drawing import svg

WIDE, HIGH, LEFT = 430.0, 24.0, 62.0


def draw_way(pieces: Sequence[Sequence[int]], shard_tokens: int):
    """Draw how documents of pieces become one stream and shards; pieces: tokens of each document.

    A colour is a piece, a mark the END that opens a document. Widths are numbers of tokens.
    """
    total = sum(map(sum, pieces)) + 1
    shards = -(-total // shard_tokens)
    gaps = max(len(pieces), shards) - 1
    scale = (WIDE - LEFT - 2 - 6 * gaps) / total
    body, told = [], []
    rows = {"pieces": _breaks(np.cumsum([sum(each) for each in pieces])[:-1]),
            "stream": _breaks([]),
            "shards": _breaks(range(shard_tokens, total, shard_tokens))}
    for row, (name, shift) in enumerate(rows.items()):
        y = 18.0 + row * 62
        body.append(svg.text(0, y + 16, name, 12, "start", font_weight="600"))
        at = 0
        for number, documents in enumerate(pieces):
            for tokens in documents:
                body += _document(at, at + tokens, shift, scale, y, number)
                at += tokens
        body.append(_mark(LEFT + scale * at + shift(at), y))
        if row:
            x = LEFT + (WIDE - LEFT) / 2
            body.append(svg.arrow(x, y - 34, x, y - 8))
    for number in range(len(pieces)):
        told.append(f"piece {number} has documents of "
                    f"{', '.join(map(str, pieces[number]))} tokens")
    for number in range(shards):
        x = LEFT + scale * number * shard_tokens + 6 * number
        body.append(svg.text(x, 18 + 124 + HIGH + 15, f"shard {number}", 10.5, "start"))
    alt = (f"{'; '.join(told)}. Put one behind the other, with an END at the end, they are a "
           f"stream of {total} tokens, cut into {shards} shards of {shard_tokens} tokens, the last "
           f"with {total - (shards - 1) * shard_tokens}. Cuts go through documents.")
    return svg.picture("".join(body), WIDE, 18 + 124 + HIGH + 22, alt, shown=560)


def _breaks(places):
    """A function from a token to the gaps before it, 6 pixels for each break at or before it."""
    places = list(places)
    return lambda at: 6.0 * sum(place <= at for place in places)


def _document(begin, end, shift, scale, y, piece):
    """A document's tokens, in as many boxes as breaks make of it, and the mark of its END."""
    cuts = [begin, *(at for at in range(begin + 1, end) if shift(at) != shift(at - 1)), end]
    colour = svg.SERIES[piece % 3]
    for left, right in zip(cuts, cuts[1:]):
        yield svg.rectangle(LEFT + scale * left + shift(left), y, scale * (right - left), HIGH,
                            fill=colour, data_tokens=right - left)
    yield _mark(LEFT + scale * begin + shift(begin), y)


def _mark(x, y):
    """An END: a line across the stream that stands out at both sides."""
    return svg.line(x, y - 4, x, y + HIGH + 4, 1.5)


def draw_origins(panels: Mapping[str, Float[np.ndarray, "batches B"]]):
    """Draw where in the corpus the rows of batches come from: a panel below the other.

    panels: by title, the place of each row of batches in their order, from 0 to 1.
    """
    body, told, y, high = [], [], 4.0, 104.0
    for number, (title, places_NB) in enumerate(panels.items()):
        body += [svg.text(LEFT, y + 12, title, 12, "start", font_weight="600"),
                 svg.frame(LEFT, y + 20, WIDE - LEFT - 2, high),
                 svg.text(LEFT - 6, y + 31, "end", 10.5, "end"),
                 svg.text(LEFT - 6, y + 18 + high, "beginning", 10.5, "end")]
        pitch = (WIDE - LEFT - 14) / max(1, len(places_NB) - 1)
        for batch, places in enumerate(places_NB.tolist()):
            for place in places:
                body.append(svg.element(
                    "circle", cx=LEFT + 6 + pitch * batch, cy=y + 20 + (1 - place) * (high - 8) + 4,
                    r=1.6, fill=svg.SERIES[number % len(svg.SERIES)]))
        spread = float(np.mean(np.ptp(places_NB, axis=1)))
        told.append(f"{title}: rows of a batch lie in {spread:.0%} of the corpus on average")
        y += high + 38
    said = f"{len(places_NB)} batches, in their order"
    body.append(svg.text(LEFT + (WIDE - LEFT) / 2, y - 2, said, 11))
    return svg.picture("".join(body), WIDE, y + 6, "; ".join(told), shown=560)
