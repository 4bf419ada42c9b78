"""The collectives of a compiled program, one by one: kind, result, and who talks to whom.

Groups of devices are compared with the sets of devices that each choice of mesh axes makes.

Source: openxla/xla, `xla/service/collective_ops_utils.h` (how ids are numbered).
"""

import itertools
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from meshbook.hlo import module, opcodes
from meshbook.hlo.replica_groups import INTS, replica_groups

UNKNOWN = ("?",)
WITH_ALL_PARTITIONS = ("all-reduce", "all-gather", "reduce-scatter")  # with a channel


class Exchange(NamedTuple):
    """One collective: its axes are () where every device talks to itself, ("?",) if none fit.

    shape: of its result on one device. groups: lists of the program's device numbers; of a permute
    and of what has no axes they are not known, [].
    """

    kind: str
    axes: tuple
    shape: module.Shape | tuple
    groups: list


class Exchanges:
    """The collectives of a program, and the mesh that it was compiled for.

    compiled: `jax.stages.Compiled`, or HLO text. mesh: None for a program of one device. Raises
    ValueError where the mesh has another number of devices than the program, and where a collective
    names devices beyond the number that the program's header has.
    """

    def __init__(self, compiled: Any, mesh: Any):
        self.program, self.mesh = module.parse(compiled), mesh
        self.places = _places(compiled, mesh, self.program.replicas * self.program.partitions)
        _check_devices(self.program)
        self.chains = _chains(self.program)

    def find(self, computation: module.Computation, instruction: module.Instruction):
        """The Exchange that an instruction is, or None; with no axes where another repeats it."""
        found = _collective(self.program, computation, instruction, self.chains)
        if found is None or len(self.places) == 1:
            return None
        kind, shape, source = found
        axes = _axes(source, kind, self.program, self.mesh, self.places) if shape else ()
        groups = [] if not axes or kind == "collective-permute" else _groups(
            source, kind, self.program)
        return Exchange(kind, axes, shape, groups)

    def chain(self, instruction: module.Instruction):
        """What a collective that TPU fusions carry through several steps has in all of them."""
        return _chain(instruction)

    def named(self, group: list):
        """A group by the ids of its devices: {0,4}."""
        ids = _ids(self.mesh) or range(len(self.places))
        return "{" + ",".join(str(ids[self.places[each]]) for each in group) + "}"


def _ids(mesh):
    """The ids of a mesh's devices in order; None for an abstract mesh, which has none."""
    return [device.id for device in mesh.devices.flat] if isinstance(mesh, Mesh) else None


def _places(compiled, mesh, devices):
    """For each device number of the program its position in `mesh.devices.flat`."""
    if (1 if mesh is None else mesh.size) != devices:
        raise ValueError(
            f"expected the mesh that the program was compiled for, of {devices} "
            f"device{'s' if devices > 1 else ''}; found "
            + ("no mesh" if mesh is None else f"a mesh of {mesh.size}: {dict(mesh.shape)}"))
    if devices == 1:
        return [0]
    # A program numbers devices in the order of its own mesh, which `mesh` may have in another.
    own = _own_order(compiled, devices)
    position = {device: at for at, device in enumerate(_ids(mesh) or ())}
    if not own or set(own) != set(position):  # counted by position
        return list(range(devices))
    return [position[device] for device in own]


def _own_order(compiled, devices):
    """The ids of a program's devices in its own order; None where only its text is known.

    Its executable has them, unless other processes have some of them or it was compiled for devices
    that are not here: then the mesh of an argument or of a result does.
    """
    if hasattr(compiled, "runtime_executable"):
        local = getattr(compiled.runtime_executable(), "local_devices", list)()
        if len(local) == devices:
            return [device.id for device in local]
    shardings = jax.tree.leaves([getattr(compiled, which, ()) for which in (
        "input_shardings", "output_shardings")])
    meshes = (getattr(sharding, "mesh", None) for sharding in shardings)
    return next((_ids(each) for each in meshes if each is not None and each.size == devices), None)


def _check_devices(program):
    """Raise ValueError where a collective names a device that the header does not count.

    A header without numbers counts one device: some compilers leave them out.
    """
    for computation in program.computations.values():
        for each in computation.instructions.values():
            kind = each.opcode.removesuffix("-start")
            if kind not in opcodes.COLLECTIVE:
                continue
            pairs = INTS.findall(each.attributes.get("source_target_pairs", ""))
            groups = [map(int, pairs), *replica_groups(each.attributes.get("replica_groups", "{}"))]
            most, counted = max(itertools.chain(*groups), default=0), _counted(each, kind, program)
            if most >= counted:
                raise ValueError(
                    f"expected device numbers below {counted}, as the program's header counts "
                    f"(replica_count={program.replicas}, num_partitions={program.partitions}); "
                    f"found {most} in %{each.name}")


def _counted(instruction, kind, program):
    """How many numbers there are for a collective: of devices, of replicas or of partitions."""
    if kind == "collective-permute" or (
            instruction.attributes.get("use_global_device_ids") == "true"):
        return program.replicas * program.partitions
    by_replica = "channel_id" not in instruction.attributes or kind in WITH_ALL_PARTITIONS
    return program.replicas if by_replica else program.partitions


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
    if kind not in opcodes.COLLECTIVE:
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
    if kind in WITH_ALL_PARTITIONS:  # replicas, and all partitions
        groups = groups or [list(range(replicas))]
        return [everyone[group].ravel().tolist() for group in groups]
    groups = groups or [list(range(partitions))]  # numbers are partitions
    return [everyone[at, group].tolist() for group in groups for at in range(replicas)]
