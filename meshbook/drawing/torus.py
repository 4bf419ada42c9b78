"""Chips and the links between them: a grid, or a torus, and the mesh axis that uses each link."""

import math
from collections.abc import Sequence

import numpy as np

from meshbook.drawing import svg

AXES = (svg.KINDS[0], svg.KINDS[2])  # of the links that the first and the second mesh axis use
NAMED = {  # of mesh axes by name
    "batch": AXES[0], "expert": svg.SERIES[3], "stage": svg.KINDS[1], "context": svg.SERIES[4],
    "model": AXES[1]}
PITCH, RADIUS = 62.0, 13.0
CHIP = svg.SERIES[4]  # grey: no device has it


def links(shape: Sequence[int], ring: bool):
    """{(chip, chip): the axis along which they are linked}, chips by their place in the grid.

    shape: chips along each of two axes; ring: whether the ends of each row and column are linked,
    where that is not the link between two neighbours.
    """
    found = {}
    for place in np.ndindex(*shape):
        for axis, size in enumerate(shape):
            following = list(place)
            following[axis] = (place[axis] + 1) % size
            is_end = place[axis] == size - 1
            if size > 1 and not (is_end and (not ring or size == 2)):
                found[place, tuple(following)] = axis
    return found


def hops(shape: Sequence[int], ring: bool):
    """How many links lie between the first chip and each of them: an array of this shape."""
    neighbours = {place: set() for place in np.ndindex(*shape)}
    for one, other in links(shape, ring):
        neighbours[one].add(other)
        neighbours[other].add(one)
    first = (0,) * len(shape)
    away, edge = {first: 0}, [first]
    while edge:
        place = edge.pop(0)
        for other in sorted(neighbours[place] - away.keys()):
            away[other] = away[place] + 1
            edge.append(other)
    return np.array([away[place] for place in np.ndindex(*shape)]).reshape(shape)


def draw_torus(shape: Sequence[int], names: Sequence[str], ring: bool, title: str):
    """Draw a grid of chips with their links, and in each chip its distance from the first.

    shape: chips along two axes; names: of the mesh axes that are laid along them; ring: whether the
    ends of rows and columns are linked. A link has the colour of the axis whose collectives use it;
    chips have none, since there may be more of them than colours of devices.
    """
    away, (rows, columns) = hops(shape, ring), shape
    left, top = 34.0, 62.0
    at = lambda place: (left + PITCH * place[1], top + PITCH * place[0])
    body = [svg.text(0, 12, title, 12, "start", font_weight="600")]
    for (one, other), axis in links(shape, ring).items():
        body.append(_link(*at(one), *at(other), axis, abs(one[axis] - other[axis]) > 1))
    for place in np.ndindex(*shape):
        x, y = at(place)
        body.append(svg.element("circle", cx=x, cy=y, r=RADIUS, fill=CHIP))
        body.append(svg.text(x, y + 4.5, str(away[place]), 13, fill=svg.ink(CHIP)))
    width = max(300.0, left + PITCH * (columns - 1) + 44)
    y = top + PITCH * (rows - 1) + 34
    words = {f"links along {name}": colour for name, colour in zip(names, AXES, strict=True)}
    squares, tall = svg.key(words, width)
    body.append(svg.element("g", "".join(squares), transform=f"translate(0 {svg.number(y)})"))
    note = f"number: hops from the first chip, at most {away.max()}"
    body.append(svg.text(0, y + tall + 6, note, 11, "start"))
    ends = "linked" if ring else "not linked"
    alt = (f"{title}: {math.prod(shape)} chips in {rows} rows and {columns} columns, the ends "
           f"{ends}. {names[0]} runs along the columns, {names[1]} along the rows. Hops from the "
           f"first chip, row by row: {'; '.join(' '.join(map(str, row)) for row in away)}")
    return svg.picture("".join(body), width, y + tall + 14, alt, shown=1.1 * width)


def _link(x1, y1, x2, y2, axis, around):
    """A line between neighbours, or an arc past all chips between the two ends."""
    style = {"stroke": AXES[axis], "stroke_width": 4, "fill": "none", "data_axis": str(axis)}
    if not around:
        return svg.element("line", x1=x1, y1=y1, x2=x2, y2=y2, **style)
    bend = 30.0
    aside, above = (0, bend) if axis == 1 else (bend, 0)
    corners = (x1 - aside, y1 - above), (x2 - aside, y2 - above)
    points = [svg.number(each) for corner in (*corners, (x2, y2)) for each in corner]
    path = f"M{svg.number(x1)} {svg.number(y1)}C{' '.join(points)}"
    return svg.element("path", d=path, **style)
