"""Drawings of arrays: the tiles that are drawn are the shards that the devices hold."""

import itertools
import re

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from laid_out import CUBE, MESH, held, put
from properties import examples

from meshbook.drawing import arrays, figures, svg, tiles
from meshbook.drawing.figures import assert_tiles, draw_sharding

SHARDINGS = [
    put(()), put((8,)), put((8,), "batch"), put((8,), ("batch", "model")), put((8, 4), "batch"),
    put((8, 4), None, "model"), put((8, 4), "model", "batch"),
    put((4, 2, 8), "batch", None, "model"), put((128, 32, 32, 3), "batch"),
    put((6, 3, 2, 5), None, None, "model"),
    put((2, 3, 4, 5, 8), "model", None, None, None, "batch"),
    put((2, 2, 2, 3), "a", "b", "c", mesh=CUBE), put((0, 4)),
    jax.numpy.zeros((3, 5)), put((2, 3, 2, 1, 2, 3), "c", None, "a", None, "b", mesh=CUBE),
]


@pytest.mark.parametrize("array", SHARDINGS, ids=lambda array: str(jax.typeof(array)))
def test_the_tiles_are_the_shards(array):
    drawing = draw_sharding(array)
    assert drawing.tiles == held(array)
    assert_tiles(drawing, array)
    assert_tiles(drawing, array, np.zeros(array.shape))


@given(st.data())
@examples(40)
def test_the_tiles_are_the_shards_of_any_layout(data):
    rank = data.draw(st.integers(0, 5))
    names = data.draw(st.permutations(["a", "b", "c", None, None]))[:rank]
    shape = [data.draw(st.integers(1, 3)) * (2 if name else 1) for name in names]
    array = put(tuple(shape), *names, mesh=CUBE)
    assert draw_sharding(array, "x").tiles == held(array)


def boxes(drawing):
    """{index: (x, y, right, bottom)} of the filled tiles, in pixels."""
    sides = " ".join(f'{side}="([^"]+)"' for side in ("x", "y", "width", "height"))
    pattern = f'<rect {sides}[^>]*data-index="([^"]+)"'
    found = re.findall(pattern, drawing.html)
    return {
        index: (float(x), float(y), float(x) + float(w), float(y) + float(h))
        for x, y, w, h, index in found
    }


@pytest.mark.parametrize("array", [put((8, 4), "batch", "model"), put((8,), ("batch", "model")),
                                   put((2, 2, 2, 3), "a", "b", "c", mesh=CUBE),
                                   put((4, 3, 8), "batch", None, "model")],
                         ids=lambda array: str(jax.typeof(array)))
