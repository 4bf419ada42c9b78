"""Runs that are killed: a tiny training run in a process of its own, and the loop that kills it.

`python tests/support/soak.py 50 SEED` kills 50 times and compares every loss with the uninterrupted
run's; `… 50 SEED 4` has a run of four processes and kills one of them each time.
"""
import contextlib
import itertools
import json
import multiprocessing
import pathlib
import random
import signal
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, PartitionSpec as P

from meshbook.data import images
from meshbook.hosts import clusters
from meshbook.saving import checkpoints, progress, runs
from meshbook.sharding import make_mesh
from meshbook.training import create_state, fit

SLOW_TO_IMPORT = ["jax", "flax.nnx", "optax", "grain", "orbax.checkpoint", "tensorboard.compat",
                  "tensorboard.summary.writer.event_file_writer"]
EVERY = 5  # steps between checkpoints


class Tiny(nnx.Module):
    """64 pixels to 10 logits by two products, with noise so that the run's key matters."""

    def __init__(self, split, hidden=32):
        draw = lambda seed, shape, spec: nnx.Param(
            jax.random.uniform(jax.random.key(seed), shape, minval=-0.2, maxval=0.2),
            **({"out_sharding": spec} if split else {}))
        self.w_XF = draw(0, (64, hidden), P(None, "model"))
        self.w_FC = draw(1, (hidden, 10), P("model"))

    def __call__(self, inputs, key=None):
        x_BX = inputs.reshape(len(inputs), -1) / 255
        if key is not None:
            x_BX = x_BX + 0.1 * jax.random.uniform(key, x_BX.shape)
        return jax.nn.relu(x_BX @ self.w_XF[...]) @ self.w_FC[...]


def make_state(mesh=(4, 2), fatal=-1, optimizer=None, **sizes):
    """A fresh TrainState of Tiny; on a mesh its hidden units are split over "model".

    The update number `fatal`, counted from 0, makes every weight infinite or NaN.
    """
    rate = lambda count: jnp.where(count == fatal, jnp.inf, 0.01)
    mesh = mesh and make_mesh(mesh, axis_types=AxisType.Auto)
    make = lambda: Tiny(mesh is not None, **sizes)
    return create_state(make, optimizer or optax.adam(rate), mesh)


def make_stream():
    """Batches of 8 from 40 images of noise: an epoch is five steps."""
    noise = np.random.default_rng(0)
    pictures = noise.integers(0, 256, (40, 8, 8, 1), dtype=np.uint8)
    labels = noise.integers(0, 10, 40, dtype=np.int32)
    return images.batches(images.Images(pictures, labels), 8, seed=1)


def train(folder, steps, every=EVERY, fatal=-1, after=lambda step: None, mesh=(4, 2)):
    """Start or resume the run in this folder, up to this number of steps."""
    stream, state = make_stream(), make_state(mesh, fatal=fatal)
    with checkpoints.Checkpoints(folder, keep=2) as run:
        state, key = run.resume(state, stream, jax.random.key(7))
        save, number = run.on_step(stream, key, every), itertools.count(int(state.step) + 1)

        def on_step(state, metrics):
            save(state, metrics)
            after(next(number))

        rest = itertools.islice(stream, max(0, steps - int(state.step)))
        return fit(state, rest, key, on_step)


def child(pipe, folder, steps, options):
    """train(), at most a hundred steps a second, telling the parent of each."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    train(folder, steps, after=lambda step: (pipe.send(step), time.sleep(0.01)), **options)


@contextlib.contextmanager
def process(folder, steps, **options):
    """train() in a new process: (process, pipe); it does not outlive the block."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(SLOW_TO_IMPORT)  # once; every run is a fork of that
    ours, theirs = context.Pipe()
    started = context.Process(target=child, args=(theirs, folder, steps, options))
    started.start()
    theirs.close()
    try:
        yield started, ours
    finally:
        started.kill()
        started.join()


