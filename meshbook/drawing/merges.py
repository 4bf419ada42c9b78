"""Byte pairs: how a word becomes tokens, one merge after the other."""

from collections.abc import Mapping, Sequence

from meshbook.drawing import svg
from meshbook.drawing.documents import colour_of, visible

PITCH, HEIGHT, TOP = 27.0, 21.0, 20.0


def draw_merges(steps: Sequence[tuple[Sequence[bytes], int | None]],
                numbers: Sequence[int], title: str = ""):
    """Draw the merges of one piece of text downwards: a row for each, its new tokens filled.

    steps: as `vocabulary.merges` returns them; numbers: those of the tokens of the last row, which
    stand below it; title: words above. A letter stays in its column, so a merge is a wall that
    goes. Raises ValueError where a row has other bytes than the first, or where there are not as
    many numbers as tokens.
    """
    whole = b"".join(steps[0][0])
    wide = min(26.0, 286.0 / len(whole))
    end = wide * len(whole)
    body = [svg.text(0, 12, title, 12, "start", font_weight="600"),
            svg.text(end + 8, TOP + 14, f"{len(whole)} bytes", 11, "start")]
    before = set()
    for row, (parts, made) in enumerate(steps):
        if b"".join(parts) != whole:
            raise ValueError(f"step {row} has the bytes {b''.join(parts)!r}; expected {whole!r}")
        places = spans(parts)
        last = row == len(steps) - 1
        for i, (start, stop) in enumerate(places):
            new = made is not None and (start, stop) not in before
            fill = colour_of(i) if last else svg.KINDS[0] if new else None
            body.append(box(wide * start, TOP + PITCH * row, wide * (stop - start),
                            whole[start:stop], fill))
        if made is not None:
            words = f"makes {made}"
            body.append(svg.text(end + 8, TOP + PITCH * row + 15, words, 11, "start"))
        before |= set(places)
    under = TOP + PITCH * len(steps) + 6
    for (start, stop), number in zip(spans(steps[-1][0]), numbers, strict=True):
        body.append(svg.text(wide * (start + stop) / 2, under, str(number), 10))
    count = f"{len(numbers)} token" + "s" * (len(numbers) != 1)
    body.append(svg.text(end + 8, under, count, 11, "start", font_weight="600"))
    said = [f"{' '.join(map(words_of, parts))} (token {made})" for parts, made in steps if made]
    alt = (f"{title + ': ' if title else ''}{words_of(whole)} starts as {len(whole)} bytes; "
           f"merges: {'; '.join(said) or 'none'}; it ends as {count}: "
           f"{', '.join(map(str, numbers))}")
    return svg.picture("".join(body), end + 96, under + 6, alt, shown=1.15 * (end + 96))


def draw_splits(stages: Mapping[str, Sequence[bytes]]):
    """Draw how one text is split at several stages of a vocabulary, a row for each stage.

    stages: {title: parts}; a byte stays in its column, so a longer part is a wider box. Raises
    ValueError where a stage has other bytes than the first.
    """
    whole = b"".join(next(iter(stages.values())))
    wide, body, told = min(16.0, 400.0 / len(whole)), [], []
    for row, (title, parts) in enumerate(stages.items()):
        if b"".join(parts) != whole:
            raise ValueError(f"{title} has the bytes {b''.join(parts)!r}; expected {whole!r}")
        y, count = 2.0 + 42 * row, f"{len(parts)} tokens"
        body.append(svg.text(0, y + 10, title, 11, "start", font_weight="600"))
        body.append(svg.text(wide * len(whole), y + 10, count, 11, "end"))
        for i, (part, (start, stop)) in enumerate(zip(parts, spans(parts))):
            body.append(box(wide * start, y + 15, wide * (stop - start), part, colour_of(i)))
        told.append(f"{title}: {count}, {' '.join(map(words_of, parts))}")
    width = wide * len(whole)
    return svg.picture("".join(body), width, 42 * len(stages) + 2, ". ".join(told),
                       shown=1.4 * width)


def spans(parts: Sequence[bytes]):
    """Where each part starts and stops, in bytes."""
    at, found = 0, []
    for part in parts:
        found.append((at, at + len(part)))
        at += len(part)
    return found


def words_of(part: bytes):
    """Bytes as they are shown: as text where they are some, or else as hexadecimal numbers."""
    try:
        return visible(part.decode())
    except UnicodeDecodeError:
        return part.hex()


def box(x: float, y: float, width: float, part: bytes, fill: str | None):
    """One part of a word: filled, or only an outline."""
    words = words_of(part)
    size = min(13.0, (width - 3) / (0.6 * len(words)))
    ink = svg.ink(fill) if fill else "currentColor"
    drawn = (svg.rectangle(x + 1, y, width - 2, HEIGHT, fill=fill, rx=3) if fill
             else svg.frame(x + 1, y, width - 2, HEIGHT))
    return drawn + svg.text(x + width / 2, y + 15, words, size, fill=ink)
