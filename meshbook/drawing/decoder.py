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


def draw_pre_norm(steps: Mapping[str, int], layers: int, alt: str):
    """Draw a pre-norm decoder downwards: {step: parameters} of the embedding, of one layer's
    first norm, attention, second norm and MLP, of the last norm and of the head, in this order.

    The residual stream runs down on the left, past the framed layer's two branches. Raises
    ValueError unless there are seven steps.
    """
    if len(steps) != 7:
        raise ValueError(f"expected the parameters of seven steps; found {', '.join(steps)}")
    spine, left, wide, high, pitch, gap = 24.0, 62.0, 196.0, 24.0, 34.0, 18.0
    body = [svg.text(spine, 12, "tokens (B, T)", 11, "start")]
    inside = [0, 1, 1, 1, 1, 0, 0]
    y, at = 24.0, []
    for row in range(7):
        y += gap * (row in (1, 3, 5))
        at.append(y)
        y += pitch
    for row, ((name, count), kind) in enumerate(zip(steps.items(), (0, 1, 2, 1, 2, 1, 0))):
        fill = None if kind == 1 else svg.KINDS[kind]
        x, size = (left, wide) if inside[row] else (spine - 14, left + wide - spine + 14)
        body += [svg.rectangle(x, at[row], size, high, fill=fill, rx=4) if fill
                 else svg.frame(x, at[row], size, high),
                 svg.text(x + size / 2, at[row] + 16, name, 11.5,
                          fill=svg.ink(fill) if fill else "currentColor"),
                 svg.text(left + wide + 14, at[row] + 16, f"{count:,}", 11, "start")]
    for first, last in ((1, 2), (3, 4)):  # out of the residual stream, and back into it
        above, below = at[first] + high / 2, at[last] + high + 9
        body += [svg.arrow(spine, above, left, above),
                 svg.arrow(left + 20, at[first] + high, left + 20, at[last]),
                 svg.element("polyline", points=f"{left + 20},{at[last] + high} "
                             f"{left + 20},{below} {spine + 8},{below}", fill="none",
                             stroke="currentColor"),
                 svg.element("circle", cx=spine, cy=below, r=7, fill="none",
                             stroke="currentColor"),
                 svg.text(spine, below + 4, "+", 12)]
    body += [svg.line(spine, at[0] + high, spine, at[2] + high + 2),
             svg.line(spine, at[2] + high + 16, spine, at[4] + high + 2),
             svg.arrow(spine, at[4] + high + 16, spine, at[5]),
             svg.arrow(spine, at[5] + high, spine, at[6])]
    top, bottom = at[1] - 9, at[4] + high + 20
    body += [svg.rectangle(4, top, left + wide + 2, bottom - top, stroke="currentColor",
                           stroke_dasharray="4 3", rx=5),
             svg.text(left + wide + 76, (top + bottom) / 2 + 4, f"{layers} layers", 11, "start",
                      font_weight="600"),
             svg.text(left + wide + 14, 12, "parameters", 11, "start")]
    told = ", ".join(f"{name}: {count:,} parameters" for name, count in steps.items())
    return svg.picture("".join(body), left + wide + 138, at[6] + high + 6,
                       f"{alt} {layers} layers. {told}", shown=520)