def kill_loop(folder, kills, steps, seed):
    """Kill the run in this folder so often, each time after a random step and moment.

    Returns how many kills fell into a save. Seeded; what a kill hits is up to the clock.
    """
    draw, saves = random.Random(seed), 0
    for _ in range(kills):
        alive = draw.randrange(11)
        with process(folder, steps) as (victim, pipe):
            for _ in range(alive):
                pipe.recv()
            # no step yet: while it starts and compiles; else within the next ten steps
            time.sleep(draw.uniform(0, 0.1 if alive else 2))
            victim.kill()
            victim.join()
            assert victim.exitcode == -9, f"not killed: it ended with {victim.exitcode}"
        saves += any(pathlib.Path(folder, ".saving").glob("*"))
    return saves


def clustered(folder, steps, processes, pace=0.01):
    """The arguments of clusters.started() for train() in so many processes."""
    script = pathlib.Path(__file__).with_name("clustered.py")
    command = [sys.executable, str(script), str(folder), str(steps), json.dumps({"pace": pace})]
    return command, processes, 8 // processes


def steps_done(folder):
    """How many steps the run in this folder has taken, with those that were done again."""
    if not pathlib.Path(folder, "progress").exists():
        return 0
    return sum(len(each.steps) for each in progress.read_progress(folder))


def kill_one_of_many(folder, kills, steps, seed, processes):
    """The same for a run of several processes, of which one is killed each time."""
    draw, saves = random.Random(seed), 0
    for _ in range(kills):
        alive, victim = draw.randrange(11), draw.randrange(processes)
        before = steps_done(folder)
        with clusters.started(*clustered(folder, steps, processes), out=lambda _: None) as cluster:
            while alive and steps_done(folder) < before + alive:
                assert not any(each.poll() for each in cluster.processes), "died by itself"
                time.sleep(0.01)
            time.sleep(draw.uniform(0, 0.1 if alive else 4))
            cluster.processes[victim].kill()
            ended = cluster.wait()
        assert (ended.first, ended.codes[victim]) == (victim, -signal.SIGKILL), ended
        assert all(ended.codes), f"a process outlived {ended}"
        saves += any(pathlib.Path(folder, ".saving").glob("*"))
    return saves


def soak_many(folder, kills, seed, processes):
    """Losses by step of a run of several processes, killed and not, and the saves hit."""
    steps, killed, whole = 11 * kills + 20, folder / "killed", folder / "whole"
    saves = kill_one_of_many(killed, kills, steps, seed, processes)
    for run in (killed, whole):
        said = []
        ended = clusters.launch(*clustered(run, steps, processes, 0), out=said.append)
        assert ended.well, f"{run}: {ended}; {said}"
    return *(runs.read_metrics(run / "metrics")["loss"] for run in (killed, whole)), saves


def soak(folder, kills, seed):
    """Losses by step of a run that was killed and of one that was not, and the saves hit."""
    steps, killed, whole = 20 * kills + 20, folder / "killed", folder / "whole"
    saves = kill_loop(killed, kills, steps, seed)
    for run in (killed, whole):
        with process(run, steps) as (last, pipe):
            with contextlib.suppress(EOFError):
                while True:
                    pipe.recv()  # a pipe that nobody reads fills up
            last.join()
            assert last.exitcode == 0, f"{run} ended with {last.exitcode}"
    left = sorted(path.name for path in killed.iterdir())
    assert left == sorted(path.name for path in whole.iterdir()), f"left behind: {left}"
    return *(runs.read_metrics(run / "metrics")["loss"] for run in (killed, whole)), saves


def main(kills, seed=0, processes=1):
    """Say whether every loss is the uninterrupted run's; exit with 1 if not."""
    with tempfile.TemporaryDirectory() as folder:
        how = (soak, kills, seed) if processes == 1 else (soak_many, kills, seed, processes)
        killed, whole, saves = how[0](pathlib.Path(folder), *how[1:])
    wrong = [step for step in whole | killed if killed.get(step) != whole.get(step)]
    if wrong:
        step = min(wrong)
        sys.exit(f"step {step}: expected loss {whole.get(step)}, found {killed.get(step)}")
    print(f"{kills} kills (seed {seed}) of one of {processes}, {saves} of them during a save, "
          f"{len(whole)} steps: bit for bit the losses of the uninterrupted run.")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
