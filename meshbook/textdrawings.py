"""Drawings of text: the tokens of a sentence, and the documents in the rows of a batch."""

import html
import itertools

import numpy as np

from meshbook import svg

COLOURS = svg.DEVICES[:-1]  # grey is for what is no text


def colour_of(number):
    """The colour of a document or token; neighbours differ, colours repeat after seven."""
    return COLOURS[number % len(COLOURS)]


def visible(words):
    """Text with its spaces and line ends made visible."""
    return words.replace(" ", "·").replace("\n", "↵")


def draw_tokens(pieces, numbers):
    """Draw a text as its tokens: each in a box of its own, its number below, `·` for a space.

    pieces: the text of each token; numbers: its number in the vocabulary.
    """
    body, x, y, wide = [], 0.0, 2.0, 0.0
    for i, (piece, number) in enumerate(zip(pieces, numbers, strict=True)):
        width = 8 + max(svg.text_width(visible(piece), 13), svg.text_width(str(number), 10))
        if x and x + width > 480:
            x, y = 0.0, y + 44
        fill = colour_of(i)
        body.append(svg.rectangle(x, y, width, 22, fill=fill, rx=3))
        body.append(svg.text(x + width / 2, y + 15, visible(piece), 13, fill=svg.ink(fill)))
        body.append(svg.text(x + width / 2, y + 34, str(number), 10))
        x += width + 3
        wide = max(wide, x)
    words = ", ".join(f"{visible(piece)} is {number}" for piece, number in zip(pieces, numbers))
    alt = f"{len(pieces)} tokens, with · for a space: {words}"
    return svg.picture("".join(body), wide, y + 40, alt, shown=1.25 * wide)


def draw_rows(owners_BT, names=None, labels=None, empty="padding"):
    """Draw the rows of a batch, a colour for each document; -1 is a place without text.

    owners_BT: the number of the document that each token is from; names {number: words} are shown
    by a pointer; labels: words before each row; empty: what the places of -1 are.
    """
    owners_BT = np.asarray(owners_BT)
    labels = labels or [f"row {i}" for i in range(len(owners_BT))]
    left = 8 + max(svg.text_width(label, 11) for label in labels)
    scale, pitch, body, said = 400 / owners_BT.shape[1], 26.0, [], []
    for i, (label, owners) in enumerate(zip(labels, owners_BT, strict=True)):
        body.append(svg.text(0, 16 + pitch * i, label, 11, "start"))
        runs = [(owner, len(list(run))) for owner, run in itertools.groupby(owners.tolist())]
        at = left
        for owner, count in runs:
            body.append(run_of(at, 2 + pitch * i, scale * count, owner, (names or {}).get(owner)))
            at += scale * count
        parts = [f"{count} of {empty if owner < 0 else f'document {owner}'}"
                 for owner, count in runs]
        said.append(f"{label}: {', '.join(parts)}")
    if (owners_BT < 0).any():
        body.append(svg.frame(left, pitch * len(owners_BT) + 5, 18, 12))
        body.append(svg.text(left + 24, pitch * len(owners_BT) + 15, empty, 11, "start"))
    high = pitch * len(owners_BT) + (22 if (owners_BT < 0).any() else 0)
    alt = f"Rows of {owners_BT.shape[1]} tokens by document. " + "; ".join(said)
    return svg.picture("".join(body), left + 401, high, alt, shown=1.25 * (left + 401))


def run_of(x, y, width, owner, name):
    """The tokens of one document in a row, or an outline where there is no text."""
    if owner < 0:
        return svg.frame(x + 0.5, y, width - 1, 20)
    fill, title = colour_of(owner), svg.element("title", html.escape(name)) if name else ""
    box = svg.rectangle(x + 0.5, y, width - 1, 20, fill=fill, rx=2, body=title)
    if width < svg.text_width(str(owner), 11) + 4:
        return box
    return box + svg.text(x + width / 2, y + 14, str(owner), 11, fill=svg.ink(fill))
