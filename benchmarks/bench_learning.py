"""Learning happens: test accuracy after a fixed number of steps, three seeds.

The laptop-size ViT of chapter 3 as its last section has it, whose head reads the mean of the
patches and whose patches begin whitened, without dropout, batch 128, on eight simulated devices
as a mesh (8, 1): on the digits, and on CIFAR-10 where MESHBOOK_DATA is set. A seed decides the
initial weights, the order of the images and augmentation.
"""

import itertools
import os
import statistics
import time

import jax
import jax.numpy as jnp
from flax import nnx

from helpers import start
from meshbook.data import images
from meshbook.models.vit import MeanViT, ViTConfig, whitening
from meshbook.sharding import Sharding, make_mesh
from meshbook.training import create_state, evaluate, fit, recipe

LAPTOP = ViTConfig(patch=8, embed=64, hidden=128, heads=4, layers=2, dropout=0.0)
B, SEEDS = 128, (0, 1, 2)
STEPS = {True: 300, False: 2_300}  # is it the stand-in?
ASKED = {True: 0.98, False: 0.60}


def train(splits, seed):
    """(test accuracy, seconds of training with compiling) of one run."""
    steps, mesh = STEPS[splits.is_stand_in], make_mesh((8, 1))
    first_XD = whitening(splits.prepare(splits.train.inputs[:10_000]), LAPTOP)

    def make_model():
        model = MeanViT(LAPTOP, Sharding.data_parallel(), rngs=nnx.Rngs(seed))
        model.w_patch_XD[...] = jnp.asarray(first_XD)
        return model

    state = create_state(make_model, recipe(steps), mesh, prepare=splits.prepare)
    stream = itertools.islice(images.batches(splits.train, B, seed), steps)
    begin = time.perf_counter()
    state, _ = fit(state, stream, jax.random.key(seed))
    passed = time.perf_counter() - begin
    test = evaluate(state, images.evaluation_batches(splits.test, 200))
    return test["accuracy"], passed


def rows(splits):
    """Mean and range of the accuracies, and seconds of one seed's training."""
    accuracies, times = zip(*(train(splits, seed) for seed in SEEDS))
    low, high = (f"{100 * edge(accuracies):.1f}" for edge in (min, max))
    steps = STEPS[splits.is_stand_in]
    return [
        {"name": f"{splits.source}: test accuracy", "unit": "%",
         "value": 100 * statistics.mean(accuracies),
         "note": f"{len(SEEDS)} seeds, {low} to {high}; {steps} steps of {B}; "
                 f"asked for: {100 * ASKED[splits.is_stand_in]:.0f}"},
        {"name": f"{splits.source}: training", "unit": "s",
         "value": statistics.median(times), "note": "one seed, compiling included"},
    ]


def run():
    """The digits; and CIFAR-10 where it is."""
    start(8)
    found = [images.load_digits()]
    if folder := os.environ.get("MESHBOOK_DATA"):
        found.append(images.load_cifar10(folder))
    return [row for splits in found for row in rows(splits)]


if __name__ == "__main__":
    for row in run():
        print(row)
