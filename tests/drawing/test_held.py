"""What each device of a mesh holds: the pieces in the picture are those in the memory."""
import re
from xml.etree import ElementTree

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from meshbook.drawing import svg
from meshbook.drawing.arrays import drawn_tiles
from meshbook.drawing.held import WIDE, draw_held
from meshbook.drawing.tiles import tiles_of
from meshbook.sharding import make_mesh


def on(mesh, shape, *spec):
    return jax.device_put(np.zeros(shape, np.float32), NamedSharding(mesh, P(*spec)))


@pytest.mark.parametrize("spec", [(), (None, "model"), ("model",), ("batch", "model")])
def test_each_device_has_its_piece_in_its_colour(spec):
    mesh = make_mesh((4, 2))
    array = on(mesh, (16, 64), *spec)
    drawn = draw_held(mesh, {"w": array}, "A weight")
    expected = {device: tile for tile, devices in tiles_of(array).items() for device in devices}
    found = {device: tuple((each.start, each.stop) for each in index)
             for device, index, _ in drawn_tiles(drawn.html)}
    assert found == expected and drawn.tiles.keys() == set(range(8))
    assert all(fill == svg.device_colour(device) for device, _, fill in drawn_tiles(drawn.html))
    share = 1 / np.prod([mesh.shape[name] for name in spec if name])
    areas = [float(node.get("width")) * float(node.get("height"))
             for node in ElementTree.fromstring(drawn.html).iter() if node.get("data-device")]
    np.testing.assert_allclose(areas, share * WIDE * 21, rtol=1e-3)
    assert f"each device holds {svg.size_text(4096 * share)} of the 4.1 kB of w" in drawn.html


def test_devices_stand_where_the_mesh_has_them_and_several_arrays_are_named():
    mesh = make_mesh((4, 2))
    drawn = draw_held(mesh, {"one": on(mesh, (8, 8)), "two": on(mesh, (8, 8), "model")}, "Two")
    chips = {int(number): (float(x), float(y)) for x, y, number in re.findall(
        r'<text x="([\d.]+)" y="([\d.]+)"[^>]*>(\d)</text>', drawn.html)}
    for (across, down), device in np.ndenumerate(mesh.device_ids):
        assert chips[device][0] == chips[mesh.device_ids[0, down]][0] + 94 * across
        assert chips[device][1] == chips[mesh.device_ids[across, 0]][1] + down * (
            chips[1][1] - chips[0][1])
    assert drawn.html.count(">one<") == drawn.html.count(">two<") == 8


def test_what_has_no_place_in_the_picture_is_refused():
    mesh = make_mesh((4, 2))
    with pytest.raises(ValueError, match="expected a mesh of two axes and matrices"):
        draw_held(mesh, {"bias": on(mesh, (8,))}, "A bias")
