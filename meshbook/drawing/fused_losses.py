"""The loss that brings its gradient: the scores of a token, the matmuls, the turns of the loop."""

from collections.abc import Mapping, Sequence
from numbers import Real

import numpy as np
from jaxtyping import Array, Float

from meshbook.drawing import svg

WIDE = 384.0  # pixels
PRODUCTS = {"scores": svg.KINDS[0], "gradient of hidden": svg.KINDS[2],
            "gradient of head": svg.KINDS[1]}


def draw_token(rows: Mapping[str, Sequence[Real] | Float[Array | np.ndarray, "V"]], label: int):
    """Draw values {what: one for each token of a vocabulary} as rows of bars, the label's marked.

    Each row has its own scale; bars below zero hang down. Raises ValueError for a label that the
    vocabulary does not have.
    """
    rows = {name: [float(value) for value in values] for name, values in rows.items()}
    (count,) = {len(values) for values in rows.values()}
    if not 0 <= label < count:
        raise ValueError(f"expected a label from 0 to {count - 1}; found {label}")
    pitch, high, body, told, y = WIDE / count, 44.0, [], [], 0.0
    for name, values in rows.items():
        low, top = min(0.0, *values), max(0.0, *values)
        zero = y + 32 + high * top / (top - low)
        body.append(svg.text(1, y + 12, name, 11, "start", font_weight="600"))
        for i, value in enumerate(values):
            x, long = 1 + pitch * i, high * abs(value) / (top - low)
            at = zero - long if value > 0 else zero
            fill = svg.KINDS[1] if i == label else svg.KINDS[2]
            body.append(svg.rectangle(x + 5, at, pitch - 10, long, fill=fill, data_value=str(i)))
            words = f"{value:.2f}".replace("-", "−")
            body.append(svg.text(x + pitch / 2, at - 3 if value >= 0 else at + long + 11, words,
                                 10.5))
        body.append(svg.line(1, zero, 1 + WIDE, zero, 1, stroke_opacity=0.6))
        told.append(f"{name}: {', '.join(f'{value:.2f}' for value in values)}")
        y += 32 + high + (18 if low < 0 else 6)
    body += [svg.rectangle(1, y, 10, 10, fill=svg.KINDS[1], rx=2),
             svg.text(16, y + 9, "the label", 11, "start"),
             svg.rectangle(90, y, 10, 10, fill=svg.KINDS[2], rx=2),
             svg.text(105, y + 9, "the other tokens of the vocabulary", 11, "start")]
    alt = f"One token, whose label is number {label} of {count}. " + "; ".join(told)
    return svg.picture("".join(body), WIDE + 2, y + 14, alt, shown=500)


def draw_matmuls(steps: Mapping[str, tuple[Sequence[str], Sequence[str]]]):
    """Draw the matmuls of a loss {title: (those of its forward pass, of its backward pass)}.

    A matmul is one of PRODUCTS. One that the same loss has done before is dashed. Raises
    ValueError for another name.
    """
    most = max(len(forward) + len(backward) for forward, backward in steps.values())
    pitch, body, told, y = (WIDE - 12) / most, [], [], 0.0
    for title, passes in steps.items():
        count = sum(map(len, passes))
        body.append(svg.text(1, y + 12, f"{title}: {count} matmuls", 11, "start",
                             font_weight="600"))
        x, scores = 1.0, len(passes[0]) and passes[0].count("scores")
        for words, products in zip(("forward", "backward"), passes, strict=True):
            body.append(svg.text(x, y + 28, words, 11, "start"))
            for product in products:
                if product not in PRODUCTS:
                    raise ValueError(f"expected one of {', '.join(PRODUCTS)}; found {product!r}")
                again = words == "backward" and product == "scores" and scores > 0
                style = {"stroke_dasharray": "3 2", "fill_opacity": 0.25} if again else {}
                body.append(svg.rectangle(x, y + 33, pitch - 2, 20, fill=PRODUCTS[product], rx=2,
                                          stroke=PRODUCTS[product] if again else "none",
                                          data_product=product, **style))
                x += pitch
            if not products:
                body.append(svg.text(x, y + 47, "one factor", 10.5, "start"))
            x += 10
        forward, backward = map(len, passes)
        told.append(f"{title}: {forward} in the forward pass, {backward} in the backward pass")
        y += 66
    squares, tall = svg.key({**PRODUCTS}, WIDE)
    body.append(svg.element("g", "".join(squares), transform=f"translate(1 {svg.number(y)})"))
    body.append(svg.text(1, y + tall + 6, "dashed: computed for the second time", 11, "start"))
    alt = "Matmuls of a loss. " + "; ".join(told)
    return svg.picture("".join(body), WIDE + 2, y + tall + 12, alt, shown=500)


def draw_turns(turns: int, each: Sequence[tuple[str, str]], after: Sequence[tuple[str, str]]):
    """Draw a loop: what each of its turns does, from top to bottom, and what is done after it.

    each, after: (axis, words), the axis that a collective is along, "" for a computation.
    """
    colours = {"model": svg.KINDS[0], "batch": svg.KINDS[1]}
    wide, high, told = (WIDE - 12) / (turns + 1), 30.0, []
    columns = [(f"turn {turn + 1}", each) for turn in range(turns)] + [("after", after)]
    body = []
    for column, (title, items) in enumerate(columns):
        x = 1 + (wide + 2) * column + 4 * (column == turns)
        body.append(svg.text(x + wide / 2, 12, title, 11, font_weight="600"))
        for row, (axis, words) in enumerate(items):
            y = 20 + (high + 5) * row
            fill = colours[axis] if axis else "none"
            ink = svg.ink(fill) if axis else "currentColor"
            body.append(svg.rectangle(x, y, wide - 2, high, fill=fill, rx=10 if axis else 2,
                                      stroke="currentColor", stroke_opacity=0.6,
                                      data_axis=axis or "none"))
            lines = words.split("\n")
            for line, part in enumerate(lines):
                top = y + high / 2 + 4 + 12 * (line - (len(lines) - 1) / 2)
                body.append(svg.text(x + wide / 2 - 1, top, part, 10.5, fill=ink))
    for title, items in (("each turn", each), ("after the loop", after)):
        told.append(f"{title}: " + ", ".join(
            " ".join(words.split()) + (f" along {axis}" if axis else "") for axis, words in items))
    y = 20 + (high + 5) * max(len(each), len(after)) + 2
    squares, tall = svg.key({f"all-reduce along {axis}": fill for axis, fill in colours.items()},
                            WIDE)
    body.append(svg.element("g", "".join(squares), transform=f"translate(1 {svg.number(y)})"))
    return svg.picture("".join(body), WIDE + 2, y + tall, f"A loop of {turns} turns. "
                       + "; ".join(told), shown=500)
