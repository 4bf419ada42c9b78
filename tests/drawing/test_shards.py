"""The drawing of single shards: what is filled is what the devices hold, in proportion."""
from xml.etree import ElementTree

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from meshbook.drawing.arrays import assert_tiles
from meshbook.drawing.shards import draw_shards
from meshbook.sharding import make_mesh


def put(shape, spec, mesh=(4, 2)):
    whole = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    return jax.device_put(whole, NamedSharding(make_mesh(mesh), spec))


@pytest.mark.parametrize("shape, spec", [
    ((16, 8), P("model")), ((16, 8), P("batch", "model")), ((16, 8), P()), ((32,), P("batch"))])
def test_each_device_is_drawn_with_the_slice_that_it_holds(shape, spec):
    array = put(shape, spec)
    drawing = draw_shards(array, "w")
    assert_tiles(drawing, array, np.asarray(array))
    assert len(drawing.tiles) == 8


def test_the_drawing_of_another_sharding_is_refused():
    with pytest.raises(AssertionError, match="device 0 holds"):
        assert_tiles(draw_shards(put((16, 8), P("model")), "w"), put((16, 8), P("batch")))


def test_a_slice_takes_its_share_of_the_outline_and_lies_inside():
    nodes = ElementTree.fromstring(draw_shards(put((16, 8), P("batch", "model")), "w_FD").html)
    rects = [node for node in nodes.iter() if node.tag.endswith("rect")]
    box = [{key: float(each.get(key)) for key in ("x", "y", "width", "height")} for each in rects]
    for piece, whole in zip(box[::2], box[1::2], strict=True):
        np.testing.assert_allclose(piece["height"], whole["height"] / 4, atol=0.02)
        np.testing.assert_allclose(piece["width"], whole["width"] / 2, atol=0.02)
        assert whole["x"] <= piece["x"] and piece["x"] + piece["width"] <= (
            whole["x"] + whole["width"] + 0.02)
    assert "F = 16, D = 8" in [node.text for node in nodes.iter()]


def test_other_ranks_are_refused():
    with pytest.raises(ValueError, match="one or two dimensions"):
        draw_shards(put((8, 2, 2), P("batch")), "w")
