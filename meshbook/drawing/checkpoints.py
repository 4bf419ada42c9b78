"""Checkpoints: what one holds, how it is saved, a bit that changed, and what resuming changes."""

import math
from collections.abc import Mapping, Sequence
from numbers import Real

from meshbook.drawing import svg
from meshbook.drawing.lifelines import folder

WIDE = 384.0  # pixels


def draw_checkpoint(name: str, arrays: Mapping[str, tuple[int, int]],
                    manifest: Mapping[str, str]):
    """Draw a checkpoint as a folder: the arrays, with bars for their bytes, and the manifest.

    arrays {part: (how many, bytes)}; manifest {what: words}.
    """
    most = max(size for _, size in arrays.values())
    high = 34.0 + 34 * len(arrays)
    whole = high + 28 + 18 * len(manifest)
    body = [svg.text(2, 12, name, 12, "start", font_weight="600"), svg.frame(1, 20, WIDE, whole),
            svg.text(12, 38, "arrays, written by Orbax", 11, "start", font_weight="600")]
    told = []
    for row, (part, (count, size)) in enumerate(arrays.items()):
        y = 46.0 + 34 * row
        words = f"{count} arrays, {svg.size_text(size)}"
        body += [svg.text(12, y + 12, part, 11, "start"),
                 svg.text(WIDE - 10, y + 12, words, 11, "end"),
                 svg.rectangle(12, y + 17, (WIDE - 22) * size / most, 9, fill=svg.KINDS[2], rx=1,
                               data_part=part)]
        told.append(f"{part}: {words}")
    body += [svg.line(1, 16 + high, 1 + WIDE, 16 + high, stroke_opacity=0.5),
             svg.text(12, 34 + high, "manifest.json", 11, "start", font_weight="600")]
    for row, (what, words) in enumerate(manifest.items()):
        y = 54 + high + 18 * row
        body += [svg.text(12, y, what, 11, "start"), svg.text(112, y, words, 11, "start")]
        told.append(f"{what}: {words}")
    alt = f"The checkpoint {name}. " + "; ".join(told)
    return svg.picture("".join(body), WIDE + 2, whole + 22, alt, shown=500)


def draw_saving(stages: Sequence[tuple[str, bool, Sequence[int]]]):
    """Draw the stages of a save downwards, and the steps that count as saved after each of them.

    stages: (what happens, whether training waits for it, the steps that have a checkpoint then).
    """
    pitch, told = 38.0, []
    body = [svg.text(WIDE, 12, "a crash after it leaves", 11, "end")]
    for row, (words, waits, saved) in enumerate(stages):
        y = 22 + pitch * row
        fill = svg.KINDS[1] if waits else "none"
        body.append(svg.rectangle(1, y, 292, 26, fill=fill, stroke="currentColor", rx=3,
                                  data_waits=str(waits)))
        ink = svg.ink(fill) if waits else "currentColor"
        body.append(svg.text(10, y + 17, words, 11, "start", fill=ink))
        if row + 1 < len(stages):
            body.append(svg.arrow(24, y + 26, 24, y + pitch))
        for place, step in enumerate(saved):
            x = WIDE - 24 - 46 * (len(saved) - 1 - place)
            body += [folder(x + 14, y + 13, False), svg.text(x, y + 17, str(step), 11, "end")]
        kept = " and ".join(map(str, saved)) or "nothing"
        told.append(f"{words}{', while training waits' if waits else ''}: leaves {kept}")
    y = 22 + pitch * len(stages)
    body += [svg.rectangle(1, y, 10, 10, fill=svg.KINDS[1], rx=2),
             svg.text(16, y + 9, "training waits; everything else is in the background", 11,
                      "start")]
    alt = "The stages of a save, and the checkpoints that a crash after each leaves. "
    return svg.picture("".join(body), WIDE + 2, y + 16, alt + "; ".join(told), shown=500)


def draw_flip(size: int, place: int, hashes: Mapping[str, str]):
    """Draw where in a file of `size` bytes one bit changed, and its hashes {when: hex digits}.

    Digits that differ from those of the first hash are filled. Raises ValueError for hashes of
    different lengths and for a place that is not in the file.
    """
    lengths = {len(digits) for digits in hashes.values()}
    if len(lengths) != 1 or not 0 <= place < size:
        raise ValueError(f"expected hashes of one length and a byte of {size:,}; found lengths "
                         f"{sorted(lengths)} and byte {place:,}")
    x = WIDE * (place + 0.5) / size
    body = [svg.text(1, 12, f"a file of {size:,} bytes, one bit changed", 11, "start"),
            svg.frame(1, 20, WIDE, 18),
            svg.rectangle(x - 1.5, 18, 3, 22, fill=svg.KINDS[1], data_byte=str(place))]
    first, half, told, y = next(iter(hashes.values())), max(lengths) // 2, [], 60.0
    for when, digits in hashes.items():
        body.append(svg.text(1, y, when, 11, "start"))
        changed = sum(one != other for one, other in zip(first, digits, strict=True))
        told.append(f"{when}: {digits[:8]}..., {changed} of {len(digits)} digits differ")
        for i, (one, other) in enumerate(zip(first, digits, strict=True)):
            left, top = 1 + WIDE / half * (i % half), y + 6 + 19 * (i // half)
            fill = svg.KINDS[1] if one != other else "none"
            ink = svg.ink(fill) if one != other else "currentColor"
            body += [svg.rectangle(left, top, WIDE / half - 1, 17, fill=fill, rx=1),
                     svg.text(left + WIDE / half / 2 - 0.5, top + 13, other, 11, fill=ink)]
        y += 68
    alt = f"One bit of {size:,} bytes changed. SHA-256 {'; '.join(told)}"
    return svg.picture("".join(body), WIDE + 2, y - 20, alt, shown=500)


def draw_differences(rows: Mapping[str, Sequence[Real]], first: int):
    """Draw relative differences {run: one for each step} as cells, the deeper the larger.

    first: the number of the first step. A difference of exactly 0 is an empty cell with a 0.
    """
    count = max(map(len, rows.values()))
    pitch = WIDE / count
    number = lambda i: str(first + i) if i else f"step {first}"
    body, told = [svg.text(pitch * (i + 0.5), 12, number(i), 11) for i in range(count)], []
    for row, (name, values) in enumerate(rows.items()):
        y = 22.0 + 46 * row
        body.append(svg.text(1, y + 10, name, 11, "start", font_weight="600"))
        for i, value in enumerate(values):
            shade = min(0.65, max(0.1, (math.log10(value) + 8) / 10)) if value else 0.0
            x = 1 + pitch * i
            body += [svg.rectangle(x, y + 16, pitch - 2, 20, fill=svg.KINDS[0], rx=2,
                                   fill_opacity=shade, stroke="currentColor", stroke_opacity=0.4),
                     svg.text(x + pitch / 2 - 1, y + 30, difference(value), 11)]
        told.append(f"{name}: {', '.join(map(difference, values))}")
    alt = f"How far losses are from those of the whole run, from step {first}. " + "; ".join(told)
    return svg.picture("".join(body), WIDE + 2, 22 + 46 * len(rows) - 6, alt, shown=500)


def difference(value: Real):
    """A relative difference in few characters: 0, 8e-08, 0.03% or 1.3%."""
    if value == 0:
        return "0"
    return f"{value:.0e}" if value < 5e-5 else f"{value:.{1 if value > 2e-3 else 2}%}"
