"""A vision transformer in pictures: its parts and shapes, what it reads, what it answers."""

from collections.abc import Sequence
from numbers import Real

import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from meshbook.drawing import svg
from meshbook.drawing.diagrams import moved
from meshbook.drawing.figures import as_uint8, png

ATTENTION, CLASS, MLP = svg.KINDS
LANE, BESIDE = 32.0, 244.0  # width of a token's lane, where the words begin: pixels


def draw_vit(image: UInt8[np.ndarray, "H W 3"], patch: int, embed: int, layers: int, classes: int):
    """Draw what happens to an image, downwards: each token has a lane, the class token the first.

    patch: pixels along a side; the other sizes are those of the model. Raises ValueError where
    patches do not cut the image evenly into at least five.
    """
    side = len(image)
    n, rest = divmod(side, patch)
    if rest or n * n < 5:
        raise ValueError(f"patches of {patch} pixels do not cut {side} evenly into at least five")
    count, depth = n * n, patch * patch * 3
    lanes = {0: 4.0, 1: 46.0, 2: 84.0, 3: 122.0, count: 190.0}  # token: left edge of its lane
    body = [svg.text(172, 124, "…", 16), gridded(image, n, 54, 0, 80)]
    body += beside(30, "one image", f"({side}, {side}, 3)")
    for token, x in lanes.items():
        body += lane(image, patch, token, x, n)
    body += beside(112, f"cut into {count} patches", f"({count}, {patch}·{patch}·3 = {depth})")
    body += beside(158, "embedded by a matmul;", f"a class token: ({count + 1}, {embed})")
    body += beside(198, "add a position to each", f"({count + 1}, {embed})")
    body.append(svg.rectangle(0, 222, 232, 92, stroke="currentColor", rx=8, stroke_dasharray="4 3"))
    body.append(svg.rectangle(4, 232, 224, 26, fill=ATTENTION, rx=4))
    body.append(svg.text(116, 249, "attention", 12, fill=svg.ink(ATTENTION), font_weight="600"))
    words = f"block, {layers} times" if layers > 1 else "block"
    body.append(svg.text(BESIDE, 238, words, 12, "start", font_weight="600"))
    body += beside(254, "attention: between tokens", "MLP: each token alone", 26)
    body.append(svg.text(BESIDE, 300, "both added to their input", 11, "start"))
    body += head(classes)
    body += beside(350, "norm and head read", "the class token only")
    body += beside(388, "logits", f"({classes},)")
    alt = (f"The model. An image of {side} by {side} pixels is cut into {count} patches of {depth} "
           f"elements. Each becomes an embedding of {embed} elements; a class token is put before "
           f"them, and every token gets its position. {words}: attention between all tokens, then "
           f"an MLP for each token alone. A norm and the head turn the class token into {classes} "
           "logits.")
    return svg.picture("".join(body), 400, 408, alt, shown=520)


def beside(y: Real, words: str, shape: str, step: Real = 15):
    """What happens at this height, and the shape that it gives."""
    return [svg.text(BESIDE, y, words, 11, "start"), svg.text(BESIDE, y + step, shape, 11, "start")]


def gridded(image: UInt8[np.ndarray, "H W 3"], n: int, x: Real, y: Real, size: Real):
    """An image under the n by n lines along which it is cut."""
    place = {"x": x, "y": y, "width": size, "height": size, "href": png(as_uint8(image))}
    body = [svg.element("image", style="image-rendering:pixelated", **place)]
    for i in range(n + 1):
        at, style = size * i / n, {"stroke": "#858585"}
        ends = [(x + at, y, x + at, y + size), (x, y + at, x + size, y + at)]
        body += [svg.element("line", x1=a, y1=b, x2=c, y2=d, **style) for a, b, c, d in ends]
    return "".join(body)


def lane(image: UInt8[np.ndarray, "H W 3"], patch: int, token: int, x: Real, n: int):
    """One token on its way: its patch, embedding and position, then its part of a block."""
    middle, body = x + LANE / 2, []
    top = 146.0
    if token:
        row, column = divmod(token - 1, n)
        piece = image[row * patch:(row + 1) * patch, column * patch:(column + 1) * patch]
        place = {"x": x, "y": 104, "width": LANE, "height": LANE, "href": png(as_uint8(piece))}
        body = [svg.text(middle, 100, str(token), 10),
                svg.element("image", style="image-rendering:pixelated", data_patch=str(token),
                            **place), svg.arrow(middle, 136, middle, top)]
    colour = "#858585" if token else CLASS
    body.append(svg.rectangle(x, top, LANE, 26, fill=colour, rx=3))
    words = "W" if token else "class"
    body.append(svg.text(middle, top + 17, words, 10, fill=svg.ink(colour)))
    for begin, end in (172, 188), (206, 232), (258, 272), (300, 322):
        body.append(svg.line(middle, begin, middle, end, 1.4))
    body.append(svg.element("circle", cx=middle, cy=197, r=9, fill="none", stroke="currentColor"))
    body.append(svg.text(middle, 201, "+", 12))
    body.append(svg.rectangle(x, 272, LANE, 28, fill=MLP, rx=3))
    body.append(svg.text(middle, 290, "MLP", 11, fill=svg.ink(MLP), font_weight="600"))
    if token:
        body.append(svg.line(middle - 7, 322, middle + 7, 322, 2.0))
    return body


