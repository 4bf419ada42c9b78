"""XProf beside this book: what its tools name of a run, and what it calls a step."""

from collections.abc import Mapping

from meshbook.drawing import svg

WIDE = 384.0  # pixels


def draw_tools(found: Mapping[str, tuple[int, int]], whole: tuple[int, int]):
    """Draw for each tool how many of a run's operations and steps its answer names.

    found {tool: (operations, steps)}; whole: how many of both there are. The tools that name most
    come first. Raises ValueError for a tool that names more than there is.
    """
    left, bar, high = 160.0, 108.0, 21.0
    body = [svg.text(left, 12, f"operations, of {whole[0]}", 11, "start"),
            svg.text(WIDE, 12, f"steps, of {whole[1]}", 11, "end")]
    told = []
    rows = sorted(found.items(), key=lambda row: (-row[1][0], -row[1][1], row[0]))
    for row, (tool, counts) in enumerate(rows):
        if any(one > most for one, most in zip(counts, whole, strict=True)):
            raise ValueError(f"expected at most {whole} operations and steps; {tool} has {counts}")
        y = 20 + high * row
        body += [svg.text(1, y + 13, tool, 11, "start"),
                 svg.frame(left, y + 2, bar, 14),
                 svg.rectangle(left, y + 2, bar * counts[0] / whole[0], 14, fill=svg.KINDS[2],
                               rx=1, data_tool=tool),
                 svg.text(left + bar + 6, y + 13, str(counts[0]), 11, "start")]
        for step in range(whole[1]):
            fill = svg.KINDS[0] if step < counts[1] else "none"
            body.append(svg.element("circle", cx=WIDE - 8 - 16 * (whole[1] - 1 - step), cy=y + 9,
                                    r=5, fill=fill, stroke="currentColor", stroke_opacity=0.6,
                                    data_step=tool))
        told.append(f"{tool}: {counts[0]} operations, {counts[1]} steps")
    alt = (f"What XProf's tools name of {whole[0]} operations and {whole[1]} steps. "
           + "; ".join(told))
    return svg.picture("".join(body), WIDE + 2, 20 + high * len(found), alt, shown=520)


def draw_calls(steps: Mapping[int, tuple[tuple[float, float], tuple[float, float]]]):
    """Draw for each step when Python was in its call and when the devices worked, in ms.

    steps {number: ((start, end) of the call, (start, end) on the devices)}, on one clock.
    """
    ends = [time for spans in steps.values() for span in spans for time in span]
    first, scale = min(ends), WIDE / (max(ends) - min(ends))
    rows = {"the call, in Python: what XProf calls the step": svg.KINDS[0],
            "from the first operation to the last, on the devices": svg.KINDS[2]}
    body, told, y = [], [], 0.0
    for number, spans in steps.items():
        body.append(svg.text(1, y + 12, f"step {number}", 11, "start", font_weight="600"))
        for (start, end), fill in zip(spans, rows.values(), strict=True):
            y += 18
            x, wide = 1 + scale * (start - first), scale * (end - start)
            words = f"{end - start:,.0f} ms"
            body.append(svg.rectangle(x, y, max(wide, 1.0), 14, fill=fill, rx=1,
                                      data_step=str(number)))
            beside = x + wide + svg.text_width(words) + 5 < WIDE
            at = (x + wide + 5, "start") if beside else (x - 5, "end")
            body.append(svg.text(at[0], y + 11, words, 11, at[1]))
        call, devices = (end - start for start, end in spans)
        told.append(f"step {number}: {call:,.0f} ms in the call, {devices:,.0f} ms on the devices")
        y += 24
    for words, fill in rows.items():
        body += [svg.rectangle(1, y, 10, 10, fill=fill, rx=2), svg.text(16, y + 9, words, 11,
                                                                       "start")]
        y += 17
    return svg.picture("".join(body), WIDE + 2, y, "Steps over time. " + "; ".join(told),
                       shown=560)
