"""Learning happens: test accuracy after a fixed number of steps, three seeds.

The laptop-size ViT of chapter 3, as the source has it and with the two changes of the chapter's
last section (the head reads the mean of the patches, and their embedding begins as whitening),
without dropout, batch 128, on eight simulated devices as a mesh (8, 1): on the digits, and on
CIFAR-10 where MESHBOOK_DATA is set. A seed decides the initial weights, the order of the images
and augmentation.
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
from meshbook.models.vit import MeanViT, ViT, ViTConfig, patches, whitening
from meshbook.sharding import Sharding, make_mesh
from meshbook.training import create_state, evaluate, fit, recipe

LAPTOP = ViTConfig(patch=8, embed=64, hidden=128, heads=4, layers=2, dropout=0.0)
B, SEEDS = 128, (0, 1, 2)
STEPS = {True: 300, False: 2_300}  # is it the stand-in?
ASKED = {True: 0.98, False: 0.60}


def changed(splits, mesh, seed):
    """The model with both changes."""
    with jax.set_mesh(mesh):
        some_BHWC = splits.prepare(splits.train.inputs[:10_000])
        first_XD = whitening(patches(some_BHWC, LAPTOP, Sharding.none()), LAPTOP.embed)

    def make():
        model = MeanViT(LAPTOP, Sharding.data_parallel(), rngs=nnx.Rngs(seed))
        model.w_patch_XD[...] = jnp.asarray(first_XD)
        return model

    return make


def as_published(splits, mesh, seed):
    """The model as the source has it."""
    return lambda: ViT(LAPTOP, Sharding.data_parallel(), rngs=nnx.Rngs(seed))


MODELS = {"as the source has it": as_published, "with both changes": changed}


def train(splits, maker, seed):
    """(test accuracy, seconds of training with compiling) of one run."""
    steps, mesh = STEPS[splits.is_stand_in], make_mesh((8, 1))
    make_model = maker(splits, mesh, seed)
    state = create_state(make_model, recipe(steps), mesh, prepare=splits.prepare)
    stream = itertools.islice(images.batches(splits.train, B, seed), steps)
    begin = time.perf_counter()
    state, _ = fit(state, stream, jax.random.key(seed))
    passed = time.perf_counter() - begin
    test = evaluate(state, images.evaluation_batches(splits.test, 200))
    return test["accuracy"], passed


def rows(splits, name):
    """Mean and range of one model's accuracies, and seconds of one seed's training."""
    accuracies, times = zip(*(train(splits, MODELS[name], seed) for seed in SEEDS))
    low, high = (f"{100 * edge(accuracies):.1f}" for edge in (min, max))
    steps = STEPS[splits.is_stand_in]
    note = f"{len(SEEDS)} seeds, {low} to {high}; {steps} steps of {B}"
    if MODELS[name] is changed:
        note += f"; asked for: {100 * ASKED[splits.is_stand_in]:.0f}"
    return [
        {"name": f"{splits.source}, {name}: test accuracy", "unit": "%",
         "value": 100 * statistics.mean(accuracies), "note": note},
        {"name": f"{splits.source}, {name}: training", "unit": "s",
         "value": statistics.median(times), "note": "one seed, compiling included"},
    ]


def run():
    """The digits; and CIFAR-10 where it is."""
    start(8)
    found = [images.load_digits()]
    if folder := os.environ.get("MESHBOOK_DATA"):
        found.append(images.load_cifar10(folder))
    return [row for splits in found for name in MODELS for row in rows(splits, name)]


if __name__ == "__main__":
    for row in run():
        print(row)
