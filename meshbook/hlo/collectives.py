"""What a compiled program moves between devices: collectives, by kind and mesh axes.

The program's text says *result bytes*: those of a collective's result on one device. A Traffic also
gives *wire bytes*, what one device sends over its links, and seconds (`meshbook.hlo.wire`). Groups
of devices are compared with the sets of devices that each choice of mesh axes makes.

Source: openxla/xla, `xla/service/collective_ops_utils.h` (how ids are numbered).
"""

import collections
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from meshbook.hlo import execution, module
from meshbook.hlo.replica_groups import INTS, replica_groups
from meshbook.hlo.wire import WIRE, wire_bytes, wire_seconds
from meshbook.text import markdown_table, text_table

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute",
         "collective-broadcast", "ragged-all-to-all")
UNKNOWN = ("?",)
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

        device: of `meshbook.planning.devices.DEVICES`; ring: whether each mesh axis is a ring of
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


def collectives(compiled: Any, mesh: Any):
    """Count what a compiled program moves along each set of mesh axes.

    compiled: `jax.stages.Compiled`, or HLO text. mesh: the mesh it was compiled for.
    Returns Traffic: for each (kind, axes) how many collectives one device takes part in, and their
    result bytes; its `wire` gives wire bytes, its `seconds` the time on a device. Loops are
    multiplied by their trip counts, the largest branch of a conditional is taken, a `-start` with
    its `-done` is one collective, and groups of one device, which move nothing, are left out; so
    axes of size 1 are never named.
    Raises ValueError where the mesh has another number of devices than the program,
    UnknownTripCount where a loop with a collective in it does not say how often it turns.

    >>> collectives(step.lower(state, batch).compile(), mesh).along("model").bytes
    """
    program = module.parse(compiled)
    places = _places(compiled, mesh, program.replicas * program.partitions)
    chains, odd = _chains(program), []

    def measure(computation, instruction):
        found = _collective(program, computation, instruction, chains)
        if found is None or len(places) == 1:
            return None
        kind, shape, source = found
        axes = _axes(source, kind, program, mesh, places) if shape else ()
        if not axes:
            return collections.Counter()
        if axes == UNKNOWN:
            odd.append(_groups(source, kind, program))
        size = module.shape_bytes(shape)
        return collections.Counter({(kind, axes, "count"): 1, (kind, axes, "bytes"): size})

    counted = execution.tally(program, measure)
    keys = sorted({key[:2] for key in counted})
    moved = {key: Moved(counted[*key, "count"], counted[*key, "bytes"]) for key in keys}
    shown = " ".join(_named(group, mesh, places) for group in (odd[0][:4] if odd else ()))
    return Traffic(moved, _sizes(mesh, odd), shown)


def _sizes(mesh, odd):
    """The sizes of the mesh's axes, and under "?" that of odd groups, where there is but one."""
    sizes = dict(mesh.shape) if mesh is not None else {}
    several = {len(group) for groups in odd for group in groups}
    return sizes | ({"?": several.pop()} if len(several) == 1 else {})


def _named(group, mesh, places):
    """A group by the ids of its devices: {0,4}."""
    ids = _ids(mesh) or range(len(places))
    return "{" + ",".join(str(ids[places[each]]) for each in group) + "}"


def _ids(mesh):
    """The ids of a mesh's devices in order; None for an abstract mesh, which has none."""
    return [device.id for device in mesh.devices.flat] if isinstance(mesh, Mesh) else None


def _places(compiled, mesh, devices):
    """For each device number of the program its position in `mesh.devices.flat`."""
    if devices == 1:
        return [0]
    if mesh is None or mesh.size != devices:
        raise ValueError(
            f"expected the mesh that the program was compiled for, of {devices} devices; found "
            + ("no mesh" if mesh is None else f"a mesh of {mesh.size}: {dict(mesh.shape)}"))
    # A program numbers devices in the order of its own mesh, which `mesh` may have in another.
    shardings = jax.tree.leaves(getattr(compiled, "input_shardings", ()))
    meshes = (getattr(sharding, "mesh", None) for sharding in shardings)
    own = next((_ids(each) for each in meshes if each is not None and each.size == devices), None)
    position = {device: at for at, device in enumerate(_ids(mesh) or ())}
    if not own or set(own) != set(position):  # counted by position
        return list(range(devices))
    return [position[device] for device in own]


