"""Tokens on their way to experts, and how evenly experts are loaded, over training and at its end.

An expert has the colour of the device that holds it, a token that of the device that sends it.
"""

from collections.abc import Sequence

from meshbook.drawing import svg

TOKEN, GAP, MIDDLE, SLOT = 19.0, 9.0, 150.0, 21.0  # pixels


def draw_dispatch(homes: Sequence[int], sent: Sequence[Sequence[tuple[int, bool]]],
                  owners: Sequence[int], slots: int, alt: str):
    """Draw tokens on the left, experts with their slots on the right, and a line for each choice.

    homes: the device that each token is on; sent: for each token (expert, whether it got a slot) of
    every expert that it chose; owners: the device that holds each expert; slots: of each expert, at
    least. A choice without a slot ends in a cross before its expert. Raises ValueError for an
    expert that there is not.
    """
    if strange := [e for choices in sent for e, _ in choices if not 0 <= e < len(owners)]:
        raise ValueError(f"expected experts 0 to {len(owners) - 1}; found {strange[0]}")
    filled = [[n for n, choices in enumerate(sent) if (e, True) in choices]
              for e in range(len(owners))]
    slots = max(slots, *map(len, filled))
    places, end = _stacked(homes, TOKEN)
    pitch = max(26.0, end / len(owners))
    middles = [22 + pitch * (e + 0.5) for e in range(len(owners))]
    left, right = 66.0, 66.0 + TOKEN + MIDDLE
    body = [svg.text(left + TOKEN / 2, 11, "tokens", 11),
            svg.text(right + slots * SLOT / 2, 11, "slots of experts", 11)]
    for n, choices in enumerate(sent):
        for e, kept in choices:
            body += _route(left + TOKEN, places[n] + TOKEN / 2, right, middles[e], homes[n], kept,
                           (n, e))
    for n, home in enumerate(homes):
        body += _square(left, places[n], TOKEN - 2, home, n)
        if n == 0 or homes[n - 1] != home:
            body.append(svg.text(0, places[n] + 13, f"device {home}", 11, "start"))
    for e, owner in enumerate(owners):
        top = middles[e] - SLOT / 2
        body.append(svg.rectangle(right - 3, top - 3, slots * SLOT + 5, SLOT + 5, rx=4,
                                  stroke=svg.device_colour(owner), stroke_width=2.5))
        body += [svg.frame(right + SLOT * at, top, SLOT - 2, SLOT - 2) for at in range(slots)]
        for at, n in enumerate(filled[e]):
            body += _square(right + SLOT * at, top, SLOT - 2, homes[n], n)
        body.append(svg.text(right + slots * SLOT + 10, middles[e] + 4,
                             f"expert {e}, device {owner}", 11, "start"))
    wide = right + slots * SLOT + 14 + svg.text_width("expert 00, device 0")
    return svg.picture("".join(body), wide, max(end, 22 + pitch * len(owners)) + 6, alt,
                       shown=1.35 * wide)


def _stacked(homes, pitch):
    """(the top of each token, the end of the column): a gap between those of two devices."""
    places, y = [], 22.0
    for n, home in enumerate(homes):
        y += GAP * (n > 0 and homes[n - 1] != home)
        places.append(y)
        y += pitch
    return places, y


def _square(x, y, side, device, number):
    """A token: a square in its device's colour, with its number."""
    colour = svg.device_colour(device)
    return [svg.rectangle(x, y, side, side, fill=colour, rx=2, data_token=str(number)),
            svg.text(x + side / 2, y + side / 2 + 4, str(number), 10.5, fill=svg.ink(colour))]


def _route(x1, y1, x2, y2, device, kept, what):
    """A line from a token to an expert; one that got no slot stops short, at a cross."""
    name = {"data_route": f"{what[0]},{what[1]}", "data_kept": str(kept)}
    if kept:
        return [svg.element("line", x1=x1, y1=y1, x2=x2 - 5, y2=y2, stroke_width=1.6,
                            stroke=svg.device_colour(device), **name)]
    share = 0.6 + 0.08 * (what[0] % 4)  # crosses before one expert stand apart
    x, y = x1 + share * (x2 - x1), y1 + share * (y2 - y1)
    return [svg.line(x1, y1, x, y, 1.2, stroke_dasharray="3 3", stroke_opacity=0.7, **name),
            svg.line(x - 4, y - 4, x + 4, y + 4, 1.8), svg.line(x - 4, y + 4, x + 4, y - 4, 1.8)]


WIDE, HIGH, BESIDE, BAR = 230.0, 96.0, 44.0, 24.0


