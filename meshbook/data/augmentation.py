"""Augmentation: whole batches of uint8 on the device, with the distribution of torchvision's.

Letters of the shapes: B images of a batch, H rows, W columns, C colours, N random numbers.
No function here mixes the images of a batch, so a batch that is split over devices needs no
communication, and nothing is a matmul.
"""
import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped, UInt8, UInt32


@dataclasses.dataclass(frozen=True)
class Preparation:
    """What happens to a batch on the device: augment, scale to [0, 1], normalise.

    mean and std are three numbers of pixels scaled to [0, 1]; scale bounds the
    area of a random crop as a part of the image, ratio its width over its height.
    """

    mean: tuple
    std: tuple
    flip: bool
    scale: tuple = (0.9, 1.0)
    ratio: tuple = (0.9, 1.1)

    def __call__(
        self, inputs_BHWC: UInt8[Array | np.ndarray, "B H W C"], key: jax.Array | None = None
    ):
        """uint8 (B, H, W, C) to float32 of the same shape; augmented if there is a key."""
        images_BHWC = inputs_BHWC.astype(jnp.float32)
        if key is not None:
            images_BHWC = augment(inputs_BHWC, key, self.flip, self.scale, self.ratio)
        return normalise(images_BHWC, self.mean, self.std)


def normalise(
    images_BHWC: Float[Array | np.ndarray, "B H W C"], mean: Sequence[float], std: Sequence[float]
):
    """Pixels 0 to 255 to float32, mean 0 and standard deviation 1 over the training set."""
    mean, std = np.float32(mean), np.float32(std)
    return (images_BHWC / np.float32(255) - mean) / std


def augment(
    inputs_BHWC: UInt8[Array | np.ndarray, "B H W 3"], key: jax.Array, flip: bool,
    scale: Sequence[float], ratio: Sequence[float]
):
    """A random crop of each image, resized to the image's own size, flipped or not.

    Returns float32 (B, H, W, C), pixels 0 to 255. The distribution is that of
    torchvision's RandomResizedCrop and RandomHorizontalFlip; only the key decides.
    """
    B, H, W, _ = inputs_BHWC.shape
    draws_BN = jax.random.uniform(key, (B, 23), out_sharding=rows_like(inputs_BHWC))
    box_B = crop_boxes(draws_BN[:, :22], H, W, scale, ratio)
    flip_B = (draws_BN[:, 22] < 0.5) & flip
    return jax.vmap(resized_crop)(inputs_BHWC, *box_B, flip_B)


def rows_like(x: Shaped[Array | np.ndarray, "..."]):
    """The sharding of a matrix whose rows lie where x has its rows, if x's type says so."""
    sharding = jax.typeof(x).sharding
    explicit = jax.sharding.AxisType.Explicit in sharding.mesh.axis_types
    rows = jax.P(sharding.spec[0] if explicit else None)
    return jax.sharding.NamedSharding(sharding.mesh, rows) if explicit else None


def crop_boxes(
    draws_BN: Float[Array | np.ndarray, "B N"], H: int, W: int,
    scale: Sequence[float], ratio: Sequence[float]
):
    """Boxes (top, left, height, width), each float32 (B,), from 22 uniform numbers each.

    Ten tries of area and ratio; the first that fits counts; if none does, the largest
    central box of an allowed ratio (torchvision.transforms.RandomResizedCrop.get_params).
    """
    area = H * W * (scale[0] + (scale[1] - scale[0]) * draws_BN[:, :10])
    log_low, log_high = np.log(ratio)
    wide = jnp.exp(log_low + (log_high - log_low) * draws_BN[:, 10:20])
    width = jnp.round(jnp.sqrt(area * wide))
    height = jnp.round(jnp.sqrt(area / wide))
    fits = (0 < width) & (width <= W) & (0 < height) & (height <= H)
    first = fits & (jnp.cumsum(fits, axis=1) == 1)
    none_fits = ~fits.any(axis=1)

    full = np.clip(W / H, *ratio)
    last_W, last_H = min(W, round(H * full)), min(H, round(W / full))
    width = jnp.where(none_fits, last_W, jnp.sum(width * first, axis=1))
    height = jnp.where(none_fits, last_H, jnp.sum(height * first, axis=1))
    top = jnp.floor(draws_BN[:, 20] * (H - height + 1))
    left = jnp.floor(draws_BN[:, 21] * (W - width + 1))
    top = jnp.where(none_fits, (H - last_H) // 2, top)
    left = jnp.where(none_fits, (W - last_W) // 2, left)
    return top, left, height, width


def two_taps(start: float | Array, length: float | Array, size: int):
    """For each of `size` outputs: two neighbours in the crop and the second's weight."""
    # The centres of pixels, not their corners, lie on one another, as torchvision has it.
    at = (jnp.arange(size) + 0.5) * (length / size) - 0.5
    at = jnp.clip(at, 0, length - 1)
    low = jnp.floor(at)
    high = jnp.minimum(low + 1, length - 1)
    return (start + low).astype(jnp.int32), (start + high).astype(jnp.int32), at - low


def resized_crop(
    image_HWC: UInt8[Array | np.ndarray, "H W 3"], top: float | Array, left: float | Array,
    height: float | Array, width: float | Array, flip: bool | Array
):
    """One crop, brought back to (H, W, C) by bilinear interpolation, float32 0 to 255."""
    H, W, _ = image_HWC.shape
    low, high, weight = two_taps(left, width, W)
    low, high, weight = (jnp.where(flip, tap[::-1], tap) for tap in (low, high, weight))
    pixels_HW = pack(image_HWC)
    a, b = (unpack(take(pixels_HW.T, at)).swapaxes(0, 1) for at in (low, high))
    image_HWC = a + (b - a) * weight[:, None]
    low, high, weight = two_taps(top, height, H)
    a, b = take(image_HWC, low), take(image_HWC, high)
    return a + (b - a) * weight[:, None, None]


def pack(image_HWC: UInt8[Array | np.ndarray, "H W 3"]):
    """A pixel's three bytes and a zero as one uint32: gathering then moves whole pixels."""
    padded = jnp.pad(image_HWC, [(0, 0), (0, 0), (0, 1)])
    return jax.lax.bitcast_convert_type(padded, jnp.uint32)


def unpack(pixels_HW: UInt32[Array, "H W"]):
    """The inverse of pack, as float32 (H, W, 3)."""
    image_HWC = jax.lax.bitcast_convert_type(pixels_HW, jnp.uint8)[..., :3]
    return image_HWC.astype(jnp.float32)


def take(x: Shaped[Array, "..."], rows: Int[Array, "R"]):
    """x[rows], where every row is known to be there."""
    return x.at[rows].get(mode="promise_in_bounds")
