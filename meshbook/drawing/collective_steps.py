"""A collective step by step: what each device holds, whose numbers they are, what was sent.

The picture shows all steps beside each other. On the site, a script (`steps.js`) shows one at a
time, and adds buttons.
"""

from collections.abc import Sequence
from html import escape
from numbers import Real

from meshbook.drawing import svg
from meshbook.drawing.collective_states import Piece, Send, Step, sent_pieces, steps_of

COSTS = {  # bytes on the wire per device, of a result of n bytes in a group of k
    "all-reduce": "2n(k − 1)/k", "all-gather": "n(k − 1)/k", "reduce-scatter": "n(k − 1)",
    "all-to-all": "n(k − 1)/k", "collective-permute": "n",
}
PLAIN = "margin:4px 0 0;font:inherit;color:inherit;text-align:left"  # whatever a theme does
BYTES = 4  # of a number in float32
LEFT, CELL, ROW = 28.0, 30.0, 32.0  # where slots begin, and how far they and devices are apart


def draw_collective(kind: str, numbers: Sequence[Sequence[Real]], name: str | None = None):
    """Draw a collective of few numbers, a small picture for each step.

    A number has the colour of the device that it came from. A sum has stripes instead: one for each
    device, filled once that device's number is in it. A thick frame is around what has just
    arrived. kind, numbers: as in `steps_of`, which raises ValueError for others, of four bytes
    each; name: of the function in JAX.
    """
    steps = steps_of(kind, numbers)
    k, count = len(numbers), len(steps) - 1
    result = BYTES * sum(piece is not None for piece in steps[-1].held[0])
    so_far = [BYTES * max(sent_pieces(steps[: at + 1]).values(), default=0)
              for at in range(count + 1)]
    cost = (f"{count} step{'s' * (count > 1)}. Each device sends {so_far[-1]} bytes: "
            f"{COSTS[kind]}, with n = {result} bytes and k = {k} devices.")
    title = f"{name} ({kind})" if name else kind
    drawn = "".join(_state(at, step, count, so_far[at]) for at, step in enumerate(steps))
    grid = "display:grid;grid-template-columns:repeat(auto-fill,minmax(140px,1fr));gap:6px 14px"
    html = (f'<figure class="collective" data-kind="{kind}" style="margin:8px 0;max-width:700px">'
            f'<div style="font-weight:600">{escape(title)}</div>'
            f'<div class="collective-steps" style="{grid}">{drawn}</div>'
            f'<figcaption style="{PLAIN}">{escape(cost)}</figcaption></figure>')
    last = _told(steps[-1])
    return svg.Picture(html, svg.checked_alt(f"{title} on {k} devices. {cost} At the end: {last}"))


def _state(at, step, count, sent):
    """One step: its number, what is done in it, and a picture of what is held then.

    sent: wire bytes of a device until now.
    """
    name = "Start" if at == 0 else f"Step {at} of {count}"
    arrived = {(each.target, each.to): each for each in step.sends}
    body = []
    for device, row in enumerate(step.held):
        y = 4 + ROW * device
        colour = svg.device_colour(device)
        body.append(svg.element("circle", cx=11, cy=y + 13, r=10, fill=colour))
        body.append(svg.text(11, y + 17, str(device), 12, fill=svg.ink(colour)))
        body += [_slot(LEFT + CELL * slot, y, piece, len(step.held), (device, slot),
                       arrived.get((device, slot))) for slot, piece in enumerate(row)]
    width, height = LEFT + CELL * len(step.held[0]) + 2, ROW * len(step.held) + 4
    label = f"{name}: {step.words}, {sent} bytes sent. {_told(step)}"
    drawn = svg.root("".join(body), width, height, label, shown=190)
    return (f'<div class="collective-step" data-step="{at}">'
            '<div style="font-size:13px;line-height:1.3;min-height:2.6em">'
            f'<b>{name.partition(" of")[0]}</b>: {sent} bytes sent<br>{escape(step.words)}</div>'
            f"{drawn}</div>")


def _told(step):
    """What each device holds, in words."""
    rows = [", ".join(f"{piece.value:g}" for piece in row if piece) or "nothing"
            for row in step.held]
    return "; ".join(f"device {device} holds {row}" for device, row in enumerate(rows))


def _slot(x: Real, y: Real, piece: Piece | None, k: int, place: tuple[int, int],
          came: Send | None):
    """One slot of a device, with data from which a test reads what is shown."""
    if piece is None:
        return svg.rectangle(x, y, CELL - 4, 26, stroke="currentColor", rx=2, stroke_opacity=0.3,
                             stroke_dasharray="2 3")
    words = f"{piece.value:g}"
    if len(piece.origins) == 1:
        colour = svg.device_colour(min(piece.origins))
        body = svg.rectangle(x, y, CELL - 4, 26, fill=colour, rx=2)
        body += svg.text(x + CELL / 2 - 2, y + 18, words, 13, fill=svg.ink(colour))
    else:
        body = svg.frame(x, y, CELL - 4, 26) + svg.text(x + CELL / 2 - 2, y + 13, words, 12)
        wide = (CELL - 8) / k
        for device in range(k):
            full = device in piece.origins
            body += svg.rectangle(
                x + 2 + wide * device, y + 17, wide - 1, 7,
                fill=svg.device_colour(device) if full else "none", stroke="currentColor",
                stroke_width=0.5, stroke_opacity=0.1 if full else 0.5)
    data = {"data_device": str(place[0]), "data_slot": str(place[1]), "data_value": words,
            "data_origins": ",".join(map(str, sorted(piece.origins)))}
    if came is None:
        return svg.element("g", body, **data)
    body += svg.rectangle(x, y, CELL - 4, 26, stroke="currentColor", rx=2, stroke_width=2)
    across = svg.number(CELL * (came.slot - came.to))
    down = svg.number(ROW * (came.source - came.target))
    return svg.element("g", body, class_="collective-arrived",
                       style=f"--across:{across}px;--down:{down}px", **data)
