"""What a program for several slices of a TPU sends from slice to slice.

Chips of one slice are neighbours on its links; slices reach each other over the network of the data
centre only. The compiler writes a program for one slice, whose collectives are those of its own
chips. What leaves the slice is a pair of `send` and `recv`, which a host carries out: of an
all-reduce over all chips there remains a reduce-scatter within the slice, one `send` of the part
that a chip then has, and an all-gather.
"""

import collections
import re
from collections.abc import Mapping
from typing import Any

from meshbook.hlo import execution, module
from meshbook.hlo.collectives import Moved

TRANSFER = re.compile(r'_xla_megascale_transfer_type="?([A-Z_]+)')


def between_slices(compiled: Any, taken: Mapping | None = None):
    """{what crosses: Moved(count, wire bytes)} that one device sends to other slices.

    Kinds are those of collectives, such as "all-reduce". compiled: `jax.stages.Compiled`, or HLO
    text, of a program for several slices of a TPU; taken: see `meshbook.hlo.collectives`. What a
    device hands to the network counts once for each turn of a loop. A program for one slice has
    none: {}.
    """
    def measure(computation, instruction):
        if instruction.opcode != "send":
            return None
        found = TRANSFER.search(instruction.attributes.get("frontend_attributes", ""))
        if found is None:
            return None
        kind = found[1].lower().replace("_", "-")
        size = module.shape_bytes(instruction.shape[0])  # (what is sent, a handle, a token)
        return collections.Counter({(kind, "count"): 1, (kind, "bytes"): size})

    counted = execution.tally(module.parse(compiled), measure, taken)
    kinds = sorted({kind for kind, _ in counted})
    return {kind: Moved(counted[kind, "count"], counted[kind, "bytes"]) for kind in kinds}
