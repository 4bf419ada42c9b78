"""Who waits for whom in a training loop: the host that prepares batches, the device that trains."""

from collections.abc import Mapping
from numbers import Real
from typing import NamedTuple

from meshbook.drawing import svg

HOST, DEVICE = "#858585", svg.KINDS[0]
WIDE, LEFT, PITCH = 332.0, 58.0, 88.0  # of the time axis, before it, from loop to loop: pixels


class Loop(NamedTuple):
    """A loop, in any unit of time: a batch takes the host `prepare`, a step the device `work`.

    late: how many steps later the host reads a loss, for which it waits; 0 is at once.
    """

    prepare: Real
    work: Real
    late: int


def times(loop: Loop, steps: int):
    """{"host": [(start, end)], "device": [(start, end)]} of each batch and each step.

    The device takes a step as soon as its batch is there and the step before is done. Raises
    ValueError for times that are not positive and a `late` below 0.
    """
    if loop.prepare <= 0 or loop.work <= 0 or loop.late < 0:
        raise ValueError(f"expected times above 0 and late of at least 0, found {loop}")
    host, device, now = [], [], 0.0
    for step in range(steps):
        host.append((now, now + loop.prepare))
        free = device[-1][1] if device else 0.0
        start = max(host[-1][1], free)
        device.append((start, start + loop.work))
        read = step - loop.late
        now = max(host[-1][1], device[read][1] if read >= 0 else 0.0)
    return {"host": host, "device": device}


def busy(loop: Loop):
    """The share of the time in which the device works, once the loop is under way."""
    device = times(loop, 20 + loop.late)["device"]
    return loop.work / (device[-1][0] - device[-2][0])


def draw_pacing(loops: Mapping[str, Loop], steps: int = 4):
    """Draw {title: Loop} below each other on one time axis, with a lane each for host and device.

    Numbers are those of batches and their steps, from 1; time goes to the right, without a unit.
    """
    found = {title: times(loop, steps) for title, loop in loops.items()}
    whole = max(end for lanes in found.values() for _, end in lanes["device"])
    body, told = [], []
    for place, (title, lanes) in enumerate(found.items()):
        y, share = PITCH * place, busy(loops[title])
        words = f"{title}: device busy {share:.0%}"
        body.append(svg.text(0, y + 12, words, 12, "start", font_weight="600"))
        for lane, (name, colour) in enumerate((("host", HOST), ("device", DEVICE))):
            top = y + 22 + 27 * lane
            body.append(svg.text(0, top + 15, name, 11, "start"))
            body.append(svg.line(LEFT, top + 23, LEFT + WIDE, top + 23, 0.5, stroke_opacity=0.5))
            for number, (start, end) in enumerate(lanes[name], 1):
                x, wide = LEFT + WIDE * start / whole, WIDE * (end - start) / whole
                body.append(svg.rectangle(x, top, wide - 1, 22, fill=colour, rx=2,
                                          data_lane=name, data_step=str(number)))
                body.append(svg.text(x + wide / 2, top + 15, str(number), 11,
                                     fill=svg.ink(colour)))
        told.append(words)
    alt = "Host and device in a training loop, time to the right. " + "; ".join(told)
    return svg.picture("".join(body), LEFT + WIDE + 2, PITCH * len(found) - 12, alt, shown=520)
