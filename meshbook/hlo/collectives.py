"""What a compiled program moves between devices: collectives, by kind and mesh axes.

The program's text says *result bytes*: those of a collective's result on one device. A Traffic also
gives *wire bytes*, what one device sends over its links, and seconds (`meshbook.hlo.wire`). Groups
of devices are told by the mesh axes that make them (`meshbook.hlo.exchanges`).
"""

import collections
import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from meshbook.hlo import execution, module
from meshbook.hlo.exchanges import UNKNOWN, Exchanges
from meshbook.hlo.wire import WIRE, wire_bytes, wire_seconds
from meshbook.text import markdown_table, text_table

HEADER = ("collective", "along", "count", "result bytes per device", "wire bytes per device")


class Moved(NamedTuple):
    """How many collectives ran, and how many bytes their results have on one device.

    A prediction may leave the count open: None, printed as ?.
    """

    count: int | None
    bytes: int | float


class Traffic(dict):
    """What one device exchanges in one run: (kind, axes) -> Moved(count, result bytes).

    `axes` is a tuple of names in the order of the mesh, such as ("model",); collectives whose
    groups are those of no set of axes stand under ("?",), and `odd` has one such set of groups.
    `sizes` are those of the mesh's axes, such as {"batch": 4, "model": 2}, from which wire bytes
    follow; under "?" it has the size of those odd groups, if they all have one size.
    Prints as an aligned table, with ? for wire bytes that nothing is known of.
    """

    def __init__(self, moved: Mapping | Iterable[tuple] = (),
                 sizes: Mapping[str, int] | None = None, odd: str = ""):
        super().__init__(moved)
        self.sizes, self.odd = dict(sizes or {}), odd

    @property
    def note(self):
        """What stands below the table where axes are unknown."""
        return f"\n\n?: no set of mesh axes makes the groups {self.odd}" if self.odd else ""

    def along(self, *axes: str, kind: str | None = None):
        """What moved along exactly these axes, of one kind or of all: Moved(count, bytes)."""
        return _sum(self[key] for key in self._keys(axes, kind))

    def wire(self, *axes: str, kind: str | None = None):
        """The wire bytes of what moved along exactly these axes, of one kind or of all.

        Raises ValueError where they are not known: without the sizes of the axes, for groups of
        several sizes that no axes make, and for kinds whose wire bytes depend on the data.
        """
        return sum(self._wire(key) for key in self._keys(axes, kind))

    def seconds(self, device: Any, ring: bool = True):
        """How long a device's links need: {axes: seconds}, one set of axes after the other.

        device: of `meshbook.costs.devices.DEVICES`; ring: whether each mesh axis is a ring of
        chips, or a line (`meshbook.hlo.wire.wire_seconds`). What computation hides of it is not
        taken off.
        Raises what `wire` raises.
        """
        spent = collections.Counter()
        for key in self:
            self._wire(key)  # raises where it is not known
            sizes = [self.sizes[axis] for axis in key[1]]
            spent[key[1]] += wire_seconds(key[0], sizes, self[key], device, ring)
        return dict(spent)

    @property
    def total(self):
        """Everything that moved: Moved(count, bytes)."""
        return _sum(self.values())

    @property
    def wire_total(self):
        """The wire bytes of everything that moved; raises what `wire` raises."""
        return sum(map(self._wire, self))

    def _keys(self, axes, kind):
        return [key for key in self if set(key[1]) == set(axes) and kind in (None, key[0])]

    def _known(self, key):
        return key[0] in WIRE and self.sizes.keys() >= set(key[1])

    def _wire(self, key):
        kind, axes = key
        if not self._known(key):
            raise ValueError(f"the wire bytes of {kind} along {', '.join(axes)} are not known: "
                             f"expected a kind among {', '.join(WIRE)} and the size of each axis; "
                             f"found sizes {self.sizes}")
        return wire_bytes(kind, math.prod(self.sizes[axis] for axis in axes), self[key].bytes)

    def rows(self):
        """The table's cells: kind, axes, count, result bytes, wire bytes; largest result first."""
        ordered = sorted(self.items(), key=lambda item: (-item[1].bytes, item[0]))
        return [(key[0], ", ".join(key[1]),
                 "?" if moved.count is None else f"{moved.count:,}", f"{moved.bytes:,}",
                 f"{self._wire(key):,.0f}" if self._known(key) else "?")
                for key, moved in ordered]

    def __repr__(self):
        if not self:
            return "no collectives"
        return text_table(HEADER, self.rows(), numbers=3) + self.note.replace("\n\n", "\n")

    def _repr_markdown_(self):
        if not self:
            return "no collectives"
        return markdown_table(HEADER, self.rows(), numbers=3) + self.note


def _sum(moved):
    moved = list(moved)
    is_open = any(each.count is None for each in moved)
    return Moved(None if is_open else sum(each.count for each in moved),
                 sum(each.bytes for each in moved))


def collectives(compiled: Any, mesh: Any,
                taken: Mapping[str, Sequence[float | int | Fraction]] | None = None):
    """Count what a compiled program moves along each set of mesh axes.

    compiled: `jax.stages.Compiled`, or HLO text. mesh: the mesh it was compiled for, None for one
    device. taken: shares of the branches of conditionals, see `work`; fractions.Fraction keeps
    counts whole.
    Returns Traffic: for each (kind, axes) how many collectives one device takes part in, and their
    result bytes; its `wire` gives wire bytes, its `seconds` the time on a device. Loops are
    multiplied by their trip counts, the largest branch of another conditional is taken, a `-start`
    with its `-done` is one collective, and groups of one device, which move nothing, are left out;
    so axes of size 1 are never named.
    Raises ValueError where the mesh has another number of devices than the program, and where a
    collective names devices beyond those that the program's header counts; UnknownTripCount where a
    loop with a collective in it does not say how often it turns.

    >>> collectives(step.lower(state, batch).compile(), mesh).along("model").bytes
    """
    exchanges, odd = Exchanges(compiled, mesh), []

    def measure(computation, instruction):
        found = exchanges.find(computation, instruction)
        if found is None:
            return None
        if not found.axes:
            return collections.Counter()
        if found.axes == UNKNOWN:
            odd.append(found.groups)
        key, size = found[:2], module.shape_bytes(found.shape)
        return collections.Counter({(*key, "count"): 1, (*key, "bytes"): size})

    counted = execution.tally(exchanges.program, measure, taken)
    keys = sorted({key[:2] for key in counted})
    moved = {key: Moved(*(_whole(counted[*key, of]) for of in Moved._fields)) for key in keys}
    shown = " ".join(map(exchanges.named, odd[0][:4] if odd else ()))
    return Traffic(moved, _sizes(mesh, odd), shown)


def _whole(count):
    """A count as an int, if it is whole; a mean over branches may be none."""
    return int(count) if count == int(count) else float(count)


def _sizes(mesh, odd):
    """The sizes of the mesh's axes, and under "?" that of odd groups, where there is but one."""
    sizes = dict(mesh.shape) if mesh is not None else {}
    several = {len(group) for groups in odd for group in groups}
    return sizes | ({"?": several.pop()} if len(several) == 1 else {})
