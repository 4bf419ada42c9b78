"""Images: CIFAR-10 or its stand-in, batches of them, and their augmentation.

Letters of the shapes: N images of a split, B images of a batch, H rows,
W columns, C colours.
"""
import dataclasses
import functools
import os
import pathlib
import sys

import grain
import jax
import jax.numpy as jnp
import numpy as np

SPLIT_SEED = 2009  # which images are for training; every chapter uses this split


@dataclasses.dataclass(frozen=True, eq=False)
class Images:
    """One set of images: inputs uint8 (N, H, W, C) and labels int32 (N,)."""

    inputs: np.ndarray
    labels: np.ndarray

    def __len__(self):
        return len(self.labels)


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

    def __call__(self, inputs_BHWC, key=None):
        """uint8 (B, H, W, C) to float32 of the same shape; augmented if there is a key."""
        images_BHWC = inputs_BHWC.astype(jnp.float32)
        if key is not None:
            images_BHWC = augment(inputs_BHWC, key, self.flip, self.scale, self.ratio)
        return normalise(images_BHWC, self.mean, self.std)


@dataclasses.dataclass(frozen=True, eq=False)
class Splits:
    """Three sets without a common image, and what a reader must know of them."""

    train: Images
    validation: Images
    test: Images
    classes: tuple
    mean: tuple
    std: tuple
    flip: bool
    source: str
    is_stand_in: bool

    @property
    def prepare(self):
        """The Preparation with this data's mean and deviation."""
        return Preparation(self.mean, self.std, self.flip)


def load(folder=None):
    """CIFAR-10 from `folder` (default: MESHBOOK_DATA), or the digits if there is none.

    Returns Splits: 45,000 / 5,000 / 10,000 images of CIFAR-10, or 1,297 / 200 / 300
    digits, each uint8 (32, 32, 3). Raises FileNotFoundError for a missing file and
    ValueError for a damaged one, before anything of it is read as a pickle.
    """
    folder = folder or os.environ.get("MESHBOOK_DATA")
    return load_cifar10(folder) if folder else load_digits()


def load_digits():
    """scikit-learn's handwritten digits, the stand-in (Alpaydin and Kaynak, 1998)."""
    from sklearn.datasets import load_digits as read

    digits = read()
    pool = Images(enlarge(digits.images), digits.target.astype(np.int32))
    train, validation, test = split(pool, (1297, 200, 300), SPLIT_SEED)
    return Splits(train, validation, test, tuple("0123456789"),
                  *channel_statistics(train.inputs), flip=False, is_stand_in=True,
                  source="scikit-learn digits, a stand-in for CIFAR-10")


def load_cifar10(folder):
    """CIFAR-10 through torchvision, which verifies every file's md5 (Krizhevsky, 2009)."""
    from torchvision.datasets import CIFAR10

    check_folder(folder, CIFAR10)
    pool, test = (CIFAR10(folder, train=train, download=False) for train in (True, False))
    train, validation = split(as_images(pool), (45_000, 5_000), SPLIT_SEED)
    return Splits(train, validation, as_images(test), tuple(pool.classes),
                  *channel_statistics(train.inputs), flip=True, is_stand_in=False,
                  source="CIFAR-10")


def check_folder(folder, dataset):
    """Raise one clear sentence if a file of the dataset is missing or damaged."""
    from torchvision.datasets.utils import calculate_md5

    meta = (dataset.meta["filename"], dataset.meta["md5"])
    for name, expected in [*dataset.train_list, *dataset.test_list, meta]:
        path = pathlib.Path(folder, dataset.base_folder, name)
        if not path.is_file():
            raise FileNotFoundError(
                f"no file {path}: expected CIFAR-10 in {folder}/{dataset.base_folder}; "
                f"`make data` downloads it, without MESHBOOK_DATA the digits are used")
        found = calculate_md5(path)
        if found != expected:
            raise ValueError(f"{path} is damaged: expected md5 {expected}, "
                             f"found {found} in {path.stat().st_size:,} bytes")


