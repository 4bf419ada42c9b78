"""Long rows of text on TPUs, by how attention is done: how long they may be, what they wait for.

Both are from one record of compiled steps. Steps of one length were played by the compiler's clock.
"""
import json
from typing import NamedTuple

import jax.numpy as jnp

from meshbook.costs.plans import Plan
from meshbook.costs.step import describe
from meshbook.costs.work import causal_work
from meshbook.drawing.figures import bars
from meshbook.models.decoder_config import DecoderConfig
from meshbook.planning.clocks import device_of
from meshbook.planning.topologies import RESULTS, Compilation
from meshbook.text import text_table

RECORD = "tpu-context.json"


class Longest(NamedTuple):
    """One way of doing attention on so many devices: what of the tokens tried fits, and what not.

    fits: the longest row that the compiler accepts, and the bytes that are live at most at once;
    too_long: the shortest that it refuses, and the bytes that it says are needed.
    """

    way: str
    devices: int
    fits: tuple[int, int]
    too_long: tuple[int, int]


class Timed(NamedTuple):
    """One way of doing attention, played by the compiler's clock: a step and, in it, attention.

    ms: of the step; links: ms that attention's exchanges take; exposed: ms of them that are waited
    for. What sums the gradients is in neither. copies: ms that arrays are copied; mfu: of the step,
    with the work that the causal mask leaves, and nothing twice.
    """

    way: str
    tokens: int
    ms: float
    links: float
    exposed: float
    copies: float
    mfu: float


def recorded_config(tokens: int):
    """The DecoderConfig of `benchmarks.aot_context`, for rows of so many tokens."""
    return DecoderConfig(50_257, tokens=tokens, embed=1024, hidden=4096, heads=16, groups=8,
                         layers=12, gated=False, remat="attention", dtype=jnp.bfloat16)


def recorded():
    """(cell of `benchmarks.aot_context` as a dict, its Compilation) of all that was compiled."""
    path = RESULTS / RECORD
    cells = json.loads(path.read_text("utf8"))["cells"] if path.exists() else {}
    return [(each["cell"], Compilation.of_record(each["program"])) for each in cells.values()]


def timed_rows():
    """A Timed for each way that was played by the clock."""
    found = []
    for cell, program in recorded():
        if cell["timed"]:
            links, exposed = map(sum, zip(*(
                times for kind, times in program.seen.items() if kind != "all-reduce")))
            ms, chip = program.clock["step"], device_of(cell["tpu"])
            useful = causal_work(describe(recorded_config(cell["tokens"]), Plan(), 1))
            mfu = useful / cell["devices"] / (ms / 1e3) / chip.flops
            found.append(Timed(cell["way"], cell["tokens"], ms, links, exposed,
                               program.clock["kinds"]["copy"], mfu))
    return found


def table_of_times():
    """A text table: each way's step, and how long its exchanges take, and are waited for."""
    return text_table(("attention", "tokens", "a step", "on the links", "exposed", "hidden",
                        "copies", "MFU"), [
        (each.way, f"{each.tokens:,}", f"{each.ms:,.0f} ms", f"{each.links:.1f} ms",
         f"{each.exposed:.1f} ms", f"{1 - each.exposed / each.links:.0%}",
         f"{each.copies:,.0f} ms", f"{each.mfu:.0%}")
        for each in timed_rows()], numbers=1)


def longest_rows():
    """A Longest for each way that was compiled for both a row that fits and one that does not."""
    found = {}
    for cell, program in recorded():
        if cell["timed"]:
            continue
        fit, not_fit = found.setdefault((cell["way"], cell["devices"]), ([], []))
        (fit if program.fits else not_fit).append(
            (cell["tokens"], program.live if program.fits else program.peak))
    return [Longest(*key, max(fit), min(not_fit))
            for key, (fit, not_fit) in found.items() if fit and not_fit]


def table_of_rows():
    """A text table: each way's longest row that fits, and the next one."""
    gib = lambda size: f"{size / 2**30:.1f} GiB"
    return text_table(("attention", "devices", "fits", "live", "too long", "would need"), [
        (each.way, f"{each.devices}", f"{each.fits[0]:,}", gib(each.fits[1]),
         f"{each.too_long[0]:,}", gib(each.too_long[1])) for each in longest_rows()], numbers=1)


def draw_rows():
    """Bars: the longest row of tokens that fits, way by way."""
    shown = {f"{each.way}, {each.devices} device{'s' * (each.devices > 1)}": each.fits[0] / 1024
             for each in longest_rows()}
    said = "; ".join(f"{label} {value:,.0f}" for label, value in shown.items())
    return bars(shown, "Ki tokens", f"The longest row that fits, in units of 1,024 tokens: {said}")
