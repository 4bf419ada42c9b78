"""A step in microbatches over time: activations rise and fall for each, gradients are added up."""

from collections.abc import Mapping
from numbers import Real

from meshbook.drawing import svg


def draw_microbatches(steps: Mapping[str, tuple[int, Real]], batch: int):
    """Draw the activations of a step over time, for each number of microbatches.

    steps {title: (microbatches, peak in bytes)}: the peak is that of the activations; batch: the
    examples of a step. Forward takes a third of the time, backward two thirds; heights are to
    scale. Raises ValueError where microbatches do not divide the batch.
    """
    most = max(peak for _, peak in steps.values())
    left, wide, high, pitch = 0.0, 330.0, 66.0, 118.0
    body, told = [], []
    for row, (title, (count, peak)) in enumerate(steps.items()):
        if batch % count:
            raise ValueError(f"{count} microbatches do not divide a batch of {batch}")
        top = 4.0 + pitch * row
        floor, size = top + 20 + high, high * peak / most
        words = f"{title}: {svg.size_text(peak)} of activations"
        body.append(svg.text(left, top + 10, words, 11, "start", font_weight="600"))
        each = wide / count
        for turn in range(count):
            x = left + turn * each
            body += [slope(x, floor, each / 3, 0, size, svg.KINDS[0]),
                     slope(x + each / 3, floor, 2 * each / 3, size, 0, svg.KINDS[2])]
            label = f"{batch // count:,} examples" if count < 3 else f"{batch // count:,}"
            body.append(svg.text(x + each / 3, floor + 13, label, 10))
            if turn:
                body.append(svg.line(x, floor, x, floor + 6, 1))
        body.append(svg.line(left, floor, left + wide, floor, 1))
        body.append(svg.line(left + wide + 7, floor - high, left + wide + 7, floor, 3))
        body.append(svg.text(left + wide + 14, floor - high / 2 + 4, "update", 10.5, "start"))
        told.append(f"{title}: {count} times {batch // count} examples, peak "
                    f"{svg.size_text(peak)}, one update")
    y, width = pitch * len(steps) + 4, left + wide + 56
    squares, tall = svg.key({"forward": svg.KINDS[0], "backward, gradients added": svg.KINDS[2]},
                            width)
    body.append(svg.element("g", "".join(squares), transform=f"translate(0 {svg.number(y)})"))
    alt = "Activations over a step. " + "; ".join(told)
    return svg.picture("".join(body), width, y + tall, alt, shown=1.35 * width)


def slope(x: Real, floor: Real, wide: Real, before: Real, after: Real, fill: str):
    """What is held while it grows or shrinks from one height to another."""
    corners = [(x, floor), (x, floor - before), (x + wide, floor - after), (x + wide, floor)]
    points = " ".join(f"{svg.number(a)},{svg.number(b)}" for a, b in corners)
    return svg.element("polygon", points=points, fill=fill)
