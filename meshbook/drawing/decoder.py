"""A decoder from tokens to scores: its steps, and the parameters that each of them has."""

from collections.abc import Mapping

from meshbook.drawing import svg


def draw_decoder(parameters: Mapping[str, int], layers: int, width: int, vocabulary: int):
    """Draw a post-norm decoder downwards, and beside each step how many parameters it has.

    parameters: of the steps "embedding", "attention", "norm", "MLP" and "head", one block's where
    a block has the step (its two norms are alike); width: D. The block is framed, with its two
    residual connections. Raises ValueError where a step is missing.
    """
    expected = {"embedding", "attention", "norm", "MLP", "head"}
    if parameters.keys() != expected:
        raise ValueError(f"expected the parameters of {sorted(expected)}; "
                         f"found {sorted(parameters)}")
    steps = [("embedding", "embedding: token + position", 0),
             ("attention", "causal attention", 2), ("norm", "add, then norm", 1),
             ("MLP", "MLP with ReLU", 2), ("norm", "add, then norm", 1),
             ("head", f"head: {vocabulary:,} scores", 0)]
    left, wide, high, pitch = 34.0, 190.0, 26.0, 42.0
    body = [svg.text(left + wide / 2, 12, "tokens (B, T)", 11)]
    for row, (name, words, kind) in enumerate(steps):
        y = 26.0 + pitch * row + 10 * (row > 0) + 10 * (row > 4)
        fill = None if name == "norm" else svg.KINDS[kind]
        box = svg.rectangle(left, y, wide, high, fill=fill, rx=4) if fill else svg.frame(
            left, y, wide, high)
        body += [svg.arrow(left + wide / 2, y - (pitch - high) + (0 if row else 4),
                           left + wide / 2, y),
                 box,
                 svg.text(left + wide / 2, y + 17, words, 12,
                          fill=svg.ink(fill) if fill else "currentColor"),
                 svg.text(left + wide + 30, y + 17, f"{parameters[name]:,}", 11, "start")]
        if kind == 2:  # around the layer into the sum below it
            before, after, x = y - 9, y + pitch + high / 2, left - 16
            ends = f"{left + wide / 2},{before} {x},{before} {x},{after} {left},{after}"
            body.append(svg.element("polyline", points=ends, fill="none", stroke="currentColor"))
    top, bottom = 26 + pitch + 10 - 13, 26 + pitch * 4 + 10 + high + 5
    body += [svg.rectangle(8, top, left + wide + 4, bottom - top, stroke="currentColor",
                           stroke_dasharray="4 3", rx=5),
             svg.text(left + wide + 96, (top + bottom) / 2 + 4, f"{layers} blocks", 12, "start",
                      font_weight="600"),
             svg.text(left + wide + 30, 12, "parameters", 11, "start")]
    told = ", ".join(f"{words}: {parameters[name]:,} parameters" for name, words, _ in steps)
    alt = f"Tokens to scores, D = {width}, {layers} blocks of attention and MLP. {told}"
    return svg.picture("".join(body), left + wide + 160, 26 + pitch * 6 + 14, alt, shown=500)
