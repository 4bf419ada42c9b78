"""Loading data: which work the host does and which the device, and the order of the examples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Array, Float, Int

from meshbook.drawing import svg

WIDE, HOST, DEVICE = 396.0, 150.0, 270.0  # pixels: the whole, the host's right, the device's left
STEP, PITCH = 24.0, 32.0


@dataclass(frozen=True)
class Pipeline:
    """The steps of a batch on the host and on the device, and the bytes that cross between them.

    each: how many of the host's steps, from the first, are done for one image after the other.
    """

    host: Sequence[str]
    device: Sequence[str]
    crossing: int
    each: int = 0


def draw_pipelines(pipelines: Mapping[str, Pipeline], batch_size: int):
    """Draw pipelines below each other: host on the left, device on the right.

    Steps that are done for each image are stacks of cards; the band that crosses is as thick as
    its bytes. Raises ValueError where a pipeline has no step on one of the sides.
    """
    most = max(each.crossing for each in pipelines.values())
    body, y, told = [], 0.0, []
    for title, pipeline in pipelines.items():
        if not pipeline.host or not pipeline.device:
            raise ValueError(f"{title}: expected steps on the host and on the device; found "
                             f"{list(pipeline.host)} and {list(pipeline.device)}")
        drawn, high = _pipeline(title, pipeline, batch_size, y, most)
        body += drawn
        y += high
        told.append(f"{title}: the host does {', '.join(pipeline.host)}; "
                    f"{svg.size_text(pipeline.crossing)} cross to the device, which does "
                    f"{', '.join(pipeline.device)}")
    return svg.picture("".join(body), WIDE, y - 14, ". ".join(told), shown=520)


def _pipeline(title, pipeline, batch_size, y, most):
    """(SVG elements, height) of one pipeline; the device goes on where the host ends."""
    top, last = y + 44, len(pipeline.host) - 1
    body = [svg.text(0, y + 13, title, 13, "start", font_weight="600"),
            svg.text(0, y + 34, "host", 11, "start"),
            svg.text(DEVICE, top + PITCH * last - 10, "device", 11, "start")]
    for place, words in enumerate(pipeline.host):
        often = place < pipeline.each
        body.append(_step(0, top + PITCH * place, HOST - 8 * often, words, often))
    for place, words in enumerate(pipeline.device, last):
        body.append(_step(DEVICE, top + PITCH * place, WIDE - DEVICE - 2, words, False))
    if pipeline.each:
        middle = top + (PITCH * (pipeline.each - 1) + STEP) / 2 + 5
        body.append(svg.text(HOST + 6, middle, f"× {batch_size}", 12, "start", font_weight="600"))
    body += _band(top + PITCH * last + STEP / 2, pipeline.crossing, most)
    return body, 64 + PITCH * (last + len(pipeline.device))


def _step(x, y, wide, words, often):
    """A box with words; one that is done often has the edges of two more cards behind it."""
    behind = ""
    for n in (3, 6) if often else ():
        right, low = x + 1 + wide + n, y + STEP + n
        edge = f"{right},{y + n} {right},{low} {x + 1 + n},{low}"
        behind += svg.element("polyline", points=edge, fill="none", stroke="currentColor",
                              stroke_opacity=0.7)
    return (behind + svg.rectangle(x + 1, y, wide, STEP, rx=3, stroke="currentColor",
                                   fill="#858585", fill_opacity=0.25)
            + svg.text(x + 1 + wide / 2, y + 16, words, 11))


def _band(y, crossing, most):
    """What crosses from the host to the device: an arrow as thick as its share of the most."""
    thick, tip = 24 * crossing / most, DEVICE - 3
    half = thick / 2 + 5
    head = f"{tip - 10},{y - half} {tip},{y} {tip - 10},{y + half}"
    words = svg.text((HOST + DEVICE) / 2, y + thick / 2 + 16, svg.size_text(crossing), 12,
                     font_weight="600")
    return [svg.rectangle(HOST + 5, y - thick / 2, tip - 14 - HOST, thick, fill=svg.KINDS[2],
                          data_bytes=crossing),
            svg.element("polygon", points=head, fill=svg.KINDS[2]), words]


@dataclass(frozen=True)
class Strip:
    """Examples in the order in which they are used, and who uses each: an index, -1 for none.

    first: the number of the first batch.
    """

    examples: Sequence[int]
    owners: Sequence[int]
    first: int = 0


def draw_order(strips: Mapping[str, Strip], batch_size: int, names: Sequence[str], none: str):
    """Draw the order of examples as strips of numbered cells, with a gap after each batch.

    names: of the owners, in the key; none: what is said of a batch that no one owns. Cells without
    an owner are hollow. Raises ValueError where a strip has not one owner for each example, or an
    owner has no name.
    """
    longest = max(len(strip.examples) for strip in strips.values())
    most = max(len(str(each)) for strip in strips.values() for each in strip.examples)
    pitch = min(max(20.0, svg.text_width("0" * most, 10.5) + 4),
                (WIDE - 8 * (longest // batch_size)) / longest)
    colours = {name: svg.SERIES[i % len(svg.SERIES)] for i, name in enumerate(names)}
    body, y = svg.key(colours, WIDE)
    told = []
    for title, strip in strips.items():
        if len(strip.owners) != len(strip.examples) or max(strip.owners) >= len(names):
            raise ValueError(f"{title}: expected one owner of {list(names)} for each of "
                             f"{len(strip.examples)} examples; found {list(strip.owners)}")
        body.append(svg.text(0, y + 12, title, 12, "start", font_weight="600"))
        for begin in range(0, len(strip.examples), batch_size):
            cells = range(begin, min(begin + batch_size, len(strip.examples)))
            left = pitch * begin + 8 * (begin // batch_size)
            used = any(strip.owners[at] >= 0 for at in cells)
            name = f"batch {strip.first + begin // batch_size}" if used else none
            body.append(svg.text(left + pitch * len(cells) / 2, y + 28, name, 10.5))
            for at in cells:
                body.append(_cell(left + pitch * (at - begin), y + 33, pitch - 2,
                                  strip.examples[at], strip.owners[at]))
        told.append(f"{title}: {'; '.join(_owned(strip, names))}")
        y += 64
    return svg.picture("".join(body), WIDE, y - 6, ". ".join(told), shown=520)


def _owned(strip, names):
    """What each owner has of a strip, in words."""
    for owner, name in enumerate(names):
        has = [str(e) for e, other in zip(strip.examples, strip.owners) if other == owner]
        if has:
            yield f"{name} has {', '.join(has)}"


def _cell(x, y, wide, example, owner):
    """One example's number, in its owner's colour."""
    if owner < 0:
        return svg.frame(x, y, wide, 20) + svg.text(x + wide / 2, y + 14, str(example), 10.5)
    colour = svg.SERIES[owner % len(svg.SERIES)]
    return (svg.rectangle(x, y, wide, 20, fill=colour, rx=2, data_owner=owner)
            + svg.text(x + wide / 2, y + 14, str(example), 10.5, fill=svg.ink(colour)))


def draw_taps(count: int, low: Int[Array | np.ndarray, "N"], high: Int[Array | np.ndarray, "N"],
              weight: Float[Array | np.ndarray, "N"]):
    """Draw how old pixels are mixed into new ones, old above and new below.

    count: the number of old pixels. New pixel i is (1 - weight[i]) of the old pixel low[i] and
    weight[i] of high[i]; lines are as thick as these shares.
    """
    across, drop, told = WIDE - 60, 62.0, []
    body = [svg.text(0, 16, "old", 11, "start"), svg.text(0, 30 + drop, "new", 11, "start")]
    centre = lambda i, n: 44 + across * (i + 0.5) / n
    for i, (a, b, share) in enumerate(zip(map(int, low), map(int, high), map(float, weight))):
        parts = {a: 1.0} if a == b else {a: 1 - share, b: share}
        for old, part in parts.items():
            if part:
                body.append(svg.line(centre(old, count), 23, centre(i, len(low)), drop + 14,
                                     5 * part, stroke_opacity=0.75, data_share=part))
        told.append(f"new {i}: " + " + ".join(f"{part:.2f} of old {old}"
                                              for old, part in parts.items() if part))
    for y, n, colour in (1, count, svg.KINDS[0]), (14 + drop, len(low), svg.KINDS[2]):
        for i in range(n):
            x = centre(i, n)
            body.append(svg.rectangle(x - 15, y, 30, 22, fill=colour, rx=2))
            body.append(svg.text(x, y + 15, str(i), 11, fill=svg.ink(colour)))
    return svg.picture("".join(body), WIDE, drop + 38, ". ".join(told), shown=480)
