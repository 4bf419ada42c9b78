"""Rows of small boxes, each in one of a few states: seen or not, there or missing."""

import itertools
from collections.abc import Mapping, Sequence

from meshbook.drawing import svg

WIDE, HIGH, BOX = 396.0, 20.0, 26.0  # of all, of a row of boxes, of a box at most: pixels
AIR = 2.0  # at least, beside the words of a box


def draw_strips(rows: Mapping[str, Sequence[tuple[str, str]]], states: Mapping[str, str | None],
                alt: str):
    """Draw {row: [(words, state)]}, a box for each pair; the words stand in it where there is room.

    states: {state: its colour, or None for an outline}, in the order of the key; alt: what the
    picture says, to which the states of each row are added. Raises ValueError without boxes, and
    for a state that has no colour.
    """
    boxes = [state for row in rows.values() for _, state in row]
    if not boxes or not set(boxes) <= states.keys():
        raise ValueError(f"expected boxes with states of {', '.join(states)}; found "
                         f"{', '.join(dict.fromkeys(boxes)) or 'no boxes'}")
    left = 8.0 * any(rows) + max(svg.text_width(row) for row in rows)
    wide = min(BOX, (WIDE - left) / max(map(len, rows.values())))
    body, y = _key(states)
    for row, pairs in rows.items():
        body.append(svg.text(0, y + 14, row, 11, "start"))
        for at, (words, state) in enumerate(pairs):
            body.append(_box(left + wide * at, y, wide, words, state, states[state]))
        y += HIGH + 6
    told = "; ".join(f"{row}: {_runs(pairs)}".removeprefix(": ") for row, pairs in rows.items())
    return svg.picture("".join(body), WIDE, y, f"{alt} {told}", shown=560)


def _key(states):
    body, x = [], 0.0
    for state, colour in states.items():
        body += [svg.rectangle(x, 2, 10, 10, fill=colour, rx=2) if colour
                 else svg.frame(x + 0.5, 2.5, 9, 9), svg.text(x + 14, 11, state, 11, "start")]
        x += 28 + svg.text_width(state)
    return body, 22.0


def _box(x, y, wide, words, state, colour):
    place = {"data_state": state}
    box = (svg.rectangle(x + 0.5, y, wide - 1.5, HIGH, fill=colour, rx=2, **place) if colour
           else svg.rectangle(x + 1, y + 0.5, wide - 2.5, HIGH - 1, stroke="currentColor", rx=2,
                              stroke_opacity=0.55, **place))
    if not words or svg.text_width(words, 10) + AIR > wide:
        return box
    fill = {"fill": svg.ink(colour)} if colour else {}
    return box + svg.text(x + wide / 2, y + 14, words, 10, **fill)


def _runs(pairs):
    """The states of a row in words, such as 3 read, 1 not read."""
    runs = [(state, len(list(run))) for state, run in itertools.groupby(pair[1] for pair in pairs)]
    if len(runs) > 6:
        count = {state: sum(pair[1] == state for pair in pairs) for state, _ in runs}
        return ", ".join(f"{number} {state}" for state, number in count.items()) + ", mixed"
    return ", ".join(f"{number} {state}" for state, number in runs)
