"""What holds of any picture: its parts are inside, its words can be read and are not on others."""
import itertools

import pytest
from boxes import drawings

from meshbook.costs.devices import DEVICES
from meshbook.drawing.catches import draw_catches
from meshbook.drawing.charts import draw_groups
from meshbook.drawing.checkpoints import (
    draw_checkpoint, draw_differences, draw_flip, draw_saving)
from meshbook.drawing.collective_steps import COSTS, draw_collective
from meshbook.drawing.context import draw_meetings
from meshbook.drawing.decoder import draw_decoder, draw_pre_norm
from meshbook.drawing.fault_grids import draw_fault_grid
from meshbook.drawing.figures import bars
from meshbook.drawing.measures import draw_measures
from meshbook.drawing.overlap import draw_overlap
from meshbook.drawing.profiles import draw_gantt, draw_shares
from meshbook.faults import FAULTS, networks
from meshbook.hlo import schedule
from meshbook.profiling.estimated_runs import EstimatedRun
from meshbook.profiling.traces import Record, Trace

TRACE = Trace(Record(device, f"dot.{n}", kind, 10.0 * n, 3.0 + n, 0) for device in range(3)
              for n, kind in enumerate(("compute", "collective", "copy")))
RUN = EstimatedRun([schedule.Span("a", "compute", schedule.CORE, 0.0, 4e-3, "", None),
                    schedule.Span("b", "collective", schedule.LINKS, 3e-3, 8e-3, "", None)],
                   DEVICES["TPU v5e"])
DECODER = {"embedding": 1_000, "attention": 2_000, "norm": 30, "MLP": 4_000, "head": 5_000}
PRE_NORM = {"token table": 900, "norm": 10, "attention": 400, "norm 2": 10, "MLP": 800,
            "last norm": 11, "head": 0}
PICTURES = {
    "groups, a long unit": lambda: draw_groups(
        {"all": {"float32": 1, "bfloat16": 0.5}, "none": {"float32": 43.2, "bfloat16": 26.7}},
        "4·B·T·D bytes", "Bytes."),
    "groups, a long unit before a limit": lambda: draw_groups(
        {"all": {"one": 39.0, "two": 43.2}}, "4·B·T·D bytes", "Bytes.", ("a device has", 40.0)),
    "bars, a long unit": lambda: bars(
        {"one byte, layers recomputed": 2.1, "one word": 4.19}, "MB of random bits per step",
        "Bits."),
    "catches": lambda: draw_catches(
        {"an extra psum": ("activations that are summed already are averaged once more",
                           ("same", "drawn")), "right": ("nothing", ())},
        {name: f"{name[:6]}?" for name in networks.PROOFS}),
    "checkpoint": lambda: draw_checkpoint(
        "run/40", {"parameters": (16, 3000), "moments": (32, 6000)}, {"step": "4", "key": "7"}),
    "saving": lambda: draw_saving([("copy to the host", True, [4]), ("write", False, [4, 8]),
                                   ("rename", False, [4, 8, 1200])]),
    "flip": lambda: draw_flip(1000, 250, {"before": 8 * "0123abcd", "now": 8 * "0f23abc0"}),
    "differences": lambda: draw_differences({"same": [0] * 6, "lost": [3e-4, 0.03] * 3}, 5),
    "decoder": lambda: draw_decoder(DECODER, 3, 16, 640),
    "pre-norm": lambda: draw_pre_norm(PRE_NORM, 3, "A decoder."),
    "faults": lambda: draw_fault_grid({each.name: each.caught_by for each in FAULTS},
                                      networks.PROOFS),
    "measures": lambda: draw_measures(
        {name: {"kB\nheld": 975.0 + n, "MFLOP": 31.7, "sent": n, "s": 1} for n, name in enumerate(
            ("one", "another"))}, "Two."),
    "meetings": lambda: draw_meetings(
        {"a ring": [(i, j, i, (i - j) % 4) for i in range(4) for j in range(4)]}, 4, "Four."),
    "overlap": lambda: draw_overlap({"as compiled": RUN, "in parts": RUN}),
    "gantt": lambda: draw_gantt(TRACE, 1),
    "shares": lambda: draw_shares(TRACE),
    **{kind: lambda kind=kind: draw_collective(
        kind, [[d] if kind == "all-gather" else [d, 10, 2, 3] for d in range(4)], "in_jax")
       for kind in COSTS},
}


@pytest.mark.parametrize("name", PICTURES)
def test_all_parts_are_inside_and_no_words_are_on_other_words(name):
    for width, height, found in drawings(PICTURES[name]()):
        for box in found:
            assert -0.5 <= box.left and box.right <= width + 0.5, box
            assert -0.5 <= box.top and box.bottom <= height + 0.5, box
            assert min(float(box.node.get(side, 0)) for side in ("width", "height", "r")) >= 0, box
        words = [box for box in found if box.tag == "text"]
        assert words and all(10 <= float(box.node.get("font-size")) <= 16 for box in words)
        level = [box for box in words if "rotate(-45" not in box.node.get("transform", "")]
        for one, other in itertools.combinations(level, 2):
            assert not one.overlaps(other), (one.node.text, other.node.text)


@pytest.mark.parametrize("name", PICTURES)
def test_words_on_a_box_are_in_it(name):
    """A box that holds the middle of some words holds all of them."""
    for _, _, found in drawings(PICTURES[name]()):
        boxes = [box for box in found if box.tag == "rect"]
        for words in (box for box in found if box.tag == "text"):
            x, y = (words.left + words.right) / 2, (words.top + words.bottom) / 2
            for box in boxes:
                if box.left < x < box.right and box.top < y < box.bottom:
                    assert box.left - 1 <= words.left and words.right <= box.right + 1, words
                    assert box.top - 1 <= words.top and words.bottom <= box.bottom + 1, words


def test_bars_below_words_are_equally_thick_in_all_pictures():
    bars = {name: {round(box.bottom - box.top, 6) for _, _, found in drawings(PICTURES[name]())
                   for box in found if box.node.get(f"data-{data}")}
            for name, data in (("checkpoint", "part"), ("shares", "kind"))}
    assert bars["checkpoint"] == bars["shares"] and len(bars["shares"]) == 1


def test_headings_are_as_large_as_the_key_and_rows_a_little_smaller():
    (_, _, found), = drawings(PICTURES["faults"]())
    sizes = {box.node.text: float(box.node.get("font-size")) for box in found
             if box.tag == "text"}
    assert {sizes[proof] for proof in networks.PROOFS} == {sizes["caught"]} == {11}
    assert {sizes[fault.name] for fault in FAULTS} == {10.5}