def as_images(dataset):
    """A torchvision dataset's arrays, without going through its images one by one."""
    return Images(dataset.data, np.asarray(dataset.targets, np.int32))


def enlarge(images_NHW, size=32):
    """Grey levels 0 to 16 to uint8 (N, size, size, 3), linear between the pixels."""
    old = images_NHW.shape[1]
    at = np.clip((np.arange(size) + 0.5) * old / size - 0.5, 0, old - 1)
    weights = np.maximum(0, 1 - np.abs(at[:, None] - np.arange(old)))
    grey = weights @ (images_NHW * 255 / 16) @ weights.T
    return np.repeat(np.rint(grey).astype(np.uint8)[..., None], 3, axis=-1)


def split(pool, sizes, seed):
    """Disjoint sets of the given sizes, cut from one seeded permutation."""
    order = np.random.default_rng(seed).permutation(len(pool))
    cuts = np.split(order, np.cumsum(sizes))[:len(sizes)]
    return [Images(pool.inputs[rows], pool.labels[rows]) for rows in cuts]


def channel_statistics(inputs_NHWC):
    """Mean and deviation of each colour, pixels scaled to [0, 1], exactly: from counts."""
    levels = np.arange(256) / 255
    counts = sum(np.stack([np.bincount(part[..., c].ravel(), minlength=256)
                           for c in range(3)])
                 for part in np.array_split(inputs_NHWC, 50))
    mean = counts @ levels / counts.sum(1)
    std = np.sqrt(counts @ levels**2 / counts.sum(1) - mean**2)
    return tuple(np.float32(mean).tolist()), tuple(np.float32(std).tolist())


@functools.lru_cache(maxsize=4)
def epoch_order(length, seed, epoch):
    """The order of the records in one epoch: a permutation of range(length)."""
    return np.random.default_rng((seed, epoch)).permutation(length)


