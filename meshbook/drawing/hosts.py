"""Processes of one run: who has which devices and talks to whom, their rows, steps beside saves."""

from collections.abc import Mapping, Sequence

from meshbook.drawing import svg

WIDE = 384.0  # pixels


def draw_processes(counts: Sequence[int]):
    """Draw processes with so many devices each, what their devices exchange, and the coordinator.

    Raises ValueError for no process, and for one without a device.
    """
    if not counts or min(counts) < 1:
        raise ValueError("expected at least one process with at least one device each, found "
                         f"{list(counts)}")
    pitch, body, first = WIDE / len(counts), [], 0
    body += [svg.frame(WIDE / 2 - 92, 2, 184, 26),
             svg.text(WIDE / 2, 19, "coordinator, in process 0", 11)]
    for process, devices in enumerate(counts):
        x, middle = process * pitch + 3, (process + 0.5) * pitch
        body += [svg.line(middle, 44, middle, 56, stroke_dasharray="3 3"),
                 svg.frame(x, 56, pitch - 6, 68),
                 svg.text(middle, 74, f"process {process}", 11, font_weight="600")]
        size = min(26.0, (pitch - 18) / devices - 4)
        left = middle - (size + 4) * devices / 2 + 2
        for at in range(devices):
            fill = svg.device_colour(first + at)
            body += [svg.rectangle(left + (size + 4) * at, 84, size, size, fill=fill, rx=3,
                                   data_device=str(first + at)),
                     svg.text(left + (size + 4) * at + size / 2, 84 + size / 2 + 4,
                              str(first + at), 11, fill=svg.ink(fill))]
        first += devices
    body += [svg.line(WIDE / 2, 28, WIDE / 2, 44, stroke_dasharray="3 3"),
             svg.line(pitch / 2, 44, WIDE - pitch / 2, 44, stroke_dasharray="3 3"),
             svg.line(6, 134, WIDE - 6, 134, width=3),
             svg.text(WIDE / 2, 150, "collectives: every device takes part, in the same order", 11),
             svg.text(WIDE - 4, 40, "who is here, JSON", 10, "end")]
    alt = (f"{len(counts)} processes with {', '.join(map(str, counts))} devices. All talk to the "
           "coordinator in process 0, and their devices to each other in collectives.")
    return svg.picture("".join(body), WIDE + 2, 156, alt, shown=520)


def draw_shares(shares: Mapping[str, Sequence[int]], rows: int):
    """Draw which of `rows` examples of a batch each process has loaded: {process: examples}."""
    pitch, left, told = (WIDE - 74) / rows, 74.0, []
    body = [svg.text(left + pitch * (row + 0.5), 12, str(row), 10) for row in range(rows)]
    for line, (name, share) in enumerate(shares.items()):
        y = 20.0 + 24 * line
        body.append(svg.text(0, y + 14, name, 11, "start"))
        for row in range(rows):
            fill = svg.device_colour(line) if row in share else "none"
            body.append(svg.rectangle(left + pitch * row, y, pitch - 2, 20, fill=fill, rx=2,
                                      stroke="currentColor", stroke_opacity=0.3,
                                      data_loaded=str(row in share)))
        told.append(f"{name}: {', '.join(map(str, share))}")
    alt = "Examples of the batch that each process loads. " + "; ".join(told)
    return svg.picture("".join(body), WIDE + 2, 22 + 24 * len(shares), alt, shown=520)


def draw_beside(steps: Sequence[float], saves: Sequence[tuple[float, float]]):
    """Draw when steps ended, as ticks, above when saves were being written, as bars; seconds."""
    start = min([*steps, *(begin for begin, _ in saves)])
    length = max([*steps, *(end for _, end in saves)]) - start
    at = lambda seconds: 60 + (WIDE - 66) * (seconds - start) / length
    body = [svg.text(0, 22, "steps", 11, "start"), svg.text(0, 52, "saving", 11, "start")]
    body += [svg.line(at(each), 8, at(each), 28, width=1.6, data_step="1") for each in steps]
    body += [svg.rectangle(at(begin), 38, at(end) - at(begin), 20, fill=svg.KINDS[2], rx=2,
                           data_save="1") for begin, end in saves]
    within = sum(any(begin < each < end for begin, end in saves) for each in steps)
    alt = (f"{len(steps)} steps and {len(saves)} saves along one time axis; {within} steps end "
           "while a save is being written.")
    return svg.picture("".join(body), WIDE + 2, 62, alt, shown=520)
