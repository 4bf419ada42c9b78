"""What of a run's time was useful: a line for each step and each checkpoint, and goodput."""
from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import statistics
import time

KINDS = "begin", "step", "saved", "end"


class Progress:
    """Appends lines to FOLDER/progress; what was written outlives a SIGKILL. None writes nothing.

    A line is one of KINDS, a step, and the time in seconds since 1970.
    """

    def __init__(self, folder: str | os.PathLike | None):
        self.file = None
        if folder is not None:
            how = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self.file = os.open(pathlib.Path(folder, "progress"), how, 0o644)
            os.ftruncate(self.file, len(whole_lines(folder)))  # the next line begins a line

    def note(self, kind: str, step: int):
        if self.file is not None:
            os.write(self.file, f"{kind} {step} {time.time():.6f}\n".encode())

    def close(self):
        if self.file is not None:
            os.close(self.file)


def whole_lines(folder: str | os.PathLike):
    """The bytes of the file, without half a line at its end, of a process that died."""
    content = pathlib.Path(folder, "progress").read_bytes()
    return content[:content.rfind(b"\n") + 1]


@dataclasses.dataclass
class Stretch:
    """What one life of a run did: from which checkpoint it began, its steps, what it saved, when.

    steps, saved: [(step, seconds since 1970)]; ended: when it ended in order, None if it did not.
    """

    came_from: int
    began: float
    steps: list = dataclasses.field(default_factory=list)
    saved: list = dataclasses.field(default_factory=list)
    ended: float | None = None

    @property
    def last(self):
        """When the last thing happened that is known of it."""
        known = [self.began, *(at for _, at in self.steps + self.saved)]
        return max(known) if self.ended is None else self.ended


def read_progress(folder: str | os.PathLike):
    """Every Stretch of a run, in order; half a line, the last of a process that died, is none."""
    found = []
    for line in whole_lines(folder).decode().splitlines():
        kind, *numbers = line.split(" ")
        if kind not in KINDS or len(numbers) != 2:
            continue
        step, at = int(numbers[0]), float(numbers[1])
        if kind == "begin":
            known = {each for life in found for each, _ in life.saved}
            if found and step >= 0 and step not in known:
                found[-1].saved.append((step, found[-1].last))  # it died before it could say so
            found.append(Stretch(step, at))
        elif kind == "end":
            found[-1].ended = at
        else:
            (found[-1].steps if kind == "step" else found[-1].saved).append((step, at))
    return found


@dataclasses.dataclass(frozen=True)
class Goodput:
    """The useful share of a run's time.

    kept: steps that count; again: steps that were done and lost; typical, seconds: the median time
    of a step, and that of everything.
    """

    kept: int
    again: int
    typical: float
    seconds: float

    @property
    def share(self):
        return self.kept * self.typical / self.seconds if self.seconds else 0.0

    def __str__(self):
        return (f"goodput {self.share:.0%}: {self.kept} steps of {self.typical:.3g} s in "
                f"{self.seconds:.1f} s; {self.again} were done and lost")


def between_failures(hosts: int, each: float):
    """Seconds between two failures of a run on so many hosts, each of which fails so seldom."""
    return each / hosts


def lost_share(interval: float, restart: float, failures: float, save: float = 0.0):
    """The share of a run's time that goes into failures and into saving, as long as it is small.

    All in seconds: between two saves, to start again, between two failures, that a save stops the
    steps. A failure loses half an interval, on average.
    """
    return save / interval + (interval / 2 + restart) / failures


def best_interval(save: float, failures: float):
    """Seconds between saves that lose the least, √(2·save·failures): see `lost_share`.

    Source: Young 1974, "A first order approximation to the optimum checkpoint interval".
    """
    return math.sqrt(2 * save * failures)


def goodput(stretches: list[Stretch]):
    """The Goodput of a run that was begun and killed any number of times.

    Time counts from the first beginning to the last end. Between a life that ended in order and
    the next one it does not: nobody wanted steps then. Between a death and the next life it does.
    """
    times = [after - before for each in stretches
             for (_, before), (_, after) in zip(each.steps, each.steps[1:])]
    done, kept = sum(len(each.steps) for each in stretches), set()
    for each in stretches:  # what came after the checkpoint from which it begins is lost
        kept = {step for step in kept if step <= each.came_from} | {
            step for step, _ in each.steps}
    seconds = sum(each.last - each.began for each in stretches)
    seconds += sum(after.began - before.last for before, after in zip(stretches, stretches[1:])
                   if before.ended is None)
    return Goodput(len(kept), done - len(kept), statistics.median(times) if times else 0.0, seconds)