def nth_batch(split, batch_size, seed, share, number, _=None):
    """The rows `share` of global batch `number`: the batch first, then the share."""
    epoch, place = divmod(number, len(split) // batch_size)
    order = epoch_order(len(split), seed, epoch)
    rows = order[place * batch_size:(place + 1) * batch_size][share]
    return {"inputs": split.inputs[rows], "labels": split.labels[rows]}


def batches(split, batch_size, seed, epochs=None, workers=0,
            process_index=None, process_count=None):
    """Shuffled training batches as an iterator with get_state and set_state.

    Each is a dict of inputs uint8 (B, H, W, C) and labels int32 (B,), where B is
    this process's contiguous share of batch_size. Global batch k depends on seed and
    k alone, not on the number of processes or workers. The records that are left
    over at the end of an epoch are dropped; epochs=None never ends. The processes
    default to JAX's. Raises ValueError if the sizes do not divide.
    """
    share = process_share(batch_size, process_index, process_count)
    if not 0 < batch_size <= len(split):
        raise ValueError(f"batch_size {batch_size} does not fit: expected 1 to "
                         f"{len(split)}, the number of images")
    numbers = grain.MapDataset.range(len(split) // batch_size).repeat(epochs)
    make = functools.partial(nth_batch, split, batch_size, seed, share)
    dataset = numbers.map_with_index(make).to_iter_dataset(
        grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    if workers:
        mark_flags_as_parsed()
        dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
    return iter(dataset)


def process_share(batch_size, process_index=None, process_count=None):
    """The slice of a global batch that one process holds."""
    count = jax.process_count() if process_count is None else process_count
    index = jax.process_index() if process_index is None else process_index
    if batch_size % count:
        raise ValueError(f"batch_size {batch_size} does not divide among the processes: "
                         f"expected a multiple of {count}")
    size = batch_size // count
    return slice(index * size, (index + 1) * size)


def mark_flags_as_parsed():
    """grain's workers read absl flags, which only an absl app would have parsed."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


def evaluation_batches(split, batch_size, process_index=None, process_count=None):
    """Every image exactly once, in order; the last batch is filled up with images of weight 0.

    Yields dicts like `batches`, with weight float32 (B,): 1 for an image, 0 for filling.
    """
    share = process_share(batch_size, process_index, process_count)
    for start in range(0, len(split), batch_size):
        rows = np.arange(start, start + batch_size)[share]
        weight = (rows < len(split)).astype(np.float32)
        rows = np.minimum(rows, len(split) - 1)
        yield {"inputs": split.inputs[rows], "labels": split.labels[rows], "weight": weight}


def normalise(images_BHWC, mean, std):
    """Pixels 0 to 255 to float32 with mean 0 and deviation 1 over the training set."""
    mean, std = np.float32(mean), np.float32(std)
    return (images_BHWC / np.float32(255) - mean) / std


def augment(inputs_BHWC, key, flip, scale, ratio):
    """A random crop of each image, resized to the image's own size, flipped or not.

    Returns float32 (B, H, W, C), pixels 0 to 255. The law is that of torchvision's
    RandomResizedCrop and RandomHorizontalFlip; the numbers come from the key alone.
    """
    B, H, W, _ = inputs_BHWC.shape
    draws_BN = jax.random.uniform(key, (B, 23), out_sharding=rows_like(inputs_BHWC))
    box_B = crop_boxes(draws_BN[:, :22], H, W, scale, ratio)
    flip_B = (draws_BN[:, 22] < 0.5) & flip
    return jax.vmap(resized_crop)(inputs_BHWC, *box_B, flip_B)


def rows_like(x):
    """The sharding of a matrix whose rows lie where x has its rows, if x's type says so."""
    sharding = jax.typeof(x).sharding
    explicit = jax.sharding.AxisType.Explicit in sharding.mesh.axis_types
    rows = jax.P(sharding.spec[0] if explicit else None)
    return jax.sharding.NamedSharding(sharding.mesh, rows) if explicit else None


def crop_boxes(draws_BN, H, W, scale, ratio):
    """Boxes (top, left, height, width), each float32 (B,), from 22 uniform numbers each.

    Ten tries of area and ratio; the first that fits counts; if none does, the largest
    central box of an allowed ratio (torchvision.transforms.RandomResizedCrop.get_params).
    """
    area = H * W * (scale[0] + (scale[1] - scale[0]) * draws_BN[:, :10])
    log_low, log_high = np.log(ratio)
    wide = jnp.exp(log_low + (log_high - log_low) * draws_BN[:, 10:20])
    width, height = jnp.round(jnp.sqrt(area * wide)), jnp.round(jnp.sqrt(area / wide))
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
    return top, jnp.where(none_fits, (W - last_W) // 2, left), height, width


def two_taps(start, length, size):
    """For each of `size` outputs: two neighbours in the crop and the second's weight."""
    at = (jnp.arange(size) + 0.5) * (length / size) - 0.5
    at = jnp.clip(at, 0, length - 1)
    low = jnp.floor(at)
    high = jnp.minimum(low + 1, length - 1)
    return (start + low).astype(jnp.int32), (start + high).astype(jnp.int32), at - low


def resized_crop(image_HWC, top, left, height, width, flip):
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


def pack(image_HWC):
    """A pixel's three bytes and a zero as one uint32: gathering then moves whole pixels."""
    return jax.lax.bitcast_convert_type(jnp.pad(image_HWC, [(0, 0), (0, 0), (0, 1)]), jnp.uint32)


def unpack(pixels_HW):
    """The inverse of pack, as float32 (H, W, 3)."""
    return jax.lax.bitcast_convert_type(pixels_HW, jnp.uint8)[..., :3].astype(jnp.float32)


def take(x, rows):
    """x[rows], where every row is known to be there."""
    return x.at[rows].get(mode="promise_in_bounds")
