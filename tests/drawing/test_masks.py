"""Random numbers on meshes: what is drawn is what each device has in its memory."""
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from meshbook.drawing import svg
from meshbook.drawing.masks import draw_masks
from meshbook.models.layers import kept
from meshbook.sharding import make_mesh

KEY, LEAST = jax.random.key(3), 100
NUMBERS = np.asarray(jax.random.bits(KEY, (8, 1, 4), jnp.uint32) % 256)[:, 0]
ELEMENT = re.compile(r'<rect [^>]*fill="([^"]*)" [^>]*data-device="(\d+)" data-at="(\d+),(\d+)"')


def mask_on(shape):
    mesh = make_mesh(shape)
    with jax.set_mesh(mesh):
        x_BTF = jax.device_put(np.ones((8, 4, 4), np.float32), P("batch", None, "model"))
        return kept(KEY, x_BTF, LEAST)[:, 0]


def drawn(mask):
    """{(row, column): (device, whether it is filled)} as the picture has them."""
    found = ELEMENT.findall(draw_masks(NUMBERS, LEAST, {"mask": mask}).html)
    for fill, device, *_ in found:
        assert fill in ("none", svg.device_colour(int(device)))
    return {(int(row), int(column)): (int(device), fill != "none")
            for fill, device, row, column in found}


@pytest.mark.parametrize("shape", [(1, 1), (4, 2), (8, 1)])
def test_each_element_is_that_of_the_device_which_holds_it(shape):
    mask = mask_on(shape)
    expected = {}
    for shard in mask.addressable_shards:
        rows, columns = (range(*part.indices(size)) for part, size in zip(shard.index, mask.shape))
        for i, row in enumerate(rows):
            for j, column in enumerate(columns):
                expected[row, column] = shard.device.id, bool(np.asarray(shard.data)[i, j])
    assert drawn(mask) == expected and len(expected) == NUMBERS.size


@pytest.mark.parametrize("shape", [(1, 1), (4, 2), (2, 4)])
def test_the_numbers_decide_on_every_mesh(shape):
    filled = {place for place, (_, keep) in drawn(mask_on(shape)).items() if keep}
    assert filled == set(zip(*(each.tolist() for each in np.nonzero(NUMBERS >= LEAST))))


def test_a_device_that_holds_something_else_shows():
    mask = mask_on((4, 2))
    wrong = jax.device_put(~np.asarray(mask), mask.sharding)
    assert all(drawn(wrong)[at] == (device, not keep)
               for at, (device, keep) in drawn(mask).items())


def test_copies_and_other_shapes_are_refused():
    whole = jax.device_put(NUMBERS >= LEAST, NamedSharding(make_mesh((4, 2)), P("batch")))
    with pytest.raises(ValueError, match=r"\[0:2,0:4\] is held by devices \[0, 1\]"):
        draw_masks(NUMBERS, LEAST, {"mask": whole})
    with pytest.raises(ValueError, match=r"expected a mask \(8, 4\), found \(4, 4\)"):
        draw_masks(NUMBERS, LEAST, {"mask": mask_on((1, 1))[:4]})


def test_it_is_told_in_words_too():
    dropped = int((NUMBERS < LEAST).sum())
    alt = draw_masks(NUMBERS, LEAST, {"one device": mask_on((1, 1))}).alt
    assert f"The same {dropped} elements are dropped on each of: one device" in alt
