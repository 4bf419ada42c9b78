"""Augmentation: the same law and the same pixels as torchvision, on any mesh, without traffic."""
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from scipy import stats

from meshbook.data import augmentation
from meshbook.data.augmentation import Preparation

PREPARE = Preparation((0.49, 0.48, 0.45), (0.25, 0.24, 0.26), flip=True)
SLIGHT = ((0.9, 1.0), (0.9, 1.1))


@pytest.fixture(scope="module")
def inputs():
    return np.random.default_rng(0).integers(0, 256, (64, 32, 32, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def torchvision():
    import torch
    import torchvision.transforms
    torch.manual_seed(0)
    return torchvision


def our_boxes(count, H, W, scale, ratio, seed=0):
    draws = jax.random.uniform(jax.random.key(seed), (count, 22))
    boxes = jax.jit(augmentation.crop_boxes, static_argnums=(1, 2, 3, 4))(draws, H, W, scale, ratio)
    return np.stack(boxes, axis=1).astype(int)


def their_boxes(torchvision, count, H, W, scale, ratio):
    import torch

    image = torch.zeros(3, H, W)
    params = torchvision.transforms.RandomResizedCrop.get_params
    return np.array([params(image, scale, ratio) for _ in range(count)])


def same_law(a, b):
    """p-value of: two samples of labels come from one distribution (chi-square)."""
    names, index = np.unique(np.concatenate([a, b]), axis=0, return_inverse=True)
    index = index.reshape(-1)
    table = np.stack([np.bincount(part, minlength=len(names))
                      for part in (index[:len(a)], index[len(a):])])
    often = table.sum(0) >= 20  # the rare ones count as one
    table = np.column_stack([table[:, often], table[:, ~often].sum(1)])
    return stats.chi2_contingency(table[:, table.sum(0) > 0]).pvalue


@pytest.mark.parametrize("H, W, scale, ratio", [
    (32, 32, *SLIGHT),
    (32, 32, (0.3, 1.0), (0.75, 4 / 3)),
    (24, 40, (0.5, 1.0), (0.5, 2.0)),
])
def test_crops_follow_the_law_of_torchvision(torchvision, H, W, scale, ratio):
    ours = our_boxes(20_000, H, W, scale, ratio)
    theirs = their_boxes(torchvision, 10_000, H, W, scale, ratio)
    assert same_law(ours[:, 2:], theirs[:, 2:]) > 1e-3  # height and width together
    assert same_law(ours[:, :1], theirs[:, :1]) > 1e-3
    assert same_law(ours[:, 1:2], theirs[:, 1:2]) > 1e-3
    for column in range(4):
        assert stats.ks_2samp(ours[:, column], theirs[:, column]).pvalue > 1e-3
    assert (ours[:, :2] >= 0).all() and (ours[:, :2] + ours[:, 2:] <= (H, W)).all()


def test_the_law_of_torchvision_is_told_from_another(torchvision):
    theirs = their_boxes(torchvision, 10_000, 32, 32, *SLIGHT)
    other = our_boxes(20_000, 32, 32, (0.9, 1.0), (0.92, 1.1))
    assert same_law(other[:, 2:], theirs[:, 2:]) < 1e-6


@pytest.mark.parametrize("ratio", [(0.5, 2.0), (2.0, 3.0), (0.2, 0.3)])
def test_where_no_try_fits_the_box_is_central(torchvision, ratio):
    scale = (1.5, 1.6)  # never fits
    expected = their_boxes(torchvision, 1, 30, 32, scale, ratio)
    assert np.array_equal(our_boxes(5, 30, 32, scale, ratio), np.repeat(expected, 5, axis=0))


def test_half_of_the_images_are_flipped():
    image = np.zeros((4000, 32, 32, 3), np.uint8)
    image[:, :, :10] = 255
    augment = jax.jit(augmentation.augment, static_argnums=(2, 3, 4))
    right = np.asarray(augment(image, jax.random.key(3), True, *SLIGHT))[:, 16, -2, 0] > 128
    assert stats.binomtest(int(right.sum()), len(right)).pvalue > 1e-3
    never = np.asarray(augment(image, jax.random.key(3), False, *SLIGHT))[:, 16, -2, 0] > 128
    assert not never.any()


@pytest.mark.parametrize("box", [
    (0, 0, 32, 32), (1, 2, 30, 29), (3, 0, 29, 32), (0, 1, 31, 31), (5, 9, 20, 13), (31, 0, 1, 7)])
@pytest.mark.parametrize("flip", [False, True])
def test_pixels_equal_torchvision(torchvision, inputs, box, flip):
    """To 1e-3 of 255 levels on float tensors; to one level where PIL rounds twice."""
    import torch
    from PIL import Image

    functional = torchvision.transforms.functional
    ours = np.asarray(augmentation.resized_crop(inputs[0], *map(jnp.float32, box), flip))
    tensor = torch.tensor(inputs[0]).permute(2, 0, 1).float()
    for antialias in (True, False):  # a crop is only ever enlarged: nothing to smooth
        theirs = functional.resized_crop(tensor, *box, (32, 32), antialias=antialias)
        theirs = functional.hflip(theirs) if flip else theirs
        np.testing.assert_allclose(ours, theirs.permute(1, 2, 0).numpy(), atol=1e-3)
    picture = functional.resized_crop(Image.fromarray(inputs[0]), *box, (32, 32))
    picture = functional.hflip(picture) if flip else picture
    assert np.abs(np.rint(ours) - np.asarray(picture, np.float32)).max() <= 1


def test_pixels_that_were_packed_come_back_as_float32():
    image_HWC = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    back_HWC = augmentation.unpack(augmentation.pack(jnp.asarray(image_HWC)))
    assert back_HWC.dtype == jnp.float32 and np.array_equal(back_HWC, image_HWC)


def test_without_a_key_nothing_is_random(inputs):
    ours = np.asarray(jax.jit(PREPARE)(inputs))
    mean, std = np.float32(PREPARE.mean), np.float32(PREPARE.std)
    np.testing.assert_allclose(ours, (inputs / np.float32(255) - mean) / std, atol=1e-5)
    assert ours.dtype == np.float32


def test_the_key_decides(inputs):
    prepare = jax.jit(PREPARE)
    first, again, other = (np.asarray(prepare(inputs, jax.random.key(k))) for k in (1, 1, 2))
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    assert first.dtype == np.float32 and first.shape == inputs.shape
    assert len({image.tobytes() for image in np.asarray(
        prepare(np.repeat(inputs[:1], 64, axis=0), jax.random.key(1)))}) > 32


def test_a_preparation_is_a_value():
    again = Preparation(PREPARE.mean, PREPARE.std, flip=True)
    assert PREPARE == again and hash(PREPARE) == hash(again)


@pytest.mark.parametrize("shape", [(8, 1), (4, 2), (2, 4)])
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("ambient", [True, False])
def test_a_mesh_changes_nothing_and_every_device_does_its_rows(inputs, shape, kind, ambient):
    mesh = jax.make_mesh(shape, ("batch", "model"), axis_types=(kind,) * 2)
    placed = jax.device_put(inputs, NamedSharding(mesh, P("batch")))
    key = jax.random.key(5)
    prepare, alone = jax.jit(PREPARE), np.asarray(jax.jit(PREPARE)(inputs, key))
    if ambient:
        with jax.set_mesh(mesh):
            found, program = prepare(placed, key), prepare.lower(placed, key).compile().as_text()
    else:
        found, program = prepare(placed, key), prepare.lower(placed, key).compile().as_text()
    assert np.array_equal(found, alone)
    assert found.sharding.shard_shape(found.shape)[0] == 64 // shape[0]
    for word in ("all-reduce", "all-gather", "all-to-all", "collective-permute",
                 "reduce-scatter", " dot(", " convolution("):
        assert word not in program
    leading = {int(size) for size in re.findall(r"\w+\[(\d+),", program)}
    rows = 64 // shape[0]
    assert leading <= {rows, rows * 32, 32, 1, 2}, leading  # rows * 32: rows of pixels
