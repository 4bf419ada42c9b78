"""The picture of a rejection sampler: which try is filled, which are crossed out."""
from xml.etree import ElementTree

import jax
import numpy as np
import pytest

from meshbook.data.augmentation import crop_boxes
from meshbook.drawing.crop_tries import draw_tries, first_that_fits

SIZES = [[(31, 30), (33, 29)], [(33, 30), (30, 33), (32, 32)], [(40, 1), (1, 40)]]


def marked(picture, attribute):
    """The values of an attribute, in the order of the drawing."""
    nodes = ElementTree.fromstring(picture.html).iter()
    return [int(node.get(attribute)) for node in nodes if attribute in node.attrib]


def test_the_first_that_fits_is_filled_and_those_before_it_are_crossed_out():
    drawn = draw_tries(SIZES, 32)
    assert marked(drawn, "data-chosen") == [0, 2]
    assert marked(drawn, "data-rejected") == [0, 1, 0, 1]
    assert len(marked(drawn, "data-unneeded")) == 1  # the second try of image 0
    assert "image 1 takes try 3 of 3: 33×30, 30×33, 32×32" in drawn.alt
    assert "image 2 none fits: 40×1, 1×40" in drawn.alt


def test_the_try_is_the_one_that_the_sampler_takes():
    draws_BN = np.asarray(jax.random.uniform(jax.random.key(3), (40, 22)))
    area = 32 * 32 * (0.9 + 0.1 * draws_BN[:, :10])
    wide = 0.9 * (1.1 / 0.9) ** draws_BN[:, 10:20]
    sizes = np.round(np.sqrt([area * wide, area / wide])).astype(int)
    _, _, height, width = crop_boxes(draws_BN, 32, 32, (0.9, 1.0), (0.9, 1.1))
    for image, tries in enumerate(np.moveaxis(sizes, 0, -1)):
        tries = [tuple(size) for size in tries.tolist()]
        chosen = first_that_fits(tries, 32)
        assert tries[chosen] == (width[image], height[image])


@pytest.mark.parametrize("sizes", [[], [[(1, 1)], []]])
def test_an_image_without_a_try_is_refused(sizes):
    with pytest.raises(ValueError, match="at least one try for each image"):
        draw_tries(sizes, 32)


def test_the_size_of_a_try_stands_inside_its_box():
    root = ElementTree.fromstring(draw_tries(SIZES, 32).html)
    boxes = [(float(node.get("x")), float(node.get("y")), float(node.get("width")))
             for node in root.iter() if {"data-rejected", "data-chosen"} & node.attrib.keys()]
    words = [(float(node.get("x")), float(node.get("y"))) for node in root.iter()
             if node.text and "×" in node.text]
    assert len(words) == len(boxes) == 6
    for (x, y, wide), (at, below) in zip(boxes, words, strict=True):
        assert x + wide / 2 == at and y < below < y + 24
