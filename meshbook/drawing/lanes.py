"""What a device computes and what its links carry at the same time: tasks on two lanes."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from meshbook.drawing import svg

LANES = {"compute": svg.KINDS[0], "links": svg.KINDS[1]}


class Task(NamedTuple):
    """A piece of work: its name, its lane, how long it takes, the tasks whose results it needs."""

    name: str
    lane: str
    seconds: float
    needs: tuple = ()


def schedule(tasks: Sequence[Task]):
    """{name: (start, end)} where each task starts as early as it can.

    A lane does one task at a time, in the order in which they are given. Raises ValueError for a
    lane that there is not, and for a task that needs one that does not stand before it.
    """
    free, times = dict.fromkeys(LANES, 0.0), {}
    for task in tasks:
        if task.lane not in LANES:
            raise ValueError(f"expected a lane, one of {', '.join(LANES)}; found {task.lane!r}")
        if missing := [name for name in task.needs if name not in times]:
            raise ValueError(f"{task.name} needs {missing[0]}, which does not stand before it")
        start = max(free[task.lane], *(times[name][1] for name in task.needs), 0.0)
        free[task.lane] = start + task.seconds
        times[task.name] = start, free[task.lane]
    return times


def draw_lanes(rows: Mapping[str, Sequence[Task]]):
    """Draw {title: tasks} below each other on one time axis: a lane for matmuls, one for links."""
    wide, left, pitch = 300.0, 52.0, 84.0
    whole = max(end for tasks in rows.values() for _, end in schedule(tasks).values())
    body, told = [], []
    for row, (title, tasks) in enumerate(rows.items()):
        y, times = pitch * row, schedule(tasks)
        last = max(end for _, end in times.values())
        body.append(svg.text(0, y + 12, f"{title}: {1e3 * last:.2f} ms", 12, "start",
                             font_weight="600"))
        for lane, name in enumerate(LANES):
            body.append(svg.text(0, y + 36 + 26 * lane, name, 11, "start"))
        for task in tasks:
            start, end = (left + wide * each / whole for each in times[task.name])
            top = y + 20 + 26 * list(LANES).index(task.lane)
            fill = LANES[task.lane]
            hint = svg.element("title", f"{task.name}: {1e3 * task.seconds:.2f} ms")
            body.append(svg.rectangle(start, top, end - start - 1, 22, fill=fill, rx=2, body=hint,
                                      data_task=task.name))
            fits = svg.text_width(task.name, 11) < end - start
            words = task.name if fits else task.name.rpartition(" ")[2]
            body.append(svg.text((start + end) / 2, top + 15, words, 11, fill=svg.ink(fill)))
            begin, finish = (1e3 * each for each in times[task.name])
            told.append(f"{title}, {task.lane}: {task.name} from {begin:.2f} to {finish:.2f} ms")
    height = pitch * len(rows) - 6
    return svg.picture("".join(body), left + wide + 4, height, "; ".join(told), shown=500)
