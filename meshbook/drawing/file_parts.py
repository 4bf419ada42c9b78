"""A file, part by part: what is stored, at which byte, and in how many."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from meshbook.drawing import svg

WIDE = 400.0


class Part(NamedTuple):
    """A part of a file: its size in bytes, what it says, and its first elements as text."""

    size: int
    words: str
    elements: Sequence[str] = ()


def draw_file(parts: Mapping[str, Part], title: str):
    """Draw a file as its parts {name: Part}, one below the other in the order of the bytes.

    The height of a part does not show its size; beside it are the bytes at which it begins and
    ends. Raises ValueError for a part without bytes.
    """
    body, y, at, told = [svg.text(0, 12, title, 12, "start", font_weight="600")], 22.0, 0, []
    for number, (name, part) in enumerate(parts.items()):
        if part.size <= 0:
            raise ValueError(f"{name}: expected a size of at least 1 byte, found {part.size}")
        colour, high = svg.KINDS[number % len(svg.KINDS)], 42.0 + 25 * bool(part.elements)
        body += [svg.rectangle(66, y, WIDE - 67, high, fill=colour, fill_opacity=0.18, rx=3),
                 svg.frame(66, y, WIDE - 67, high),
                 svg.text(60, y + 12, f"{at:,}", 10, "end"),
                 svg.text(76, y + 17, f"{name}: {part.size:,} bytes", 12, "start",
                          font_weight="600"),
                 svg.text(76, y + 33, part.words, 11, "start")]
        x = 76.0
        for element in part.elements:
            wide = svg.text_width(element, 10.5) + 8
            if x + wide > WIDE - 22:
                break
            body += [svg.rectangle(x, y + 41, wide, 19, fill=colour, rx=2),
                     svg.text(x + wide / 2, y + 54, element, 10.5, fill=svg.ink(colour))]
            x += wide + 3
        if part.elements:
            body.append(svg.text(x + 3, y + 54, "…", 11, "start"))
        told.append(f"from byte {at:,} {name}, {part.size:,} bytes: {part.words}")
        at, y = at + part.size, y + high + 4
    body.append(svg.text(60, y + 8, f"{at:,}", 10, "end"))
    return svg.picture("".join(body), WIDE, y + 14, f"{title}: {'; '.join(told)}", shown=520)
