"""Which proof catches which faulty program."""

import textwrap
from collections.abc import Collection, Mapping

from meshbook.drawing import svg

LEFT, CELL, ROW = 204.0, 49.0, 54.0  # of the words, of a column, of a row: pixels
CAUGHT, PASSED = svg.KINDS[1], "#858585"


def draw_catches(programs: Mapping[str, tuple[str, Collection[str]]], proofs: Mapping[str, str]):
    """A row for each program and a column for each proof: a cross where it fails, a dot where not.

    programs {name: (what is wrong with it, the proofs that fail)}; proofs {name: its heading}.
    Raises ValueError for a proof that has no column.
    """
    strange = {each for _, by in programs.values() for each in by} - set(proofs)
    if strange:
        raise ValueError(f"expected proofs among {', '.join(proofs)}, found {sorted(strange)}")
    body = [svg.text(LEFT + CELL * (i + 0.5), 12, heading, 10)
            for i, heading in enumerate(proofs.values())]
    told = []
    for row, (name, (story, by)) in enumerate(programs.items()):
        y = 20 + ROW * row
        body.append(svg.line(0, y, LEFT + CELL * len(proofs), y, 0.5, stroke_opacity=0.5))
        body.append(svg.text(0, y + 17, name, 11.5, "start", font_weight="600"))
        body += [svg.text(0, y + 31 + 13 * at, line, 10, "start")
                 for at, line in enumerate(textwrap.wrap(story, 40))]
        for column, proof in enumerate(proofs):
            body += _mark(LEFT + CELL * (column + 0.5), y + ROW / 2, proof in by, proof)
        told.append(f"{name} ({story}): caught by {', '.join(by) or 'none'}")
    height = 20 + ROW * len(programs)
    body.append(svg.text(LEFT, height + 14, "✕ fails: caught · ● passes", 10.5, "start"))
    alt = f"{len(programs)} programs against {len(proofs)} proofs. " + "; ".join(told)
    return svg.picture("".join(body), LEFT + CELL * len(proofs), height + 22, alt, shown=560)


def _mark(x, y, caught, proof):
    """A proof that failed: a filled square with a cross; one that passed: a grey dot."""
    if not caught:
        return [svg.element("circle", cx=x, cy=y, r=4, fill=PASSED, data_passed=proof)]
    return [svg.rectangle(x - 16, y - 15, 32, 30, fill=CAUGHT, rx=4, data_caught=proof),
            svg.text(x, y + 6, "✕", 16, fill=svg.ink(CAUGHT), font_weight="600")]
