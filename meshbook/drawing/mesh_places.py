"""The axes of a mesh, laid on a torus of chips: which chip is where."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int

from meshbook.drawing import svg

PITCH, RADIUS = 56.0, 20.0


def draw_places(coords: Int[np.ndarray, "..."], axes: Mapping[str, int]):
    """Planes of chips, each with its place along every axis of the mesh, coloured by the first.

    coords: the coordinates of the chips of a mesh, (*sizes of its axes, 3), as
    `meshbook.costs.places.placed` gives them; axes: {mesh axis: devices}, in this order. Planes
    are those of the torus's first coordinate.
    """
    sizes = tuple(axes.values())
    torus = [int(size) for size in coords.reshape(-1, 3).max(0) + 1]
    split = [at for at, size in enumerate(sizes) if size > 1]
    width, body, said = torus[2] * PITCH + 22, [], []
    for place in np.ndindex(*sizes):
        plane, row, column = (int(each) for each in coords[place])
        x, y = plane * width + 26 + PITCH * column, 52 + PITCH * row
        body += _links(x, y, row, column, torus)
        words = ",".join(str(place[at]) for at in split)
        colour = svg.device_colour(place[split[0]] if split else 0)
        body.append(svg.element("circle", cx=x, cy=y, r=RADIUS, fill=colour))
        body.append(svg.text(x, y + 4, words, 10 if len(words) > 5 else 12, fill=svg.ink(colour)))
        said.append(f"({plane},{row},{column}): {words}")
    body.sort(key=lambda each: not each.startswith("<line"))  # links lie below the chips
    for plane in range(torus[0]):
        body.append(svg.text(plane * width + 6, 16, f"first coordinate {plane}", 12, "start"))
    named = ", ".join(list(axes)[at] for at in split)
    y = 52 + PITCH * torus[1]
    body.append(svg.text(6, y, f"in each chip: its place along {named}", 12, "start"))
    if torus[0] > 1:
        y += 18
        body.append(svg.text(6, y, "equal places of neighbouring planes are linked, too", 12,
                             "start"))
    alt = (f"A mesh ({named}) of {math.prod(sizes)} chips on a torus of "
           f"{' by '.join(map(str, torus))}; coordinates and place: {'; '.join(said)}")
    return svg.picture("".join(body), torus[0] * width, y + 12, alt, shown=1.2 * torus[0] * width)


def _links(x: float, y: float, row: int, column: int, torus: Sequence[int]):
    """Lines to the next chip of the row and of the column; the ends are not linked."""
    ends = [(x + PITCH, y)] * (column + 1 < torus[2]) + [(x, y + PITCH)] * (row + 1 < torus[1])
    return [svg.element("line", x1=x, y1=y, x2=x2, y2=y2, stroke="currentColor", opacity=0.4)
            for x2, y2 in ends]