def draw_loads(panels: dict[str, Sequence[Sequence[float]]], steps: Sequence[int],
               owners: Sequence[int], alt: str):
    """Draw {title: loads}, loads[step][expert] in shares of an even load, as a line per expert.

    steps: the number of each training step; owners: the device of each expert, whose colour its
    line has. All panels have one scale. Raises ValueError where loads are not of these experts.
    """
    for title, loads in panels.items():
        if {len(row) for row in loads} != {len(owners)} or len(loads) != len(steps):
            raise ValueError(f"{title}: expected {len(steps)} rows of {len(owners)} loads")
    most = 1.05 * max(max(row) for loads in panels.values() for row in loads)
    body, at = [], 0
    for title, loads in panels.items():
        left, top = BESIDE + at % 2 * (WIDE + BESIDE), 20 + at // 2 * (HIGH + 52)
        body.append(svg.text(left, top - 7, title, 12, "start", font_weight="600"))
        body += _panel(left, top, loads, steps, owners, most)
        at += 1
    rows = -(-len(panels) // 2)
    wide = BESIDE + min(2, len(panels)) * (WIDE + BESIDE) - BESIDE + 8
    return svg.picture("".join(body), wide, rows * (HIGH + 52), alt, shown=1.25 * wide)


def _panel(left, top, loads, steps, owners, most):
    """One panel of `draw_loads`: its axes, the even load, and the experts' lines."""
    x = lambda step: left + WIDE * (step - steps[0]) / max(steps[-1] - steps[0], 1)
    y = lambda load: top + HIGH * (1 - load / most)
    body = [svg.frame(left, top, WIDE, HIGH)]
    for load in range(0, int(most) + 1, 1 if most < 5 else 2):
        body.append(svg.text(left - 5, y(load) + 4, str(load), 10.5, "end"))
    body += [svg.text(x(step), top + HIGH + 14, f"{step:,}", 10.5, anchor)
             for step, anchor in ((steps[0], "start"), (steps[-1], "end"))]
    body.append(svg.text(left + WIDE / 2, top + HIGH + 14, "step", 10.5))
    for expert, owner in enumerate(owners):
        points = " ".join(f"{svg.number(x(step))},{svg.number(y(row[expert]))}"
                          for step, row in zip(steps, loads))
        body.append(svg.element("polyline", points=points, fill="none", stroke_width=1.7,
                                stroke=svg.device_colour(owner), data_expert=str(expert)))
    body.append(svg.line(left, y(1), left + WIDE, y(1), 1.2, stroke_dasharray="4 3"))
    return body


def draw_dropping(panels: dict[str, tuple[Sequence[float], Sequence[float]]],
                  owners: Sequence[int], alt: str):
    """Draw {title: (loads before, loads after dropping)}, in shares of an even load.

    A bar per expert, of its device's colour; what was dropped is hollow. Raises ValueError where
    an expert has more after dropping than before.
    """
    for title, (before, after) in panels.items():
        for expert, (b, a) in enumerate(zip(before, after, strict=True)):
            if a > b + 1e-6:
                raise ValueError(f"{title}, expert {expert}: expected a load of at most {b:.3g} "
                                 f"after dropping, found {a:.3g}")
    most = 1.05 * max(max(before) for before, _ in panels.values())
    body, wide = [], BAR * len(owners) + 48
    for at, (title, (before, after)) in enumerate(panels.items()):
        left, top = at % 2 * wide, at // 2 * (HIGH + 58)
        body.append(svg.text(left, top + 12, title, 12, "start", font_weight="600"))
        for expert, owner in enumerate(owners):
            body += _bar(left + 4 + BAR * expert, top + 22, svg.device_colour(owner),
                         before[expert], after[expert], most)
            body.append(svg.text(left + 4 + BAR * (expert + 0.4), top + HIGH + 36, str(expert), 11))
        end, even = left + BAR * len(owners) + 4, top + 22 + HIGH * (1 - 1 / most)
        body += [svg.line(left, even, end, even, 1.2, stroke_dasharray="4 3"),
                 svg.text(end + 3, even + 4, "even", 11, "start")]
    across, rows = wide * min(2, len(panels)), -(-len(panels) // 2)
    return svg.picture("".join(body), across, rows * (HIGH + 58) - 10, alt, shown=1.2 * across)


def _bar(x, top, colour, before, after, most):
    """One expert of `draw_dropping`: what it kept, and hollow above it what was dropped."""
    y = lambda load: top + HIGH * (1 - load / most)
    kept = svg.rectangle(x, y(after), BAR - 5, y(0) - y(after), fill=colour,
                         data_kept=f"{after:.3f}")
    if before <= after:
        return [kept]
    lost = svg.rectangle(x + 0.75, y(before) + 0.75, BAR - 6.5,
                         max(y(after) - y(before) - 0.75, 0),
                         stroke=colour, stroke_width=1.5, stroke_dasharray="3 2",
                         data_dropped=f"{before - after:.3f}")
    return [kept, lost]
