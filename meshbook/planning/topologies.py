"""Compile a program for a TPU that is not here, by the TPU's own compiler.

The compiler is a part of libtpu, which installs on any Linux x86-64 machine (`make aot`). It needs
shapes and layouts, no arrays and no TPU: what comes back is what one device would hold, move and
multiply, or by how much it does not fit. Nothing is executed: that a program computes what it
should is proved where it runs.

Source: https://docs.jax.dev/en/latest/aot.html
"""
from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding

from meshbook.hlo.collectives import Moved, Traffic, collectives
from meshbook.hlo.flops import work
from meshbook.hlo.memory import FREE
from meshbook.hlo.module import parse
from meshbook.planning.clocks import clocked

_PACKAGE = Path(__file__).resolve().parents[1]
RESULTS = next(folder for folder in (_PACKAGE.parent / "results", _PACKAGE / "recorded")
               if (folder / "tpu.json").exists())  # of the repository, or its copy in a wheel
TOPOLOGIES = {  # as readers know them: libtpu's name, options
    "v2-8": ("v2:2x2", {}),
    "v3-8": ("v3:2x2", {}),
    "v4:2x2x2": ("v4:2x2x2", {"chip_config_name": "megacore"}),
    "v4:2x4x4": ("v4:2x4x4", {"chip_config_name": "megacore"}),
    "2 slices v4:2x2x1": ("v4:2x2x1", {"chip_config_name": "megacore", "num_slices": 2}),
    "v5e-1": ("v5e:1x1", {"chips_per_host_bounds": (1, 1, 1)}),
    "v5e-8": ("v5e:2x4", {}),
    "v5p": ("v5p:2x2x2", {}),
    "v6e-8": ("v6e:2x4", {}),
}
UNITS = {"B": 0, "K": 10, "M": 20, "G": 30, "T": 40}


@dataclasses.dataclass(frozen=True)
class Compilation:
    """What a TPU's compiler made of one program; sizes are bytes on one device.

    fits: whether the compiler accepts it. peak: what the program asks for, fragmentation with it;
    where it does not fit, what the compiler said that it would need, with `available` beside it. A
    program that is accepted may ask for more than is called available when another is refused.
    live: the most that is live at once, without gaps; by the compiler's count, which adds what lies
    in a chip's own memory. arguments, outputs, temporaries, shared (of the outputs, what lies where
    the arguments were): `memory_analysis`. rematerialised: operations that the compiler computes
    again because memory ran short. operations: how many of each kind are left after fusion. traffic
    and flops as `collectives` and `work` count them. What is not known of a program that does not
    fit is None. clock: its time by the compiler's clock, see `meshbook.planning.clocks`; None where
    it gives none. seen: what `look` of `compile_for` found. seconds: of compilation. cell: what the
    command that wrote a record was asked for.
    """

    topology: str
    mesh: dict
    fits: bool
    peak: int
    available: int | None = None
    live: int | None = None
    arguments: int | None = None
    outputs: int | None = None
    temporaries: int | None = None
    shared: int | None = None
    rematerialised: int | None = None
    operations: dict | None = None
    traffic: Traffic | None = None
    flops: int | None = None
    clock: dict | None = None
    seen: dict | None = None
    seconds: float = 0.0
    versions: dict = dataclasses.field(default_factory=dict)
    cell: dict | None = None

    @property
    def held(self):
        """Bytes of a device's memory that arrays fill when they fill most, without fragmentation.

        It is what the compiler counts as live, but never more than it asks for: on chips with much
        memory of their own the count has things in it that lie there. None where it does not fit.
        """
        return min(self.live, self.peak) if self.fits else None

    def record(self):
        """The same as numbers and texts that JSON can hold, without the cell."""
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)[:-1]}
        if self.traffic is not None:
            fields["traffic"] = [[kind, axes, *moved]
                                 for (kind, axes), moved in self.traffic.items()]
        return fields

    @classmethod
    def of_record(cls, fields: dict, cell: dict | None = None):
        """A Compilation again from what `record` gave. Raises TypeError for other fields."""
        moved = None if fields["traffic"] is None else Traffic({
            (kind, tuple(axes)): Moved(count, size)
            for kind, axes, count, size in fields["traffic"]}, fields["mesh"])
        return cls(**fields | {"traffic": moved}, cell=cell)


