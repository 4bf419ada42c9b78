"""Drawings of text: its tokens, where one of them looks, and the documents in a batch's rows."""

import html
import itertools
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real

import numpy as np
from jaxtyping import Array, Float, Int

from meshbook.drawing import svg

COLOURS = svg.DEVICES[:-1]  # grey is for what is no text


def colour_of(number: int):
    """The colour of a document or token; neighbours differ, colours repeat after seven."""
    return COLOURS[number % len(COLOURS)]


def visible(words: str):
    """Text with its spaces and line ends made visible."""
    return words.replace(" ", "·").replace("\n", "↵")


def flow(widths: Iterable[Real], pitch: Real):
    """Where boxes of these widths stand, in lines like words: their corners, and how wide it is."""
    corners, x, y, wide = [], 0.0, 0.0, 0.0
    for width in widths:
        if x and x + width > 480:
            x, y = 0.0, y + pitch
        corners.append((x, y))
        x += width + 3
        wide = max(wide, x)
    return corners, wide


def draw_tokens(pieces: Sequence[str], numbers: Sequence[int] | Int[Array | np.ndarray, "T"]):
    """Draw a text as its tokens: each in a box of its own, its number below, `·` for a space.

    pieces: the text of each token; numbers: its number in the vocabulary.
    """
    pieces = [visible(piece) for piece in pieces]
    widths = [8 + max(svg.text_width(piece, 13), svg.text_width(str(number), 10))
              for piece, number in zip(pieces, numbers, strict=True)]
    body, (corners, wide) = [], flow(widths, 44)
    for i, ((x, y), width) in enumerate(zip(corners, widths)):
        fill = colour_of(i)
        body.append(svg.rectangle(x, y + 2, width, 22, fill=fill, rx=3))
        body.append(svg.text(x + width / 2, y + 17, pieces[i], 13, fill=svg.ink(fill)))
        body.append(svg.text(x + width / 2, y + 36, str(numbers[i]), 10))
    words = ", ".join(f"{piece} is {number}" for piece, number in zip(pieces, numbers))
    alt = f"{len(pieces)} tokens, with · for a space: {words}"
    return svg.picture("".join(body), wide, corners[-1][1] + 42, alt, shown=1.25 * wide)


def draw_attention(pieces: Sequence[str], weights: Sequence[Real] | Float[Array | np.ndarray, "T"],
                   at: int | np.integer):
    """Draw where one token of a text looks: the stronger its colour, the more it looks there.

    pieces: the text of each token; weights: how much of its attention each token gets, from 0 to 1;
    at: the place of the token that looks, which is framed. What follows it is faint: it cannot be
    seen from there. Raises ValueError where it is looked at all the same.
    """
    pieces, weights = [visible(each.strip(" ") or each) for each in pieces], np.asarray(weights)
    if weights.shape != (len(pieces),) or weights[at + 1:].any():
        raise ValueError(f"expected a weight for each of {len(pieces)} tokens, 0 after token {at}; "
                         f"found shape {weights.shape}, and {weights[at + 1:].sum():.3g} after it")
    widths = [6 + svg.text_width(piece, 13) for piece in pieces]
    body, (corners, wide) = [], flow(widths, 28)
    for i, ((x, y), width) in enumerate(zip(corners, widths)):
        faint = {"opacity": 0.55} if i > at else {}
        body.append(svg.rectangle(x, y + 2, width, 22, fill=svg.SERIES[0], rx=3,
                                  fill_opacity=0.6 * weights[i] / weights.max()))
        body.append(svg.text(x + width / 2, y + 17, pieces[i], 13, **faint))
        if i == at:
            body.append(svg.frame(x, y + 2, width, 22))
    most = sorted(range(at + 1), key=lambda i: -weights[i])[:5]
    words = ", ".join(f"{weights[i]:.0%} at {pieces[i]} (token {i})" for i in most)
    alt = f"Where token {at}, {pieces[at]}, of {len(pieces)} looks: {words}"
    return svg.picture("".join(body), wide, corners[-1][1] + 26, alt, shown=1.25 * wide)


def draw_rows(owners_BT: Int[Array | np.ndarray, "B T"] | Sequence[Sequence[int]],
              names: Mapping[int, str] | None = None):
    """Draw the rows of a batch, a colour for each document; -1 is a place without text.

    owners_BT: the number of the document that each token is from; names {number: words} are shown
    by a pointer.
    """
    owners_BT = np.asarray(owners_BT)
    labels = [f"row {i}" for i in range(len(owners_BT))]
    left = 8 + max(svg.text_width(label, 11) for label in labels)
    scale, pitch, body, said = 400 / owners_BT.shape[1], 26.0, [], []
    for i, (label, owners) in enumerate(zip(labels, owners_BT, strict=True)):
        body.append(svg.text(0, 16 + pitch * i, label, 11, "start"))
        runs = [(owner, len(list(run))) for owner, run in itertools.groupby(owners.tolist())]
        at = left
        for owner, count in runs:
            body.append(run_of(at, 2 + pitch * i, scale * count, owner, (names or {}).get(owner)))
            at += scale * count
        parts = [f"{count} of {'padding' if owner < 0 else f'document {owner}'}"
                 for owner, count in runs]
        said.append(f"{label}: {', '.join(parts)}")
    if (owners_BT < 0).any():
        body.append(svg.frame(left, pitch * len(owners_BT) + 5, 18, 12))
        body.append(svg.text(left + 24, pitch * len(owners_BT) + 15, "padding", 11, "start"))
    high = pitch * len(owners_BT) + (22 if (owners_BT < 0).any() else 0)
    alt = f"Rows of {owners_BT.shape[1]} tokens by document. " + "; ".join(said)
    return svg.picture("".join(body), left + 401, high, alt, shown=1.25 * (left + 401))


def run_of(x: Real, y: Real, width: Real, owner: int, name: str | None):
    """The tokens of one document in a row, or an outline where there is no text."""
    if owner < 0:
        return svg.frame(x + 0.5, y, width - 1, 20)
    fill, title = colour_of(owner), svg.element("title", html.escape(name)) if name else ""
    box = svg.rectangle(x + 0.5, y, width - 1, 20, fill=fill, rx=2, body=title)
    if width < svg.text_width(str(owner), 11) + 4:
        return box
    return box + svg.text(x + width / 2, y + 14, str(owner), 11, fill=svg.ink(fill))
