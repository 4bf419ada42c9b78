"""What moves in any program: each kind of collective, along any axes, in loops, of any dtype.

On meshes of any sizes with devices in any order. Expected bytes are written by hand; a CPU's
compiler adds up and moves bfloat16 as float32.
"""
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from properties import examples, shapes

from meshbook.hlo.collectives import collectives

NAMES = "abc"
BYTES = {"float32": 4, "bfloat16": 4, "float16": 2, "int32": 4, "int8": 1, "bool": 1, "uint4": 1}


def ring(ways):
    return [(i, (i + 1) % ways) for i in range(ways)]


def largest(x_n, ways):
    """The largest of each `ways` parts of an array, element by element."""
    return x_n.reshape(ways, -1).max(0)


KINDS = {  # a move that leaves the shape of an array as it was; numbers of its result by hand
    "all-reduce": (lambda x_n, axes, ways: jax.lax.pmax(x_n, axes), lambda n, ways: n),
    "all-gather": (lambda x_n, axes, ways: largest(jax.lax.all_gather(x_n, axes, tiled=True), ways),
                   lambda n, ways: n * ways),
    "reduce-scatter": (lambda x_n, axes, ways: jnp.tile(
        jax.lax.psum_scatter(x_n, axes, tiled=True), ways), lambda n, ways: n // ways),
    "all-to-all": (lambda x_n, axes, ways: jax.lax.all_to_all(x_n, axes, 0, 0, tiled=True),
                   lambda n, ways: n),
    "collective-permute": (lambda x_n, axes, ways: jax.lax.ppermute(x_n, axes, ring(ways)),
                           lambda n, ways: n)}
WIRE = {  # by hand, of what a device has, n, before it sends anything
    "all-reduce": lambda n, ways: 2 * n * (ways - 1) / ways,
    "all-gather": lambda n, ways: n * (ways - 1),
    "reduce-scatter": lambda n, ways: n * (ways - 1) / ways,
    "all-to-all": lambda n, ways: n * (ways - 1) / ways,
    "collective-permute": lambda n, ways: n}


@st.composite
def programs(draw):
    """(sizes of a mesh, devices in their order, [(kind, axes, dtype, outer, inner turns)], n)."""
    sizes = draw(shapes())
    moves = []
    for _ in range(draw(st.integers(1, 3))):
        kind, dtype = draw(st.sampled_from(sorted(KINDS))), draw(st.sampled_from(sorted(BYTES)))
        axes = tuple(sorted(draw(st.sets(st.integers(0, len(sizes) - 1), min_size=1))))
        dtype = "int8" if dtype == "bool" and kind == "reduce-scatter" else dtype
        moves.append((kind, axes, dtype, draw(st.integers(1, 3)), draw(st.integers(0, 4))))
    ways = math.lcm(*(math.prod(sizes[axis] for axis in axes) for _, axes, *_ in moves))
    return sizes, draw(st.permutations(range(math.prod(sizes)))), moves, ways * draw(
        st.integers(1, 5))


def compiled(sizes, devices, moves, n):
    """(the program that makes these moves one after the other, its mesh)."""
    mesh = Mesh(np.array(jax.devices())[list(devices)].reshape(sizes), tuple(NAMES[:len(sizes)]),
                axis_types=(AxisType.Explicit,) * len(sizes))

    def local(x_n):
        for kind, axes, dtype, outer, inner in moves:
            names = tuple(NAMES[axis] for axis in axes)
            ways = math.prod(sizes[axis] for axis in axes)
            move = lambda x_n, kind=kind, names=names, ways=ways: KINDS[kind][0](x_n, names, ways)
            turn = lambda x_n, _, move=move: (jnp.maximum(move(x_n), x_n), None)
            loop = lambda x_n, _, turn=turn, inner=inner: jax.lax.scan(turn, x_n, length=inner)
            x_n = jax.lax.scan(loop, x_n.astype(dtype), length=outer)[0]
        return x_n

    spec = P(mesh.axis_names)
    with jax.set_mesh(mesh):
        x_N = jax.ShapeDtypeStruct((n * mesh.size,), jnp.float32,
                                   sharding=jax.NamedSharding(mesh, spec))
        step = jax.shard_map(local, in_specs=spec, out_specs=spec, check_vma=False)
        return jax.jit(step).lower(x_N).compile(), mesh


def by_hand(sizes, moves, n):
    """({(kind, axes): (count, bytes)}, bytes on the wire) of these moves."""
    moved, wire = {}, 0
    for kind, axes, dtype, outer, inner in moves:
        ways, turns = math.prod(sizes[axis] for axis in axes), outer * inner
        key = kind, tuple(NAMES[axis] for axis in axes if sizes[axis] > 1)
        if turns and ways > 1:
            count, total = moved.get(key, (0, 0))
            result = KINDS[kind][1](n, ways) * BYTES[dtype]
            moved[key] = count + turns, total + turns * result
            wire += turns * WIRE[kind](n * BYTES[dtype], ways)
    return moved, wire


@examples(18)
@given(programs())
def test_bytes_counts_and_wire_of_any_collectives_in_any_loops_are_those_by_hand(program):
    sizes, devices, moves, n = program
    text, mesh = compiled(*program)
    moved, wire = by_hand(sizes, moves, n)
    found = collectives(text, mesh)
    assert found == moved
    assert math.isclose(found.wire_total, wire)
    assert math.isclose(sum(found.wire(*axes, kind=kind) for kind, axes in moved), wire)
    assert found.total == tuple(sum(each[at] for each in moved.values()) for at in (0, 1))


LINE = re.compile(r"^(  (?:ROOT )?%)(\S+) = (.+?) (all-reduce|all-gather|collective-permute|"
                  r"reduce-scatter|all-to-all)\(([^()]*)\)(, .*)$")


def asynchronous(text):
    """The text with each collective as a pair of -start and -done, or wrapped in a computation."""
    shape_of = dict(re.findall(r"^  (?:ROOT )?%(\S+) = (\(.*?\)|\S+) ", text, re.M))
    lines, wrapped = [], []
    for line in text.splitlines():
        if not (found := LINE.match(line)):
            lines.append(line)
            continue
        indent, name, result, opcode, operands, rest = found.groups()
        given = [shape_of[each] for each in re.findall(r"%([^\s,]+)", operands)]
        taken = f"({', '.join(given)})" if len(given) > 1 else given[0]
        start, done = f"  %{name}.start = ", f"{indent}{name} = {result} "
        if opcode in ("reduce-scatter", "all-to-all"):
            inner = f"async_{name}"
            parameters = ", ".join(f"p{at}: {shape}" for at, shape in enumerate(given))
            wrapped += [f"%{inner} ({parameters}) -> {result} {{",
                        *(f"  %p{at} = {each} parameter({at})" for at, each in enumerate(given)),
                        f"  ROOT %moved = {result} {opcode}("
                        + ", ".join(f"%p{at}" for at in range(len(given))) + f"){rest}", "}", ""]
            lines += [f"{start}(({', '.join(given)}), {result}, u32[]) async-start({operands}), "
                      f"calls=%{inner}", f"{done}async-done(%{name}.start)"]
        else:
            both = result if opcode == "all-reduce" else f"({taken}, {result})"
            lines += [f"{start}{both} {opcode}-start({operands}){rest}",
                      f"{done}{opcode}-done(%{name}.start)"]
    at = next(i for i, line in enumerate(lines) if line.startswith("%") or "ENTRY" in line)
    return "\n".join(lines[:at] + wrapped + lines[at:]) + "\n"


@examples(8)
@given(programs())
def test_asynchronous_forms_of_the_same_move_the_same(program):
    sizes, _, moves, n = program
    compiled_program, mesh = compiled(*program)
    text = compiled_program.as_text()
    changed = asynchronous(text)
    assert changed.count("-start(") == sum(bool(LINE.match(line)) for line in text.splitlines())
    assert collectives(changed, mesh) == by_hand(sizes, moves, n)[0]
