"""Causal attention over split tokens: which device looks at which block of keys, and when."""

from collections.abc import Mapping, Sequence

from meshbook.drawing import svg

SIDE, TITLE, LEFT, GAP = 26.0, 40.0, 16.0, 30.0  # of a block; above, beside and between panels


def draw_meetings(panels: Mapping[str, Sequence[tuple[int, int, int, int]]], blocks: int,
                  alt: str | None):
    """Draw {title: meetings}, a square of blocks for each: rows are queries, columns are keys.

    A meeting is (block of queries, block of keys, device, step): the block has the device's colour
    and the step's number. It is pale where all keys stand behind all queries, so that nothing is
    seen. Raises ValueError for a block that is met twice, or is none of `blocks`.
    """
    drawn = []
    for title, meetings in panels.items():
        places = [(i, j) for i, j, _, _ in meetings]
        if len(set(places)) < len(places) or not all(
                0 <= each < blocks for place in places for each in place):
            raise ValueError(f"{title}: expected each of {blocks} x {blocks} blocks at most once; "
                             f"found {len(places)} meetings of {len(set(places))} blocks")
        drawn.append(_panel(title, meetings, blocks, alt))
    return svg.side_by_side(*drawn)


def _panel(title, meetings, blocks, alt):
    """One square, with its axes."""
    side = SIDE * blocks
    body = [svg.text(LEFT, 13, title, 12, "start", font_weight="600"),
            svg.text(LEFT + side / 2, 32, "keys", 11),
            svg.text(0, 0, "queries", 11,
                     transform=f"translate(10 {TITLE + side / 2}) rotate(-90)"),
            svg.frame(LEFT, TITLE, side, side)]
    for i, j, device, step in meetings:
        colour, x, y = svg.device_colour(device), LEFT + j * SIDE, TITLE + i * SIDE
        pale = {"fill_opacity": 0.28} if j > i else {}
        body.append(svg.rectangle(x + 1, y + 1, SIDE - 2, SIDE - 2, fill=colour, rx=2,
                                  data_device=str(device), data_step=str(step), **pale))
        ink = {} if j > i else {"fill": svg.ink(colour)}
        body.append(svg.text(x + SIDE / 2, y + SIDE / 2 + 4, str(step), 12, **ink))
    wide = LEFT + side + 2
    return svg.picture("".join(body), wide, TITLE + side + 4, f"{title}. {alt}", shown=1.25 * wide)
