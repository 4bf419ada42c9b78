"""What proofs compare: for each question what is read, and what it has to equal."""

from collections.abc import Sequence

from meshbook.drawing import svg

WIDE, BETWEEN, HIGH, PITCH = 176.0, 32.0, 38.0, 64.0  # pixels
LINE = 12.0


def draw_questions(title: tuple[str, str], rows: Sequence[tuple[str, str, str]]):
    """Draw rows of (question, what is found, what is expected) as pairs of boxes.

    title: what the two columns are called. Words of a box may have two lines. Raises ValueError
    for words of more lines.
    """
    body = [svg.text(x + WIDE / 2, 12, words, 11, font_weight="600")
            for x, words in zip((0.5, WIDE + BETWEEN), title, strict=True)]
    for place, (question, *pair) in enumerate(rows):
        y = 34 + PITCH * place
        body.append(svg.text(0, y, question, 11, "start", font_weight="600"))
        for x, words, colour in zip((0.5, WIDE + BETWEEN), pair, svg.KINDS[::2], strict=True):
            body += _box(x, y + 6, words, colour)
        body.append(svg.text(WIDE + BETWEEN / 2, y + 6 + HIGH / 2 + 6, "=", 18))
    alt = f"{title[0]} against {title[1]}. " + ". ".join(
        f"{question}: {' equals '.join(' '.join(words.split()) for words in pair)}"
        for question, *pair in rows)
    return svg.picture("".join(body), 2 * WIDE + BETWEEN + 1, 22 + PITCH * len(rows), alt,
                       shown=480)


def _box(x, y, words, colour):
    lines = words.split("\n")
    if len(lines) > 2:
        raise ValueError(f"a box has room for two lines; found {words!r}")
    first = y + HIGH / 2 + 4 - LINE / 2 * (len(lines) - 1)
    return [svg.rectangle(x, y, WIDE, HIGH, fill=colour, fill_opacity=0.16, stroke=colour, rx=3),
            *(svg.text(x + WIDE / 2, first + LINE * at, line, 10.5)
              for at, line in enumerate(lines))]