def recorded(record: str = "tpu", folder: Path | str = RESULTS):
    """{name: Compilation} of a record of `benchmarks.aot` such as "tpu-decoder"; {} without one."""
    path = Path(folder) / f"{record}.json"
    cells = json.loads(path.read_text("utf8"))["cells"] if path.exists() else {}
    return {name: Compilation.of_record(fields.get("program", fields), fields.get("cell"))
            for name, fields in cells.items()}


def installed():
    """Whether the TPU's compiler is here."""
    return importlib.util.find_spec("libtpu") is not None


@functools.cache
def topology(name: str):
    """The devices of a TPU by name, one of TOPOLOGIES or libtpu's own, such as "v5e:2x4".

    Raises ValueError for a name that libtpu does not know, RuntimeError where libtpu is missing.
    """
    from jax.experimental import topologies  # only with libtpu

    if not installed():
        raise RuntimeError(
            "compiling for a TPU needs libtpu, which is not installed here: on Linux x86-64, run "
            "`make aot`. Recorded results are in results/tpu.json.")
    libtpu, options = TOPOLOGIES.get(name, (name, dict(TOPOLOGIES.values()).get(name, {})))
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # several processes at once
    try:
        with quiet():
            return topologies.get_topology_desc(
                platform="tpu", topology_name=libtpu, **options).devices
    except Exception as error:
        raise ValueError(f"libtpu knows no topology {name!r}; expected one of "
                         f"{', '.join(TOPOLOGIES)}") from error


def tpu_mesh(name: str, shape: Sequence[int], axis_names: Sequence[str] = ("batch", "model"),
             axis_types: AxisType = AxisType.Explicit):
    """A mesh of the first devices of a TPU that is not here.

    Raises ValueError where the topology has too few devices, and what `topology` raises.
    """
    needed, devices = math.prod(shape), topology(name)
    if needed > len(devices):
        raise ValueError(f"mesh {tuple(shape)} needs {needed} devices; {name} has {len(devices)}")
    placed = mesh_utils.create_device_mesh(  # a mesh axis may have a part of one of the torus
        tuple(shape), devices[:needed], allow_split_physical_axes=True)
    return Mesh(placed, tuple(axis_names), axis_types=(axis_types,) * len(shape))


