"""Pictures of the vision transformer: shapes, patches, weights and chances are those given."""
import base64
import io
import re
from xml.etree import ElementTree

import jax
import numpy as np
import pytest
from flax import nnx
from matplotlib import image as matplotlib_image

from meshbook.drawing import svg, vision
from meshbook.models import ViT, ViTConfig
from meshbook.sharding import Sharding, make_mesh

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)
CONFIG = ViTConfig(patch=8, embed=48, hidden=96, heads=3, layers=2)


def nodes(picture, tag):
    return [node for node in ElementTree.fromstring(picture.html).iter()
            if node.tag.endswith(tag)]


def labels(picture):
    return [node.text for node in nodes(picture, "text")]


def pixels(node):
    data = base64.b64decode(node.get("href").partition("base64,")[2])
    return np.round(255 * matplotlib_image.imread(io.BytesIO(data))[..., :3]).astype(np.uint8)


def test_the_model_is_drawn_with_its_own_patches_and_shapes():
    drawn = vision.draw_vit(IMAGES[0], CONFIG.patch, CONFIG.embed, CONFIG.layers, CONFIG.classes)
    patches = {int(node.get("data-patch")): pixels(node) for node in nodes(drawn, "image")
               if node.get("data-patch")}
    assert sorted(patches) == [1, 2, 3, 16]
    np.testing.assert_array_equal(patches[2], IMAGES[0][:8, 8:16])
    np.testing.assert_array_equal(patches[16], IMAGES[0][24:, 24:])
    with jax.set_mesh(make_mesh((1, 1))):
        model = ViT(CONFIG, Sharding.none(), rngs=nnx.Rngs(0))
        tokens, logits = model.embed(IMAGES).shape, model(IMAGES).shape
        X = model.w_patch_XD[...].shape[0]
    words = labels(drawn)
    assert f"{tokens[1:]}" in " ".join(words) and f"{logits[1:]}" in words
    assert f"(16, 8·8·3 = {X})" in words and "block, 2 times" in words
    assert words.count("MLP") == 5 and words.count("attention") == 1


@pytest.mark.parametrize("patch", [5, 16])
def test_patches_that_cannot_be_drawn_are_refused(patch):
    with pytest.raises(ValueError, match=f"patches of {patch} pixels do not cut 32 evenly"):
        vision.draw_vit(IMAGES[0], patch, 48, 2, 10)


def test_a_block_adds_twice_and_names_its_sizes():
    words = labels(vision.draw_block_steps(48, 96, 3))
    assert words.count("+") == words.count("norm") == 2
    assert {"3 heads", "48 → 96 → 48", "attention", "MLP"} <= set(words)


def test_matrices_have_the_shapes_of_the_matmuls():
    T, D, H = CONFIG.tokens, CONFIG.embed, CONFIG.heads
    shapes = {label.rpartition(" (")[0]: tuple(map(int, re.findall(r"\d+", label)))
              for label in labels(vision.draw_heads(T, D, H)) if label.endswith(")")}
    shape = {name: np.zeros(found) for name, found in shapes.items()}
    assert (shape["q"] @ shape["kᵀ"]).shape == shapes["scores"] == shapes["weights"] == (T, T)
    assert (shape["weights"] @ shape["v"]).shape == shapes["y"] == shapes["k"] == (T, D // H)
    assert (shape["all y"] @ shape["w_out"]).shape == shapes["out"] == shapes["x"] == (T, D)
    with pytest.raises(ValueError, match="embed 48 does not divide by 5 heads"):
        vision.draw_heads(T, D, 5)


def test_a_patch_is_as_bright_as_its_weight():
    weights = RANDOM.dirichlet(np.ones(16), 2)
    drawn = vision.draw_reading(IMAGES[:2], weights, ["one", "two"])
    covers = [(float(node.get("fill-opacity")), float(node.get("data-share")))
              for node in nodes(drawn, "rect")]
    shares = (weights / weights.max(1, keepdims=True)).ravel()
    np.testing.assert_allclose([share for _, share in covers], shares, atol=0.01)
    np.testing.assert_allclose([dark for dark, _ in covers], 0.9 * (1 - shares), atol=0.01)
    assert f"two: most of all patch {weights[1].argmax() + 1}" in drawn.alt
    with pytest.raises(ValueError, match="expected patches in a square, found 15"):
        vision.draw_reading(IMAGES[:2], weights[:, 1:], ["one", "two"])


def test_the_likeliest_classes_are_drawn_and_the_right_one_is_green():
    classes = [f"class {n}" for n in range(5)]
    chances = np.array([[0.1, 0.6, 0.05, 0.2, 0.05], [0.5, 0.3, 0.15, 0.03, 0.02]])
    drawn = vision.draw_answers(IMAGES[:2], chances, np.array([1, 2]), classes)
    bars = [(int(node.get("data-class")), node.get("fill"), float(node.get("width")))
            for node in nodes(drawn, "rect") if node.get("data-class")]
    right, wrong, other = svg.SERIES[2], svg.SERIES[1], "#858585"
    assert [bar[:2] for bar in bars] == [
        (1, right), (3, other), (0, other), (0, wrong), (1, other), (2, right)]
    np.testing.assert_allclose([width for *_, width in bars],
                               38 * np.array([0.6, 0.2, 0.1, 0.5, 0.3, 0.15]), atol=0.01)
    assert "class 2: class 0 50%, class 1 30%, class 2 15%" in drawn.alt