def head(classes: int):
    """The norm and the head below the lane of the class token, and the logits."""
    body = [svg.line(20, 322, 20, 334, 1.4), svg.arrow(20, 366, 20, 382)]
    body.append(svg.rectangle(2, 334, 84, 32, fill=CLASS, rx=3))
    body.append(svg.text(44, 354, "norm, head", 11, fill=svg.ink(CLASS), font_weight="600"))
    return body + [svg.frame(2 + 18 * i, 384, 16, 16) for i in range(min(classes, 12))]


def draw_block_steps(embed: int, hidden: int, heads: int):
    """Draw a block on its residual stream: what attention and MLP read, and where they add."""
    body = [svg.line(40, 20, 40, 206, 5.0), svg.arrow(40, 202, 40, 216)]
    body.append(svg.text(40, 13, "x (B, T, D)", 11))
    body.append(svg.text(40, 229, "x (B, T, D)", 11))
    branches = [("attention", f"{heads} heads", ATTENTION, "all"),
                ("MLP", f"{embed} → {hidden} → {embed}", MLP, "each")]
    for number, (name, sizes, colour, read) in enumerate(branches):
        y = 34.0 + 88 * number
        body += [svg.arrow(42, y + 14, 84, y + 14), svg.arrow(138, y + 14, 164, y + 14)]
        body.append(svg.frame(84, y, 54, 28) + svg.text(111, y + 18, "norm", 11))
        body.append(svg.rectangle(164, y - 4, 130, 36, fill=colour, rx=4))
        ink = svg.ink(colour)
        body.append(svg.text(229, y + 11, name, 12, fill=ink, font_weight="600"))
        body.append(svg.text(229, y + 25, sizes, 10.5, fill=ink))
        body.append(svg.line(229, y + 32, 229, y + 58, 1.4) + svg.arrow(229, y + 58, 52, y + 58))
        body.append(svg.element("circle", cx=40, cy=y + 58, r=10, fill="#858585"))
        body.append(svg.text(40, y + 63, "+", 15, fill="#111111", font_weight="600"))
        body.append(svg.text(140, y + 53, "what it adds", 11))
        body.append(svg.text(302, y + 10, f"reads {read}", 11, "start"))
        what = "tokens" if read == "all" else "token alone"
        body.append(svg.text(302, y + 24, what, 11, "start"))
    alt = (f"A block. x goes straight through. A norm and attention with {heads} heads read it and "
           f"add to it; then a norm and an MLP with {hidden} hidden units read it and add to it.")
    return svg.picture("".join(body), 372, 234, alt, shown=480)


def draw_heads(tokens: int, embed: int, heads: int):
    """Draw attention as matmuls with the shapes of one example: a head is a sheet of a stack.

    Raises ValueError where heads do not divide the embedding.
    """
    if embed % heads:
        raise ValueError(f"embed {embed} does not divide by {heads} heads")
    T, D, K = tokens, embed, embed // heads
    sheets, plain = min(heads, 4), 1
    q, k, v = (("q", (T, K), ATTENTION, sheets), ("kᵀ", (K, T), CLASS, sheets),
               ("v", (T, K), MLP, sheets))
    scores, weights = (
        (name, (T, T), "#858585", sheets) for name in ("scores", "weights"))
    y, joined = ("y", (T, K), MLP, sheets), ("all y", (T, D), MLP, plain)
    rows = [
        (f"Queries, keys, values: {heads} heads of {K} elements",
         [("x", (T, D), "none", plain), "→", q, ("k", (T, K), CLASS, sheets), v]),
        ("Scores: every query with every key", [q, "·", k, "=", scores]),
        ("Softmax, and the weighted mean of the values", [weights, "·", v, "=", y]),
        ("The heads side by side, and one more matmul",
         [joined, "·", ("w_out", (D, D), "none", plain), "=", ("out", (T, D), "none", plain)]),
    ]
    scale, body, top = 90 / D, [], 0.0
    for title, parts in rows:
        body.append(svg.text(0, top + 12, title, 12, "start", font_weight="600"))
        drawn, high = line_of(parts, scale)
        body.append(moved(drawn, 0, top + 24))
        top += 24 + high + 14
    alt = "Attention for one image. " + ". ".join(
        f"{title}: " + " ".join(part if isinstance(part, str) else f"{part[0]} {part[1]}"
                                for part in parts) for title, parts in rows)
    return svg.picture("".join(body), 392, top - 8, alt, shown=500)


