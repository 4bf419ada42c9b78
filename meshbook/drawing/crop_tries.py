"""Rejection sampling of crops: the tries of each image, and the first of them that fits."""

from collections.abc import Sequence

from meshbook.drawing import svg

WIDE, LEFT, HIGH, DOT = 396.0, 60.0, 24.0, 14.0  # pixels: a row's first try, a try, one not needed


def draw_tries(sizes: Sequence[Sequence[tuple[int, int]]], side: int):
    """Draw the tries of each image in a row: crossed out, chosen, or a dot where not needed.

    sizes: for each image its tries (width, height) in pixels; side: of the image. A try fits if
    neither side is longer than the image's; the first that fits is chosen. Raises ValueError
    where an image has no tries.
    """
    if not sizes or not all(sizes):
        raise ValueError(f"expected at least one try for each image; found {list(sizes)}")
    colours = {"does not fit": svg.KINDS[1], "first that fits": svg.KINDS[2]}
    body, y = svg.key(colours, WIDE)
    told = []
    for image, tries in enumerate(sizes):
        chosen = first_that_fits(tries, side)
        needed = len(tries) if chosen is None else chosen + 1
        pitch = min(52.0, (WIDE - LEFT - DOT * (len(tries) - needed)) / needed)
        body.append(svg.text(0, y + 16, f"image {image}", 11, "start"))
        for place, (wide, high) in enumerate(tries[:needed]):
            box = _chosen if place == chosen else _rejected
            body.append(box(LEFT + pitch * place, y, pitch - 4, f"{wide}×{high}", place))
        for place in range(len(tries) - needed):
            x = LEFT + pitch * needed + DOT * (place + 0.5)
            body.append(svg.element("circle", cx=x, cy=y + HIGH / 2, r=2.5, data_unneeded=place,
                                    fill="currentColor", fill_opacity=0.5))
        at = "none fits" if chosen is None else f"takes try {needed} of {len(tries)}"
        told.append(f"image {image} {at}: {', '.join(f'{w}×{h}' for w, h in tries[:needed])}")
        y += HIGH + 6
    alt = f"Tries of crops in an image of {side}×{side}. " + "; ".join(told)
    return svg.picture("".join(body), WIDE, y, alt, shown=520)


def first_that_fits(tries: Sequence[tuple[int, int]], side: int):
    """The place of the first try with neither side longer than the image's, None for none."""
    return next((at for at, size in enumerate(tries) if max(size) <= side), None)


def _chosen(x, y, wide, words, place):
    """The try that counts, filled."""
    colour = svg.KINDS[2]
    return (svg.rectangle(x, y, wide, HIGH, fill=colour, rx=2, data_chosen=place)
            + svg.text(x + wide / 2, y + 16, words, 11, fill=svg.ink(colour)))


def _rejected(x, y, wide, words, place):
    """A try that does not fit, its size struck through."""
    colour, middle = svg.KINDS[1], y + HIGH / 2
    return (svg.rectangle(x + 0.75, y + 0.75, wide - 1.5, HIGH - 1.5, stroke=colour,
                          stroke_width=1.5, rx=2, data_rejected=place)
            + svg.text(x + wide / 2, y + 16, words, 11)
            + svg.element("line", x1=x + 5, y1=middle, x2=x + wide - 5, y2=middle,
                          fill="none", stroke=colour, stroke_width=2))
