"""One training step: against PyTorch, eight simulated devices against one, what it moves.

The laptop-size steps run in turns in one process, on all cores, float32, Adam, dropout
on, images ready in memory; a ratio is the median of the ratios of the rounds. At the
source's full size the step is only compiled: its collectives are read and compared
with the formula.
"""

import os
import statistics
import time

import jax
import numpy as np
import optax
from flax import nnx

from helpers import start
from meshbook.costs.plans import Plan
from meshbook.costs.step import describe
from meshbook.costs.traffic import step_traffic
from meshbook.hlo.collectives import Traffic
from meshbook.models import ViT, ViTConfig
from meshbook.proofs import collectives
from meshbook.sharding import Sharding, make_mesh, place
from meshbook.training import create_state, train_step

LAPTOP = ViTConfig(embed=64, hidden=256, heads=4, layers=2)
B, ROUNDS, STEPS, RATE = 128, 9, 4, 1e-3


def host_batch():
    """Random images and labels as NumPy arrays."""
    rng = np.random.default_rng(0)
    return {"inputs": rng.standard_normal((B, 32, 32, 3), np.float32),
            "labels": rng.integers(0, 10, B).astype(np.int32)}


def on_mesh(config, mesh, sharding):
    """(state, batch, key) of a run on this mesh."""
    make_model = lambda: ViT(config, sharding, rngs=nnx.Rngs(0))
    state = create_state(make_model, optax.adam(RATE), mesh)
    return state, place(host_batch(), mesh), jax.random.key(0)


def jax_steps(mesh, sharding):
    """A function that runs STEPS steps of this book's training and waits for them."""
    state, batch, key = on_mesh(LAPTOP, mesh, sharding)
    states = [state]

    def run_steps():
        with jax.set_mesh(mesh):
            for _ in range(STEPS):
                states[0], metrics = train_step(states[0], batch, key)
        return float(metrics["loss"])

    return run_steps


def torch_steps(compiled):
    """The same in PyTorch, eager or compiled."""
    import torch
    from benchmarks import torch_vit

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    model = torch_vit.ViT(LAPTOP)
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    inputs, labels = (torch.from_numpy(x) for x in host_batch().values())
    forward = torch.compile(model) if compiled else model

    def run_steps():
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(forward(inputs), labels.long())
            loss.backward()
            optimizer.step()
        return loss.item()

    return run_steps


def seconds(function):
    """How long one call takes, by the clock on the wall."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def speeds():
    """Rows: milliseconds a step of each, and ratios to this book's on (8, 1)."""
    steps = {
        "this book on (8, 1)": jax_steps(make_mesh((8, 1)), Sharding.data_parallel()),
        "this book on one device": jax_steps(make_mesh((1, 1)), Sharding.none()),
        "PyTorch eager": torch_steps(compiled=False),
        "PyTorch compiled": torch_steps(compiled=True),
    }
    first = {name: seconds(function) for name, function in steps.items()}
    rounds = [{name: seconds(function) / STEPS for name, function in steps.items()}
              for _ in range(ROUNDS)]
    ours = "this book on (8, 1)"
    rows = []
    for name in steps:
        ratios = sorted(each[name] / each[ours] for each in rounds)
        rows.append({
            "name": name, "value": 1e3 * statistics.median(each[name] for each in rounds),
            "unit": "ms a step",
            "note": f"{statistics.median(ratios):.2f} times this book's on (8, 1); rounds "
                    f"{ratios[0]:.2f} to {ratios[-1]:.2f}; first {STEPS} steps, with "
                    f"compiling, {first[name]:.1f} s"})
    return rows


def traffic(shape):
    """Rows: seconds to compile the full-size step, its collectives and their bytes."""
    mesh, config = make_mesh(shape), ViTConfig()
    run = on_mesh(config, mesh, Sharding.tensor_parallel())
    begin = time.perf_counter()
    with jax.set_mesh(mesh):
        compiled = train_step.lower(*run).compile()
    passed = time.perf_counter() - begin
    moved, planned = collectives(compiled, mesh), Plan(**mesh.shape, rules="tensor_parallel")
    predicted = step_traffic(describe(config, planned, B))
    name = f"six layers on {shape}"
    rows = [
        {"name": f"{name}: compile", "value": passed, "unit": "s"},
        {"name": f"{name}: collectives", "unit": "a step", "note": "compiled for CPU",
         "value": sum(each.count for each in moved.values())},
    ]
    for axis in mesh.axis_names:
        rows.append({"name": f"{name}: along {axis}", "value": moved.along(axis).bytes,
                     "unit": "B a device", "floor": predicted.along(axis).bytes,
                     "note": "floor: the formula"})
    return rows


def run():
    """Speeds at laptop size, traffic at full size."""
    start(8)
    return speeds() + traffic((8, 1)) + traffic((4, 2))


if __name__ == "__main__":
    for row in run():
        print(row)