def _chains(program):
    """Collectives that TPU fusions carry through several steps, by their one real start."""
    return {
        _chain(computation[operand])
        for computation in program.computations.values()
        for instruction in computation.instructions.values()
        if "AsyncCollectiveStart" in instruction.attributes.get("custom_call_target", "")
        for operand in instruction.operands
    }


def _chain(instruction):
    return instruction.opcode, instruction.attributes.get("channel_id"), \
        instruction.attributes.get("frontend_attributes")


def _collective(program, computation, instruction, chains):
    """(kind, shape of the result, instruction with the groups) of a collective, else None.

    The shape is () where the text repeats a collective that is counted elsewhere.
    """
    opcode = instruction.opcode
    if opcode == "fusion":  # on TPU a reduce-scatter is a fusion of an all-reduce and a slice
        callee = program.computations[instruction.called("calls")[0]]
        inner = [each for each in callee.instructions.values() if each.opcode == "all-reduce"]
        if callee.name.startswith("all-reduce-scatter") and inner:
            return "reduce-scatter", instruction.shape, inner[0]
        return None
    kind = opcode.removesuffix("-start")
    if kind not in KINDS:
        return None
    if _chain(instruction) in chains and not _starts(computation, instruction):
        return kind, (), instruction
    shape = instruction.shape
    # An all-reduce-start has the shape of its result alone.
    if opcode != kind and kind != "all-reduce":  # (operands, results, ...)
        shape = shape[1]
    return kind, shape, instruction


def _starts(computation, instruction):
    return any(instruction.name in other.operands
               and other.attributes.get("custom_call_target") == '"AsyncCollectiveStart"'
               for other in computation.instructions.values())


def _axes(instruction, kind, program, mesh, places):
    """The mesh axes along which a collective talks; () if every device talks to itself."""
    sizes = tuple(mesh.shape.values()) if mesh is not None else (1,)
    names = tuple(mesh.shape) if mesh is not None else ()
    position = np.arange(len(places)).reshape(sizes)
    if kind == "collective-permute":
        ids = [int(each) for each in INTS.findall(instruction.attributes["source_target_pairs"])]
        at = [np.unravel_index(places[each], sizes) for each in ids]
        pairs = list(zip(at[::2], at[1::2], strict=True))
        return tuple(name for axis, name in enumerate(names)
                     if any(source[axis] != target[axis] for source, target in pairs))
    groups = {frozenset(places[each] for each in group)
              for group in _groups(instruction, kind, program)}
    if all(len(group) == 1 for group in groups):
        return ()
    wide = [at for at, size in enumerate(sizes) if size > 1]
    for chosen in itertools.chain(*(itertools.combinations(wide, n + 1) for n in range(len(wide)))):
        rows = np.moveaxis(position, chosen, range(-len(chosen), 0))
        rows = rows.reshape(-1, np.prod([sizes[at] for at in chosen]))
        if groups == {frozenset(row.tolist()) for row in rows}:
            return tuple(names[at] for at in chosen)
    return UNKNOWN


def _groups(instruction, kind, program):
    """The groups of a collective as lists of device numbers, replica-major."""
    replicas, partitions = program.replicas, program.partitions
    everyone = np.arange(replicas * partitions).reshape(replicas, partitions)
    groups = replica_groups(instruction.attributes.get("replica_groups", "{}"))
    if instruction.attributes.get("use_global_device_ids") == "true":
        return groups or [everyone.ravel().tolist()]
    if "channel_id" not in instruction.attributes:  # numbers are replicas
        groups = groups or [list(range(replicas))]
        return [everyone[group, at].tolist() for group in groups for at in range(partitions)]
    if kind in ("all-reduce", "all-gather", "reduce-scatter"):  # replicas, and all partitions
        groups = groups or [list(range(replicas))]
        return [everyone[group].ravel().tolist() for group in groups]
    groups = groups or [list(range(partitions))]  # numbers are partitions
    return [everyone[at, group].tolist() for group in groups for at in range(replicas)]
