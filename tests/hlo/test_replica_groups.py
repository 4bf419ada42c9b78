"""Who talks to whom, on any mesh and along any of its axes: each spelling, and a compiled program."""
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from properties import examples, shapes

from meshbook.hlo.collectives import Moved, collectives
from meshbook.hlo.replica_groups import replica_groups

NAMES = "abc"


@st.composite
def chosen(draw, most=8):
    """(sizes of a mesh, numbers of the axes that are gone along, the devices in their order)."""
    sizes = draw(shapes(most))
    axes = draw(st.sets(st.integers(0, len(sizes) - 1), min_size=1))
    return sizes, sorted(axes), draw(st.permutations(range(math.prod(sizes))))


def groups_of(sizes, axes, devices):
    """Devices that differ in these coordinates alone, one coordinate after the other."""
    found = {}
    for place, coordinates in enumerate(itertools.product(*map(range, sizes))):
        rest = tuple(at for axis, at in enumerate(coordinates) if axis not in axes)
        found.setdefault(rest, []).append(devices[place])
    return list(found.values())


def listed(numbers):
    return ",".join(map(str, numbers))


@examples(100)
@given(chosen(most=24))
def test_each_spelling_says_the_same_groups(mesh):
    sizes, axes, devices = mesh
    named = listed(f"'{NAMES[axis]}'={size}" for axis, size in enumerate(sizes))
    along = "{" + listed(f"'{NAMES[axis]}'" for axis in axes) + "}"
    expected = groups_of(sizes, axes, devices)
    braces = "{" + listed("{" + listed(group) + "}" for group in expected) + "}"
    assert replica_groups(braces) == expected
    assert replica_groups(f"mesh[{named}], device_ids=({listed(devices)}) {along}") == expected

    in_order = groups_of(sizes, axes, range(len(devices)))
    turned = [axis for axis in range(len(sizes)) if axis not in axes] + axes
    shape = len(in_order), len(in_order[0])
    iota = f"[{listed(shape)}]<=[{listed(sizes)}]T({listed(turned)})"
    assert replica_groups(iota) == replica_groups(f"mesh[{named}] {along}") == in_order


@examples(20)
@given(chosen(), st.sampled_from(["psum", "all_gather", "psum_scatter", "ppermute"]))
def test_a_compiled_program_goes_along_the_axes_that_it_says(mesh, kind):
    """On devices in any order. A group of one moves nothing; what moves is counted by hand."""
    sizes, axes, devices = mesh
    names = tuple(NAMES[axis] for axis in axes)
    ways = math.prod(sizes[axis] for axis in axes)
    mesh = Mesh(np.array(jax.devices())[list(devices)].reshape(sizes), tuple(NAMES[:len(sizes)]),
                axis_types=(AxisType.Explicit,) * len(sizes))
    up = [(i, (i + 1) % ways) for i in range(ways)]
    move = {"psum": lambda x: jax.lax.psum(x, names),
            "all_gather": lambda x: jax.lax.all_gather(x, names, tiled=True),
            "psum_scatter": lambda x: jax.lax.psum_scatter(x, names, tiled=True),
            "ppermute": lambda x: jax.lax.ppermute(x, names, up)}[kind]
    rows = 840  # each number of devices divides it
    split = P(mesh.axis_names)
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.arange(rows * mesh.size, dtype=jnp.float32), split)
        program = jax.jit(jax.shard_map(move, out_specs=split, check_vma=False)).lower(x).compile()
    result = {"all_gather": rows * ways, "psum_scatter": rows // ways}.get(kind, rows)
    said = {"psum": "all-reduce", "all_gather": "all-gather", "psum_scatter": "reduce-scatter",
            "ppermute": "collective-permute"}[kind]
    along = tuple(name for name in names if mesh.shape[name] > 1)
    expected = {(said, along): Moved(1, 4 * result)} if along else {}
    assert collectives(program, mesh) == expected


@pytest.mark.parametrize("text", ["", "{}", "[2,3]<=[6]", "[6,1]<=[6]"])
def test_what_has_no_groups_and_what_has_groups_of_one(text):
    found = replica_groups(text)
    assert found == {"": [], "{}": [], "[2,3]<=[6]": [[0, 1, 2], [3, 4, 5]],
                     "[6,1]<=[6]": [[i] for i in range(6)]}[text]


def test_groups_that_are_left_out_are_all_replicas_or_all_partitions():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    text = """HloModule m, num_partitions=8

ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  ROOT %y = f32[8]{{0}} all-to-all(%x), {}replica_groups={{}}, dimensions={{0}}
}}
"""
    assert collectives(text.format("channel_id=1, "), mesh) == {
        ("all-to-all", ("a", "b")): Moved(1, 32)}
