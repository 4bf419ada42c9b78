"""Generation: the cache of keys and values as it fills, and the choice of the next token."""

from collections.abc import Mapping, Sequence
from numbers import Real

import numpy as np
from jaxtyping import Array, Bool, Float

from meshbook.drawing import svg
from meshbook.drawing.documents import colour_of, visible


def draw_cache(words: Sequence[str], filled: Mapping[str, Bool[Array | np.ndarray, "W"]],
               column_bytes: Real):
    """Draw which columns of one text's cache are filled after each phase.

    words: what stands in each column; filled {phase: which of these columns have keys and
    values}; column_bytes: what one column takes. New columns are filled with colour, those
    that were there before are pale. Raises ValueError where a phase does not say it of each.
    """
    label, body = 62.0, []
    widths = [max(16.0, svg.text_width(visible(word), 9.5) + 6) for word in words]
    edges = label + np.concatenate([[0.0], np.cumsum(widths)])
    for x, wide, word in zip(edges, widths, words):
        body.append(svg.text(x + wide / 2, 12, visible(word), 9.5))
    before, told = np.zeros(len(words), bool), []
    for row, (phase, now) in enumerate(filled.items()):
        now, y = np.asarray(now), 20.0 + 23 * row
        if now.shape != before.shape:
            raise ValueError(f"{phase} is about {now.size} columns; there are {before.size} words")
        body.append(svg.text(0, y + 14, phase, 10.5, "start", font_weight="600"))
        for x, wide, new, old in zip(edges, widths, now & ~before, now & before):
            colour = svg.KINDS[0] if now[~before].sum() > 1 else svg.KINDS[2]
            fill = colour if new else "currentColor" if old else "none"
            body.append(svg.rectangle(
                x + 1, y, wide - 2, 19, rx=2, stroke="currentColor", stroke_opacity=0.35,
                fill=fill, fill_opacity=1 if new else 0.15))
        size = svg.size_text(now.sum() * column_bytes)
        body.append(svg.text(edges[-1] + 6, y + 14, size, 10.5, "start"))
        told.append(f"{phase}: {int((now & ~before).sum())} new, {int(now.sum())} filled, {size}")
        before = now
    width, height = edges[-1] + 62, 24 + 23 * len(filled)
    alt = "Columns of the cache. " + "; ".join(told)
    return svg.picture("".join(body), width, height, alt, shown=1.4 * width)


def draw_choices(words: Sequence[str],
                 chances: Mapping[str, Float[Array | np.ndarray, "V"] | Sequence[Real]]):
    """Draw the chance of each of a few tokens under each way of choosing, a column of bars each.

    words: the tokens, likeliest first; chances {way: their chances, 0 for one that is never
    chosen}. Raises ValueError where a way has another number of them.
    """
    label = 14 + max(svg.text_width(visible(word), 10.5) for word in words)
    gap, body, told = 8.0, [], []
    wide = (400 - label) / len(chances) - gap
    for row, word in enumerate(words):
        body.append(svg.text(label - 8, 36 + 19 * row, visible(word), 10.5, "end"))
    for place, (way, p_V) in enumerate(chances.items()):
        if len(p_V) != len(words):
            raise ValueError(f"{way} has {len(p_V)} chances; there are {len(words)} tokens")
        x, colour = label + place * (wide + gap), svg.SERIES[place % len(svg.SERIES)]
        body.append(svg.text(x, 12, way, 10.5, "start", font_weight="600"))
        body.append(svg.line(x, 20, x, 22 + 19 * len(words), 0.8, stroke_opacity=0.5))
        for row, p in enumerate(map(float, p_V)):
            y, length = 23.0 + 19 * row, (wide - 26) * p
            if p:
                body.append(svg.rectangle(x, y, max(length, 1), 14, fill=colour, rx=1.5))
            amount = f"{p:.0%}" if p >= 0.005 else ("<1%" if p else "–")
            body.append(svg.text(x + (length if p else 0) + 4, y + 11, amount, 9.5, "start"))
        told.append(f"{way}: " + ", ".join(f"{word!r} {float(p):.0%}"
                                           for word, p in zip(words, p_V) if p))
    alt = "Chances of the next token. " + "; ".join(told)
    return svg.picture("".join(body), 404, 28 + 19 * len(words), alt, shown=560)


def draw_intervals(words: Sequence[str],
                   chances: Mapping[str, Float[Array | np.ndarray, "V"] | Sequence[Real]],
                   number: Real):
    """Draw the chances of tokens laid end to end from 0 to 1, a strip for each way of choosing.

    words: of the tokens, in the order in which they are laid; chances {way: their chances, which
    sum to 1}; number: a uniform one from 0 to 1, whose dashed line falls into the token that is
    chosen. Raises ValueError where chances do not sum to 1.
    """
    told, wide, high = [], 396.0, 40.0
    x, end = 2 + wide * float(number), 18.0 + high * len(chances)
    body = [svg.line(x, 22, x, end - 2, 1.6, stroke_dasharray="4 3"),
            svg.text(2, end + 10, "0", 10.5, "start"), svg.text(wide, end + 10, "1", 10.5, "end"),
            svg.text(x, end + 10, f"{number:.2f}", 10.5, font_weight="600")]
    for row, (way, p_V) in enumerate(chances.items()):
        edges = np.concatenate([[0.0], np.cumsum(np.asarray(p_V, float))])
        if len(p_V) != len(words) or abs(edges[-1] - 1) > 1e-6:
            raise ValueError(f"{way}: expected {len(words)} chances with the sum 1; found "
                             f"{len(p_V)} with the sum {edges[-1]:.6f}")
        chosen, y = int(np.searchsorted(edges[1:-1], number, "right")), 14.0 + high * row
        body.append(svg.text(2, y + 10, f"{way}: {visible(words[chosen])}", 11, "start",
                             font_weight="600"))
        for place, (start, stop) in enumerate(zip(edges, edges[1:])):
            colour, word, left = colour_of(place), visible(words[place]), 2 + wide * start
            across = wide * (stop - start)
            if across:
                outline = {"stroke": "currentColor", "stroke_width": 2} if place == chosen else {}
                body.append(svg.rectangle(left, y + 15, across, 19, fill=colour, **outline))
            if across > svg.text_width(word, 10.5):
                body.append(svg.text(left + across / 2, y + 28, word, 10.5, fill=svg.ink(colour)))
        told.append(f"{way}: {words[chosen]!r}")
    alt = f"Where the number {number:.2f} falls. " + "; ".join(told)
    return svg.picture("".join(body), wide + 4, end + 14, alt, shown=560)
