"""A ring of devices, step by step: which piece each of them multiplies, and where it goes next."""

from collections.abc import Mapping, Sequence

from meshbook.drawing import svg

LEFT, WIDE, HIGH, GAP = 62.0, 40.0, 22.0, 34.0  # of a step's cell; between two steps
ROW, TITLE = 30.0, 40.0


def draw_ring(panels: Mapping[str, Sequence[Sequence[Sequence[int]]]], alt: str):
    """Draw {title: steps}, one panel under the other; a step says what each device multiplies.

    A step is a list with a tuple of pieces for each device. A piece has the number and the colour
    of the device whose tokens are in it, and a line leads from it to where it is multiplied in the
    next step. Raises ValueError for a step with another number of devices than the first.
    """
    body, y, right = [], 0.0, 0.0
    for title, steps in panels.items():
        devices = len(steps[0])
        body.append(svg.text(0, y + 13, title, 12, "start", font_weight="600"))
        for device in range(devices):
            body.append(svg.text(0, _centre(y, device) + 4, f"device {device}", 11, "start"))
        for at, step in enumerate(steps):
            if len(step) != devices:
                raise ValueError(f"{title}, step {at}: expected what each of {devices} devices "
                                 f"multiplies; found {len(step)}")
            x = LEFT + at * (WIDE + GAP)
            body.append(svg.text(x + WIDE / 2, y + 32, f"step {at}", 11))
            body += _moves(x, y, steps[at - 1], step) if at else []
            for device, pieces in enumerate(step):
                body += _pieces(x, _centre(y, device), pieces, (at, device))
            right = max(right, x + WIDE)
        y += TITLE + ROW * devices + 8
    return svg.picture("".join(body), right + 2, y, alt, shown=1.6 * right)


def _centre(y, device):
    return y + TITLE + ROW * device + HIGH / 2


def _moves(x, y, before, after):
    """Lines from where a piece was to the nearest device that has it now, round the ring."""
    body, devices = [], len(after)
    for device, pieces in enumerate(after):
        for piece in pieces:
            near = [other for other in ((device - 1) % devices, (device + 1) % devices)
                    if piece in before[other]]
            if near:
                body.append(svg.line(
                    x - GAP + 2, _centre(y, near[0]), x - 2, _centre(y, device), 1.2,
                    stroke_opacity=0.6, data_from=str(near[0]), data_to=str(device)))
    return body


def _pieces(x, centre, pieces, place):
    """The pieces that one device multiplies in a step, side by side."""
    body, wide = [], WIDE / max(len(pieces), 1)
    for at, piece in enumerate(pieces):
        colour = svg.device_colour(piece)
        body.append(svg.rectangle(x + at * wide, centre - HIGH / 2, wide - 1, HIGH, fill=colour,
                                  rx=2, data_place=f"{place[0]},{place[1]}", data_piece=str(piece)))
        body.append(svg.text(x + (at + 0.5) * wide, centre + 4, str(piece), 12,
                             fill=svg.ink(colour)))
    return body
