"""Images a second, end to end to the device, on one core: the source's pipeline and this book's.

Both draw the same crops and flips, normalise, and hand JAX batches of 128. They run in turn in
one process that is pinned to one core, on the images of MESHBOOK_DATA or else on the digits,
repeated to the number of CIFAR-10's.
"""
import os
import statistics
import time

BATCH, ROUNDS, SECONDS = 128, 5, 2.0


def run():
    """Images per second of both, their ratio, and what a core could copy at best."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # before JAX makes its threads
    import jax
    from meshbook.data import images

    data = images.load()
    split = repeated(data.train, 45_000)
    source, whole = one_at_a_time(split), whole_batches(split, data)
    rounds = [(rate(source), rate(whole)) for _ in range(ROUNDS)]
    slow, fast = (statistics.median(rates) for rates in zip(*rounds))
    ratios = sorted(b / a for a, b in rounds)
    kept = images.batches(split, BATCH, 0)
    floor = copied_bytes_per_second() / bytes_moved()
    where = f"{data.source}, batch {BATCH}, {jax.devices()[0].device_kind}"
    return [
        {"name": "one image at a time, as in the source", "value": slow, "unit": "images/s",
         "note": where},
        {"name": "whole batches, augmented on the device", "value": fast, "unit": "images/s",
         "floor": floor, "note": f"floor: this core copies its {bytes_moved():,} bytes an image"},
        {"name": "order and gather alone", "value": rate(lambda: next(kept)),
         "unit": "images/s"},
        {"name": "ratio", "value": fast / slow, "unit": "times",
         "note": f"asked for: 50; rounds {ratios[0]:.0f} to {ratios[-1]:.0f}"},
    ]


def repeated(split, count):
    """The split with its images repeated up to `count` of them."""
    import numpy as np
    from meshbook.data.images import Images

    rows = np.arange(count) % len(split)
    return Images(split.inputs[rows], split.labels[rows])


def rate(next_batch):
    """Images per second of a function that makes one batch."""
    import jax

    jax.block_until_ready(next_batch())
    count, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < SECONDS:
        jax.block_until_ready(next_batch())
        count += BATCH
    return count / (time.perf_counter() - begin)


def one_at_a_time(split):
    """The source's pipeline: torchvision per image, float64 and all, grain's DataLoader."""
    import grain
    import jax
    import numpy as np
    import torchvision.transforms as transforms
    from PIL import Image

    def image_to_numpy(image):
        pixels = np.array(image, dtype=np.float32)
        return (pixels / 255.0 - np.array((0.4914, 0.4822, 0.4465))) / np.array(
            (0.2023, 0.1994, 0.2010))

    transform = transforms.Compose([
        transforms.RandomHorizontalFlip(),
        transforms.RandomResizedCrop(32, scale=(0.9, 1.0), ratio=(0.9, 1.1)),
        image_to_numpy])

    class Source:
        def __len__(self):
            return len(split)

        def __getitem__(self, row):
            return transform(Image.fromarray(split.inputs[row])), int(split.labels[row])

    sampler = grain.samplers.IndexSampler(
        len(split), shuffle=True, seed=12, shard_options=grain.sharding.NoSharding())
    batch = grain.transforms.Batch(BATCH, drop_remainder=True)
    loader = iter(grain.DataLoader(
        data_source=Source(), sampler=sampler, operations=[batch]))
    return lambda: jax.device_put(next(loader))


def whole_batches(split, data):
    """This book's pipeline; flips are on, as in the source."""
    import jax
    from meshbook.data import images

    prepare = jax.jit(images.Preparation(data.mean, data.std, flip=True))
    loader, key = images.batches(split, BATCH, seed=12), jax.random.key(12)

    def next_batch():
        batch = jax.device_put(next(loader))
        return prepare(batch["inputs"], key), batch["labels"]

    return next_batch


def bytes_moved():
    """Bytes that must be read and written for an image: gather, copy, uint8 to float32."""
    pixels = 32 * 32 * 3
    return 2 * pixels + 2 * pixels + (1 + 4) * pixels


def copied_bytes_per_second():
    """Bytes this core reads and writes a second when it copies a large array."""
    import numpy as np

    source = np.ones(1 << 28, np.uint8)
    target = source.copy()
    begin = time.perf_counter()
    for _ in range(4):
        np.copyto(target, source)
    return 4 * 2 * source.nbytes / (time.perf_counter() - begin)