def line_of(parts: Sequence, scale: Real):
    """(SVG, height) of matrices in a line: (name, shape, colour, sheets), or a sign between."""
    sizes = [(max(14.0, scale * part[1][1]), max(14.0, scale * part[1][0]))
             for part in parts if not isinstance(part, str)]
    high, body, x = max(height for _, height in sizes) + 10, [], 0.0
    for part in parts:
        if isinstance(part, str):
            body.append(svg.text(x + 8, high / 2 + 10, part, 16))
            x += 24
            continue
        name, shape, colour, sheets = part
        width, height = sizes.pop(0)
        y, label = (high - height) / 2 + 5, f"{name} {shape}"
        room = max(width + 12, svg.text_width(label, 10))
        left = x + (room - width - 3 * (sheets - 1)) / 2
        for sheet in reversed(range(sheets)):
            body.append(svg.rectangle(left + 3 * sheet, y - 3 * sheet, width, height, fill=colour,
                                      rx=2, stroke="currentColor", stroke_width=0.8))
        body.append(svg.text(x + room / 2, high + 18, label, 10))
        x += room + 6
    return "".join(body), high + 20


def draw_reading(images: UInt8[np.ndarray, "N H W 3"],
                 weights_NP: Float[Array | np.ndarray, "N P"], titles: Sequence[str]):
    """Draw images, and below each how much of it is read: a patch is as bright as its weight.

    weights_NP: for each patch, row by row; the largest of an image stays as it is. Raises
    ValueError where the patches of an image do not form a square.
    """
    weights_NP = np.asarray(weights_NP)
    n = round(weights_NP.shape[1] ** 0.5)
    if n * n != weights_NP.shape[1]:
        raise ValueError(f"expected patches in a square, found {weights_NP.shape[1]}")
    size, pitch, body = 74.0, 80.0, []
    for i, (image, weights, title) in enumerate(zip(images, weights_NP, titles, strict=True)):
        x = pitch * i
        body.append(svg.text(x + size / 2, 11, title, 11))
        for y in 16.0, 98.0:
            place = {"x": x, "y": y, "width": size, "height": size, "href": png(as_uint8(image))}
            body.append(svg.element("image", style="image-rendering:pixelated", **place))
        for patch, share in enumerate(weights / weights.max()):
            row, column = divmod(patch, n)
            body.append(svg.rectangle(x + column * size / n, 98 + row * size / n, size / n,
                                      size / n, fill="#000000", fill_opacity=0.9 * (1 - share),
                                      data_share=svg.number(share)))
    most = [int(weights.argmax()) + 1 for weights in weights_NP]
    alt = "Images, and what is read of them. " + "; ".join(
        f"{title}: most of all patch {patch}" for title, patch in zip(titles, most))
    return svg.picture("".join(body), pitch * len(images) - 6, 174, alt, shown=1.25 * pitch * 5)


def draw_answers(images: UInt8[np.ndarray, "N H W 3"],
                 chances_NC: Float[Array | np.ndarray, "N C"],
                 labels: Int[Array | np.ndarray, "N"], classes: Sequence[str]):
    """Draw images with the three classes that a model finds most likely, the right one green.

    A most likely class that is wrong is orange, what else is wrong grey.
    """
    body, told, chances_NC = [], [], np.asarray(chances_NC)
    for i, (image, chances, label) in enumerate(zip(images, chances_NC, labels, strict=True)):
        x, y = 202.0 * (i % 2), 68.0 * (i // 2)
        place = {"x": x, "y": y, "width": 56, "height": 56, "href": png(as_uint8(image))}
        body.append(svg.element("image", style="image-rendering:pixelated", **place))
        best = np.argsort(-chances)[:3]
        for row, at in enumerate(best):
            colour = (svg.SERIES[2] if at == label else svg.SERIES[1] if row == 0 else "#858585")
            top = y + 3 + 18 * row
            name = {"font_weight": "600"} if at == label else {}
            body.append(svg.text(x + 61, top + 10, classes[at], 10, "start", **name))
            body.append(svg.rectangle(x + 126, top, max(1.0, 38 * chances[at]), 12, fill=colour,
                                      rx=1, data_class=str(at)))
            body.append(svg.text(x + 129 + 38 * chances[at], top + 10, f"{chances[at]:.0%}", 10,
                                 "start"))
        told.append(f"{classes[label]}: " + ", ".join(
            f"{classes[at]} {chances[at]:.0%}" for at in best))
    alt = "Test images with the three most likely classes. " + "; ".join(told)
    return svg.picture("".join(body), 402, 68 * (-(-len(images) // 2)) - 8, alt, shown=520)
