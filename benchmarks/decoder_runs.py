"""What the decoder's benchmarks share: its sizes, a batch, steps of a run, and turns."""

import ctypes
import statistics
import time
from dataclasses import replace

import jax
import numpy as np
import optax
from flax import nnx

from helpers import sized, start
from meshbook.models.decoder import Decoder, DecoderConfig
from meshbook.models.losses import language_loss
from meshbook.sharding import Sharding, make_mesh
from meshbook.training import create_state, decayed, train_step

RATE, BETAS, DECAY = 1e-3, (0.9, 0.99), 0.05  # of AdamW: those of `meshbook.training.recipe`
TINY = DecoderConfig(vocabulary=250, tokens=16, embed=32, hidden=64, heads=4, layers=2), 16
SMALL = DecoderConfig(vocabulary=1000, tokens=64, embed=64, hidden=192, heads=4, layers=4), 64
MEDIUM = DecoderConfig(vocabulary=4000, tokens=128, embed=256, hidden=768, heads=8, layers=4), 32
ONE = "one device"


def begin(devices):
    """Start JAX with so many devices, in a process that keeps the memory it has had.

    glibc gives large arrays back when they are freed, and the next step's are new pages, which the
    system fills with zeros first: with XLA up to a fifth of a step. All contestants keep theirs.
    """
    found = start(devices)
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        for what, value in ((-4, 0), (-1, 2**31 - 1), (-2, 2**26)):  # mmap, trimming, growth
            mallopt(what, value)
    return found


def middle():
    """(config, rows) where one size is measured, by MESHBOOK_SIZE."""
    return sized(full=MEDIUM, laptop=MEDIUM, test=TINY)


def host_batch(config, rows):
    """Random tokens and the ones that follow, (B, T), as NumPy arrays."""
    drawn = np.random.default_rng(0).integers(0, config.vocabulary, (rows, config.tokens + 1))
    return {"inputs": drawn[:, :-1].astype(np.int32), "labels": drawn[:, 1:].astype(np.int32)}


def adamw():
    """AdamW with a rate that stays; norms and biases do not decay."""
    return optax.adamw(RATE, *BETAS, weight_decay=DECAY, mask=decayed)


def fresh_state(config, sharding=Sharding.none(), shape=(1, 1), loss=language_loss):
    """A run that begins, on a mesh of this shape."""
    make = lambda: Decoder(config, sharding, rngs=nnx.Rngs(0))
    return create_state(make, adamw(), make_mesh(shape), loss=loss)


class Steps:
    """A run whose next steps on one batch a call takes: steps(count) -> their losses.

    loss: whose gradients are taken; changes: of the config. program: what the step was compiled to.
    """

    def __init__(self, config, rows, sharding=Sharding.none(), shape=(1, 1), loss=language_loss,
                 **changes):
        self.state = fresh_state(replace(config, **changes), sharding, shape, loss)
        self.batch = self.state.program.place(host_batch(config, rows))
        self.key, mesh = jax.random.key(0), self.state.program.mesh
        self.key = jax.device_put(self.key, jax.NamedSharding(mesh, jax.P()))
        with jax.set_mesh(mesh):  # compiled with all optimisations, as a long run would be
            self.program = train_step.lower(self.state, self.batch, self.key).compile()

    def __call__(self, count):
        losses = []
        for _ in range(count):
            self.state, metrics = self.program(self.state, self.batch, self.key)
            losses.append(metrics["loss"])
        return [float(loss) for loss in losses]


def assert_same_losses(found, rtol=1e-5):
    """AssertionError where losses of a contestant, {name: losses}, are not those of the first."""
    for name, losses in found.items():
        np.testing.assert_allclose(losses, next(iter(found.values())), rtol, err_msg=name)


def seconds(function, *arguments):
    """How long one call takes, by the clock on the wall."""
    begin = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - begin


def in_turns(contestants, rounds, count=2):
    """Seconds a step of each, {name: one number a round}, measured in turns after a first one.

    contestants: {name: function of how many steps}.
    """
    times = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, steps in contestants.items():
            passed = seconds(steps, count) / count
            if number:
                times[name].append(passed)
    return times


def rows_of(times, base, prefix="", notes=()):
    """Rows: the median ms a step of each, and the median ratio to `base` in the same round."""
    rows, notes = [], dict(notes)
    for name, own in times.items():
        ratios = sorted(one / other for one, other in zip(own, times[base], strict=True))
        ratio = statistics.median(ratios)
        note = f"{ratio:.2f} times {base}; rounds {ratios[0]:.2f} to {ratios[-1]:.2f}"
        rows.append({"name": prefix + name, "value": 1e3 * statistics.median(own),
                     "unit": "ms a step", "ratio": ratio,
                     "note": "; ".join([note, *notes.get(name, [])])})
    return rows
