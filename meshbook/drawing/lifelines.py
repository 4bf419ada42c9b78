"""The life of a run's checkpoints: steps of each process, what was saved, damaged and resumed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshbook.drawing import svg


@dataclass(frozen=True)
class Life:
    """What one process did: the steps that it took, and the steps that it saved.

    came_from: the step of the checkpoint that it resumed from, None for none; ended: what is
    written after its last step, such as "SIGKILL"; lost: whether that was no proper end.
    """

    steps: Sequence[int]
    saved: Sequence[int] = ()
    came_from: int | None = None
    ended: str = ""
    lost: bool = False


def draw_lives(lives: Mapping[str, Life], damaged: Sequence[int] = ()):
    """Draw processes below each other, their steps from left to right.

    A dot is a step, a square below it a checkpoint, an arrow the checkpoint that the next process
    resumed from; steps that were lost are hollow. damaged: checkpoints that do not verify, crossed
    out where they were saved. Raises ValueError for a process
    that resumes from what none before it has saved.
    """
    last = max(step for life in lives.values() for step in life.steps)
    label, pitch, high = 66.0, min(28.0, 250.0 / (last + 1)), 58.0
    at = lambda step: label + pitch * (step - 0.5)
    body, known, told = [], {}, []
    for step in range(1, last + 1):
        body.append(svg.text(at(step), 12, str(step), 10))
    body.append(svg.text(0, 12, "step", 10, "start"))
    for row, (name, life) in enumerate(lives.items()):
        y = 34.0 + high * row
        body.append(svg.text(0, y + 4, name, 10.5, "start", font_weight="600"))
        kept = max(life.saved, default=0)
        if life.came_from is not None:
            if life.came_from not in known:
                raise ValueError(f"{name} resumes from step {life.came_from}; saved before are "
                                 f"{sorted(known)}")
            body.append(bent(at(life.came_from), known[life.came_from] + 9, at(life.steps[0]), y))
        for step in life.steps:
            gone = life.lost and step > kept
            body.append(svg.element(
                "circle", cx=at(step), cy=y, r=6, stroke="currentColor", stroke_width=1.2,
                fill="none" if gone else svg.KINDS[2], stroke_dasharray="2 2" if gone else "none"))
        for step in life.saved:
            known[step] = y + 18
            body.append(folder(at(step), y + 18, step in damaged and row == owner(lives, step)))
        if life.ended:
            x = at(life.steps[-1]) + 12
            body.append(svg.text(x, y + 4, life.ended, 10.5, "start", font_weight="600"))
        came = "" if life.came_from is None else f"resumes from {life.came_from}, "
        told.append(f"{name}: {came}steps {life.steps[0]} to {life.steps[-1]}, saves "
                    f"{', '.join(map(str, life.saved)) or 'none'} {life.ended}".strip())
    alt = "; ".join(told) + "".join(f"; checkpoint {step} is damaged" for step in damaged)
    width = label + pitch * last + 58
    return svg.picture("".join(body), width, 14 + high * len(lives), alt, shown=1.35 * width)


def owner(lives: Mapping[str, Life], step: int):
    """The row of the process that saved this step last."""
    return max(row for row, life in enumerate(lives.values()) if step in life.saved)


def folder(x: float, y: float, damaged: bool):
    """A checkpoint: a small square with a check mark, crossed out where it is damaged."""
    colour = svg.KINDS[1] if damaged else svg.KINDS[0]
    square = svg.rectangle(x - 8, y - 7, 16, 16, fill=colour, rx=2)
    return square + svg.text(x, y + 5, "✗" if damaged else "✓", 11, fill=svg.ink(colour))


def bent(x1: float, y1: float, x2: float, y2: float):
    """An arrow down from a checkpoint, and to the right onto a step."""
    return svg.line(x1, y1 + 2, x1, y2, 1.2) + svg.arrow(x1, y2, x2 - 8, y2)