@contextlib.contextmanager
def quiet():
    """What C++ writes to stderr, past Python, goes nowhere."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def compile_for(name: str, step: Callable, *arguments: Any, cache: Path | str | None = None,
                look: Callable | None = None, clock: Callable | None = clocked):
    """Compile a jitted function for a TPU that is not here: a Compilation.

    arguments: trees of `jax.ShapeDtypeStruct`, laid out on a `tpu_mesh`; what has no layout lies
    whole on every device of that mesh, or on the first device. cache: a folder in which results
    are kept by program, topology and versions; several processes may use it at once. look(text,
    mesh) gives a dict of more that is to be kept, clock(text, mesh, name) the time (None: no time).
    Raises ValueError for a mesh of other devices, and what `topology` raises.

    >>> mesh = tpu_mesh("v5e-8", (4, 2))
    >>> compile_for("v5e-8", train_step, abstract_state(make_model, optimizer, mesh), batch, key)
    """
    arguments, mesh = _placed(name, arguments)
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext(), quiet():
        lowered = step.lower(*arguments)
    versions = {each: importlib.metadata.version(each) for each in ("jax", "jaxlib", "libtpu")}
    path = cache and Path(cache) / f"{_key(lowered, name, versions)}.json"
    kept = path and path.exists() and Compilation.of_record(json.loads(path.read_text()))
    if kept and (look is None or kept.seen or not kept.fits):
        return kept
    compilation = _compile(lowered, name, mesh, versions, look, clock or (lambda *_: None))
    if path:
        write_json(path, compilation.record())
    return compilation


def text_for(name: str, step: Callable, *arguments: Any):
    """The HLO text of a jitted function compiled for a TPU that is not here, as `compile_for`."""
    arguments, mesh = _placed(name, arguments)
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext(), quiet():
        return step.lower(*arguments).compile().as_text()


def _placed(name, arguments):
    """The arguments, each with a layout on this topology, and their mesh."""
    layouts = {leaf.sharding for leaf in jax.tree.leaves(arguments)}
    meshes = {each.mesh for each in layouts if isinstance(each, NamedSharding)}
    mesh = meshes.pop() if meshes else None
    here = set(topology(name))
    if meshes or mesh is not None and not here.issuperset(mesh.devices.flat):
        raise ValueError(f"expected arguments on one mesh of {name}, made by tpu_mesh({name!r}, "
                         f"shape); found devices of {mesh.devices.flat[0].device_kind}"
                         f"{' and other meshes' if meshes else ''}")
    default = SingleDeviceSharding(topology(name)[0]) if mesh is None else NamedSharding(mesh, P())
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=leaf.sharding or default), arguments), mesh


def _key(lowered, name, versions):
    """A name for what is compiled: equal programs, topology and versions have equal names."""
    said = json.dumps([lowered.as_text(), TOPOLOGIES.get(name, name), versions])
    return hashlib.sha256(said.encode()).hexdigest()


def _compile(lowered, name, mesh, versions, look, clock):
    began = time.perf_counter()
    known = dict(topology=name, versions=versions,
                 mesh=dict(mesh.shape) if mesh and mesh.size > 1 else {})
    try:
        with quiet():
            compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        needed, available = shortage(str(error))
        return Compilation(fits=False, peak=needed, available=available,
                           seconds=round(time.perf_counter() - began, 1), **known)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    return Compilation(
        fits=True, peak=memory.argument_size_in_bytes + memory.output_size_in_bytes
        - memory.alias_size_in_bytes + memory.temp_size_in_bytes,
        arguments=memory.argument_size_in_bytes, outputs=memory.output_size_in_bytes,
        live=memory.peak_memory_in_bytes, temporaries=memory.temp_size_in_bytes,
        shared=memory.alias_size_in_bytes, rematerialised=rematerialised(text),
        operations=operations(text), clock=clock(text, mesh, name), seen=look and look(text, mesh),
        traffic=Traffic() if mesh is None else collectives(text, mesh), flops=work(text),
        seconds=round(time.perf_counter() - began, 1), **known)


def shortage(message: str):
    """(bytes needed, bytes available) from what a compiler says that has too little memory; raises
    RuntimeError, with the message, where it says something else.
    """
    if "RESOURCE_EXHAUSTED" in message:
        for pattern in (r"Used ([\d.]+)([BKMGT]).*? of ([\d.]+)([BKMGT])",
                        r"\(([\d.]+)([BKMGT])\) exceeds available HBM \(([\d.]+)([BKMGT])\)"):
            if found := re.search(pattern, message):
                needed, unit, available, other = found.groups()
                return (math.ceil(float(needed) * 2**UNITS[unit]),
                        math.ceil(float(available) * 2**UNITS[other]))
    raise RuntimeError(f"the TPU's compiler refused the program: {message}")


def rematerialised(text: str):
    """How many operations of a program the compiler computes again to save memory."""
    return sum(bool(re.search(r"\.remat\d*", name)) for computation in
               parse(text).computations.values() for name in computation.instructions)


def operations(compiled: Any):
    """How many operations of each kind are left after fusion: a dict, the most frequent first.

    compiled: `jax.stages.Compiled`, or HLO text. Loop bodies count once.
    """
    program = parse(compiled)
    computations = program.computations.values()
    inner = {name for each in computations for instruction in each.instructions.values()
             for name in instruction.called("calls", "to_apply")}
    found = collections.Counter(
        instruction.opcode for each in computations if each.name not in inner
        for instruction in each.instructions.values() if instruction.opcode not in FREE)
    return dict(found.most_common())


def write_json(path: Path, what: Any):
    """Write JSON under a temporary name, and rename it: no reader ever sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    unfinished.write_text(json.dumps(what, indent=1) + "\n")
    os.replace(unfinished, path)
