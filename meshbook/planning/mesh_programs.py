"""What the compiler of a TPU v4 made of JAXformer on 32 chips, plan by plan: a record."""
from __future__ import annotations

import json
from typing import NamedTuple

from meshbook.planning.meshes import RECORD, Plan
from meshbook.planning.programs import recorded_program
from meshbook.planning.topologies import RESULTS, Compilation

SLICES = "2 slices v4:2x2x1"
SLICED = dict(vocabulary=1_024, tokens=256, embed=512, hidden=2048, heads=8, layers=4)


def name_of_slices(how: str):
    """The name under which a program for two slices is kept; how: whole, hybrid or all chips."""
    return f"{SLICES} (2, 4) {how}"
