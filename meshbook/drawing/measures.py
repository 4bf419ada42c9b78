"""Several measures of a few things: a column of bars for each measure, to a scale of its own."""

from collections.abc import Mapping
from numbers import Real

from meshbook.drawing import svg

WIDTH, PITCH, VALUE = 400.0, 24.0, 36.0  # pixels; VALUE: room for a number behind its bar


def draw_measures(rows: Mapping[str, Mapping[str, Real]], alt: str):
    """Draw {thing: {measure: value}}: a row per thing and a column per measure.

    Columns have scales of their own, since units differ: the longest bar of each is its largest
    value. Titles may be of two lines. Raises ValueError where rows have different measures or a
    value is negative.
    """
    measures = list(next(iter(rows.values()), ()))
    if not measures or any(list(row) != measures or min(row.values()) < 0 for row in rows.values()):
        raise ValueError(f"expected rows of the same measures, none negative; found {rows}")
    left = 6.0 + max(svg.text_width(name, 10) for name in rows)
    wide = (WIDTH - left) / len(measures)
    body = []
    top = 6.0 + 13 * max(title.count("\n") + 1 for title in measures)
    for at, measure in enumerate(measures):
        x, most = left + wide * at, max(row[measure] for row in rows.values()) or 1
        body += [svg.text(x, 11 + 13 * line, words, 11, "start", font_weight="600")
                 for line, words in enumerate(measure.split("\n"))]
        for place, row in enumerate(rows.values()):
            y, long = top + PITCH * place, (wide - VALUE - 8) * row[measure] / most
            body += [svg.rectangle(x, y + 3, long, 14, fill=svg.SERIES[at % len(svg.SERIES)],
                                   data_measure=" ".join(measure.split())),
                     svg.text(x + long + 4, y + 14, svg.readable(row[measure]), 10.5, "start")]
    body += [svg.text(0, top + PITCH * place + 14, name, 11, "start")
             for place, name in enumerate(rows)]
    told = "; ".join(f"{name}: " + ", ".join(
        f"{' '.join(measure.split())} {svg.readable(value)}" for measure, value in row.items())
        for name, row in rows.items())
    return svg.picture("".join(body), WIDTH, top + PITCH * len(rows), f"{alt} {told}", shown=520)