def test_tiles_lie_where_their_index_says_and_do_not_overlap(array):
    placed = boxes(draw_sharding(array))
    assert len(placed) == 8
    for (_, a), (_, b) in itertools.combinations(placed.items(), 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
    if array.ndim == 2:  # further down the rows is further down the page, columns to the right
        at = [(arrays.parse_index(index), box) for index, box in placed.items()]
        for ((row, column), one), ((down, right), other) in itertools.permutations(at, 2):
            assert down.stop > row.start or other[3] <= one[1]
            assert right.stop > column.start or other[2] <= one[0]


def test_a_batch_is_drawn_as_its_devices_hold_it():
    images_BHWC = np.random.default_rng(0).integers(0, 256, (8, 4, 4, 3), np.uint8)
    batch = jax.device_put(images_BHWC, NamedSharding(MESH, P(("batch", "model"))))
    for array in (batch, jax.device_put(images_BHWC, NamedSharding(MESH, P("batch")))):
        drawing = figures.draw_batch(array, "images")
        figures.assert_tiles(drawing, array)
        parts = re.split('data-device="(?=[0-9])', drawing.html)
        at = [figures.png(image) for image in images_BHWC]
        found = [at.index(href) for href in re.findall(r'href="([^"]+)"', drawing.html)]
        assert found == list(range(8)) and len(parts) == 9
    second = at[held(batch)[1][0].start]
    assert re.split('data-device="', figures.draw_batch(batch, "images").html)[2].count(second) == 1


def test_a_wrong_tile_is_found_and_named():
    array = put((8, 4), "batch", "model")
    right = draw_sharding(array)
    faults = {
        "another array": draw_sharding(put((8, 4), "batch")),
        "exchanged": draw_sharding(put((8, 4), "batch", "model", mesh=Mesh(
            MESH.devices[::-1], ("batch", "model"), axis_types=MESH.axis_types))),
        "an edited index": arrays.Drawing(right.html.replace("2:4,2:4", "2:4,0:4"), right.alt),
    }
    for fault in faults.values():
        with pytest.raises(AssertionError, match=r"device \d holds \[.*\], drawn \["):
            assert_tiles(fault, array)
    recoloured = right.html.replace(svg.device_colour(5), svg.device_colour(4))
    with pytest.raises(AssertionError, match="device 5 has the colour"):
        assert_tiles(arrays.Drawing(recoloured, right.alt), array)
    on_one = draw_sharding(jax.numpy.zeros((8, 4)))
    with pytest.raises(AssertionError, match="expected devices"):
        assert_tiles(on_one, array)


def test_a_drawing_from_wrong_indices_does_not_pass_for_the_data(monkeypatch):
    """The indices that shards report are what is drawn; the data on the devices are not asked."""
    array = put((8, 4), "batch", "model")  # all zeros: no slice of it differs from another
    swapped = {tile: list(reversed(devices)) for tile, devices in zip(
        tiles.tiles_of(array), reversed(tiles.tiles_of(array).values()), strict=True)}
    monkeypatch.setattr(arrays, "tiles_of", lambda array: swapped)
    with pytest.raises(AssertionError, match=r"device \d holds \[.*\], drawn \["):
        assert_tiles(draw_sharding(array), array)


def test_a_shard_with_other_data_is_found():
    whole = np.arange(32, dtype=np.float32).reshape(8, 4)
    sharding = NamedSharding(MESH, P("batch", "model"))
    array = jax.device_put(whole, sharding)
    assert_tiles(draw_sharding(array), array, whole)
    pieces = [shard.data for shard in array.addressable_shards]
    pieces[3] = pieces[3] + 1
    spoiled = jax.make_array_from_single_device_arrays(whole.shape, sharding, pieces)
    assert_tiles(draw_sharding(spoiled), spoiled)
    with pytest.raises(AssertionError, match=r"device 3 holds other data than \[2:4,2:4\]"):
        assert_tiles(draw_sharding(spoiled), spoiled, whole)


def test_replicated_tiles_show_every_copy():
    drawing = draw_sharding(put((8, 4), None, "model"))
    assert drawing.html.count("<circle") == 8 and "each device holds (8, 2)" in drawing.html


def test_uneven_tiles_and_many_devices_are_drawn():
    uneven = {((0, 3), (0, 5)): [0], ((3, 4), (0, 5)): [1]}
    drawn, width, height = arrays.panel((4, 5), uneven, "")
    first, second = (box for _, box in sorted(boxes(arrays.Drawing(drawn, "x")).items()))
    assert (first[3] - first[1]) == pytest.approx(3 * (second[3] - second[1]), rel=1e-3)
    many = {((0, 8),): list(range(64))}
    drawn, _, _ = arrays.panel((8,), many, "")
    assert len(arrays.drawn_tiles(drawn)) == 64


def test_random_keys_are_drawn_and_partial_sums_refused():
    keys = jax.random.split(jax.random.key(0), 8)
    on_mesh = jax.device_put(keys, NamedSharding(MESH, P("batch")))
    assert draw_sharding(on_mesh).tiles[7] == (slice(6, 8),)
    product = lambda a, b: jax.numpy.einsum("ij,jk->ik", a, b, out_sharding=P(unreduced={"model"}))
    with jax.set_mesh(MESH):
        partial = jax.jit(product)(put((4, 4), None, "model"), put((4, 4), "model"))
    with pytest.raises(ValueError, match="a sum that is not finished"):
        draw_sharding(partial)


def test_what_has_no_shards_is_refused():
    for thing in (np.zeros(3), jax.ShapeDtypeStruct((2,), np.float32), "x"):
        with pytest.raises(TypeError, match="expected a jax.Array"):
            draw_sharding(thing)
    with pytest.raises(TypeError, match="expected a jax.Array"):
        jax.jit(lambda x: draw_sharding(x) and x)(np.zeros(3))


def test_elements_are_told_apart_in_large_arrays():
    mine, other = (Mesh(np.array(jax.devices()[:2])[::step], "x") for step in (1, -1))
    array = put((2, 1 << 16), "x", mesh=mine)
    assert_tiles(draw_sharding(array, "x"), array)
    with pytest.raises(AssertionError, match="drawn"):
        assert_tiles(draw_sharding(put((2, 1 << 16), "x", mesh=other), "x"), array)
