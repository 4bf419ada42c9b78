"""Layers under tensor parallelism: what each of two devices holds, and what they sum."""

from collections.abc import Sequence
from numbers import Real

from meshbook.drawing import svg

LANE, GAP, HIGH, PITCH = 150.0, 16.0, 32.0, 40.0  # pixels
WIDE = 2 * LANE + GAP


def draw_block(examples: int, tokens: int, embed: int, hidden: int, heads: int):
    """Draw a block on the two devices of a group along "model", from top to bottom.

    examples: of the group; the other sizes are those of the model. Outlined boxes are the same on
    both devices, filled ones are each device's half, and lighter ones are partial sums. A solid bar
    is an all-reduce of the forward pass, a dashed one of the backward pass, where the gradient of
    what passes there is a partial sum. Raises ValueError where two devices cannot share heads or
    hidden units evenly, or heads do not divide the embedding.
    """
    for name, size, by in ("heads", heads, 2), ("hidden", hidden, 2), ("embed", embed, heads):
        if size % by:
            raise ValueError(f"{name} {size} does not divide by {by}")
    whole, size = f"({examples}, {tokens}, {embed})", embed // heads
    half = heads // 2
    heads_of = [f"heads {d * half}–{(d + 1) * half - 1}" for d in range(2)]
    units = [f"units {d * hidden // 2}–{(d + 1) * hidden // 2 - 1}" for d in range(2)]
    split = f"({examples}, {tokens}, {half}, {size})"
    wide = f"({examples}, {tokens}, {hidden // 2})"
    rows = [
        ("whole", ["x, and its norm"] * 2, whole),
        ("backward", "backward: all-reduce the gradient", ""),
        ("split", [f"q, k, v: {each}" for each in heads_of], split),
        ("split", [f"attention: {each}" for each in heads_of], split),
        ("partial", ["output: partial sum"] * 2, whole),
        ("forward", "forward: all-reduce the output", ""),
        ("whole", ["the sum, and its norm"] * 2, whole),
        ("backward", "backward: all-reduce the gradient", ""),
        ("split", [f"hidden {each}" for each in units], wide),
        ("partial", ["output: partial sum"] * 2, whole),
        ("forward", "forward: all-reduce the output", ""),
        ("whole", ["the sum: the result"] * 2, whole),
    ]
    return draw_lanes("A transformer block on two devices.", rows)


def draw_vocabulary(tokens: int, embed: int, vocabulary: int):
    """Draw the loss of a chunk on two devices that share the vocabulary, from top to bottom.

    tokens: of the chunk. Boxes and bars are those of draw_block. Raises ValueError where the
    vocabulary does not divide by two.
    """
    if vocabulary % 2:
        raise ValueError(f"vocabulary {vocabulary} does not divide by 2")
    v = vocabulary // 2
    part, row, whole = f"({tokens}, {v})", f"({tokens},)", f"({tokens}, {embed})"
    owns = [f"{d * v:,}–{(d + 1) * v - 1:,}" for d in range(2)]
    rows = [
        ("whole", ["hidden states"] * 2, whole),
        ("split", [f"scores of {each}" for each in owns], part),
        ("forward", "all-reduce the largest score: 1 per token", ""),
        ("split", ["exponentials of its own"] * 2, part),
        ("partial", ["sum, label's score"] * 2, f"2 x {row}"),
        ("forward", "all-reduce the two sums: 2 per token", ""),
        ("whole", ["loss of each token"] * 2, row),
        ("split", [f"errors of {each}" for each in owns], part),
        ("split", ["head's gradient: its own"] * 2, f"({embed}, {v})"),
        ("partial", ["hidden's: partial sum"] * 2, whole),
        ("backward", f"after the loop: all-reduce {embed} per token", ""),
        ("whole", ["hidden's gradient"] * 2, whole),
    ]
    return draw_lanes("A vocabulary on two devices.", rows)


def draw_gradient_sums(examples: int, embed: int, waits: bool):
    """Draw three gradients of one activation on two devices, and the all-reduces that add them up.

    examples, embed: the sizes of the activation on one device. waits: whether each device adds up
    its own three first, as with an activation that is `reduced`. Boxes and bars are those of
    draw_block.
    """
    shape, names = f"({examples}, {embed})", ("first", "second", "third")
    parts = [("partial", [f"{name} gradient"] * 2, shape) for name in names]
    if waits:
        rows = [*parts, ("partial", ["the sum of its three"] * 2, shape),
                ("backward", "all-reduce once", "")]
    else:
        rows = [row for name, part in zip(names, parts, strict=True)
                for row in (part, ("backward", f"all-reduce the {name}", ""))]
    rows.append(("whole", ["the gradient of x"] * 2, shape))
    return draw_lanes("Three gradients of x on two devices.", rows)


def draw_lanes(title: str, rows: Sequence[tuple[str, Sequence[str] | str, str]]):
    """A column for each of two devices: rows of (kind, words of both or of a bar, shape)."""
    body = [lane_title(device) for device in range(2)]
    for place, (kind, words, shape) in enumerate(rows):
        y = 28 + PITCH * place
        body.append(bar(y, words, kind == "forward") if kind in ("forward", "backward") else
                    "".join(box(device, y, kind, words[device], shape) for device in range(2)))
    alt = f"{title} " + ". ".join(
        words if isinstance(words, str) else f"Each device: {' / '.join(dict.fromkeys(words))} "
        f"{shape}" for _, words, shape in rows)
    return svg.picture("".join(body), WIDE, 28 + PITCH * len(rows) - 6, alt, shown=420)


def lane_title(device: int):
    """The device above its column."""
    x, colour = device * (LANE + GAP), svg.device_colour(device)
    chip = svg.element("circle", cx=x + 9, cy=11, r=9, fill=colour)
    return (chip + svg.text(x + 9, 15, str(device), 11, fill=svg.ink(colour))
            + svg.text(x + 24, 15, f"device {device}", 12, "start", font_weight="600"))


def box(device: int, y: Real, kind: str, words: str, shape: str):
    """What one device holds there: whole, split or partial."""
    x, colour = device * (LANE + GAP), svg.device_colour(device)
    opacity = {"whole": 0.0, "split": 1.0, "partial": 0.25}[kind]
    fill = svg.ink(colour) if kind == "split" else "currentColor"
    area = svg.rectangle(x, y, LANE, HIGH, fill=colour, rx=3, fill_opacity=opacity)
    return (area + svg.frame(x, y, LANE, HIGH)
            + svg.text(x + LANE / 2, y + 14, words, 10.5, fill=fill, font_weight="600")
            + svg.text(x + LANE / 2, y + 27, shape, 10, fill=fill))


def bar(y: Real, words: str, forward: bool):
    """An all-reduce of both devices."""
    style = {} if forward else {"stroke_dasharray": "5 4"}
    area = svg.rectangle(0, y + 4, WIDE, HIGH - 8, rx=12, stroke="currentColor",
                         fill="#858585" if forward else "none", **style)
    ink = "#111111" if forward else "currentColor"
    return area + svg.text(WIDE / 2, y + 20, words, 11, fill=ink, font_weight="600")
