"""Sentences: which words depend on the same fact, and what each token of a text has to predict."""

from collections.abc import Sequence

from meshbook.drawing import svg
from meshbook.drawing.documents import colour_of, visible

WIDE = 400.0


def draw_facts(words: Sequence[str], facts: Sequence[str | None]):
    """Draw a text in lines of words, each in the colour of the fact that decides it.

    facts: for each word the fact, or None for a word that no fact decides; the key names them.
    Raises ValueError where there is not one for each word.
    """
    if len(words) != len(facts):
        raise ValueError(f"expected a fact or None for each of {len(words)} words; "
                         f"found {len(facts)}")
    names = dict.fromkeys(fact for fact in facts if fact)
    colours = {fact: svg.SERIES[i % len(svg.SERIES)] for i, fact in enumerate(names)}
    body, y = svg.key(colours, WIDE)
    x = 0.0
    for word, fact in zip(words, facts):
        wide = svg.text_width(word, 11) + 5  # exact, since the letters are all equally wide
        if x + wide > WIDE:
            x, y = 0.0, y + 24
        ink = "currentColor"
        if fact:
            body.append(svg.rectangle(x, y, wide, 19, fill=colours[fact], rx=3, data_fact=fact))
            ink = svg.ink(colours[fact])
        body.append(svg.text(x + wide / 2, y + 13.5, word, 11, fill=ink, font_family="monospace"))
        x += wide + 2
    told = [f"{fact} decides {', '.join(w for w, f in zip(words, facts) if f == fact)}"
            for fact in names]
    alt = f"A story of {len(words)} words. {'; '.join(told)}"
    return svg.picture("".join(body), WIDE, y + 22, alt, shown=600)


def draw_targets(pieces: Sequence[str], count: int):
    """Draw `count` inputs of a model above their targets: each target is the next input.

    pieces: the text of the tokens, in order. Raises ValueError where there is no token after the
    last input.
    """
    if not 0 < count < len(pieces):
        raise ValueError(f"expected 1 to {len(pieces) - 1} inputs of {len(pieces)} tokens; "
                         f"found {count}")
    pieces, left = [visible(piece) for piece in pieces[:count + 1]], 50.0
    widths = [8 + svg.text_width(max(pair, key=len), 11) for pair in zip(pieces, pieces[1:])]
    body = [svg.text(0, 17, "input", 11, "start", font_weight="600"),
            svg.text(0, 65, "target", 11, "start", font_weight="600")]
    x = left
    for i, wide in enumerate(widths):
        for y, at in (2, i), (50, i + 1):
            fill = colour_of(at)
            body.append(svg.rectangle(x, y, wide, 22, fill=fill, rx=3))
            body.append(svg.text(x + wide / 2, y + 15, pieces[at], 11, fill=svg.ink(fill)))
        body.append(svg.arrow(x + wide / 2, 26, x + wide / 2, 48))
        x += wide + 4
    told = ", ".join(f"{a} predicts {b}" for a, b in zip(pieces, pieces[1:]))
    return svg.picture("".join(body), x, 76, f"Inputs and targets: {told}", shown=1.4 * x)
