"""The contestants of a cell in JAX, compiled together, then run in turns by request.

The sources' way is an object tree through `nnx.jit`, all logits at once; the book's is its own
models and step; the fast ones are `meshbook.models.fast` and `meshbook.models.fused_loss`, whose
dropout draws from the device's own generator. Each is called as one would call it; memory, work and
traffic are read from the program that ran, compiled once more from the cache.
"""

import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch is here too

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks.accelerator_cells import CALLS, Cell
from benchmarks.accelerator_worker import Timer, answer, contest
from benchmarks.bench_dispatch import object_step
from benchmarks.odds_kernel import kernel_odds
from meshbook.costs.plans import Plan
from meshbook.costs.step import describe
from meshbook.costs.work import step_work
from meshbook.hlo.flops import work
from meshbook.hlo.memory import memory_traffic
from meshbook.hlo.options import keep_programs
from meshbook.models import MiniGPT, ViT
from meshbook.models.fast import FastMiniGPT, FastViT, class_token_saving, train_steps
from meshbook.models.fused_loss import one_pass_cross_entropy
from meshbook.models.losses import language_loss
from meshbook.models.published import PublishedMiniGPT, PublishedViT
from meshbook.sharding import Sharding
from meshbook.training import as_it_is, create_state, loss_and_metrics, train_step

RATE = 1e-3
ONE_PASS = partial(language_loss, cross_entropy=one_pass_cross_entropy)
IN_KERNEL = partial(language_loss, cross_entropy=partial(
    one_pass_cross_entropy, make_odds=kernel_odds))


def kernel(cell):
    """cuDNN's attention where it can be had: in bfloat16, on an NVIDIA GPU."""
    return "cudnn" if jax.default_backend() == "gpu" and cell.dtype == "bfloat16" else None


def fresh(model, cell, loss=loss_and_metrics, **options):
    """A run of this model from its beginning, with Adam."""
    make = lambda: model(cell.config, Sharding.none(), rngs=nnx.Rngs(0), **options)
    return create_state(make, optax.adam(RATE), None, as_it_is, loss)


def state_timer(state, key, batch, steps=1):
    """(Timer, a function that lowers its step) of a run of the book's kind."""
    step, states, mesh = train_step if steps == 1 else train_steps, [state], state.program.mesh

    def call():
        with jax.set_mesh(mesh):
            states[0], metrics = step(states[0], batch, key)
        return metrics

    def lower():
        with jax.set_mesh(mesh):
            return step.lower(state, batch, key)

    return Timer(call, jax.block_until_ready, steps), lower


def gpt_object_step(model, optimizer, batch):
    """The source's step: all logits at once, an object tree that changes in place."""
    def loss(model):
        logits = model(batch["inputs"], training=True).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


def source_timer(cell, batch):
    """(Timer, a function that lowers its step) of the sources' way."""
    kind, step = ((PublishedViT, object_step) if cell.model == "vit"
                  else (PublishedMiniGPT, gpt_object_step))
    with nnx.use_eager_sharding(False):
        model = kind(cell.config, rngs=nnx.Rngs(0))
    optimizer, step = nnx.Optimizer(model, optax.adam(RATE), wrt=nnx.Param), nnx.jit(step)
    arguments = model, optimizer, batch
    return Timer(lambda: step(*arguments), jax.block_until_ready), partial(step.lower, *arguments)


def contestants(cell):
    """{name: (a function that builds it, useful FLOPs a step)}."""
    many, key = jax.device_put(cell.batches(CALLS)), jax.random.key(0)
    batch = jax.tree.map(lambda x: x[0], many)
    own = jax.random.key(0, impl="rbg")
    ours = lambda *args, key=key, batch=batch, steps=1, **options: partial(
        lambda: state_timer(fresh(*args, **options), key, batch, steps))
    useful = step_work(describe(cell.config, Plan(), cell.batch)).useful
    if cell.model == "gpt":
        fast = dict(key=own, kernel=kernel(cell))
        built = {
            "the sources' way": partial(source_timer, cell, batch),
            "this book, plain loss": ours(MiniGPT, cell),
            "this book, chunked loss": ours(MiniGPT, cell, language_loss),
            "this book, one-pass loss": ours(MiniGPT, cell, ONE_PASS),
            "fast, plain loss": ours(FastMiniGPT, cell, **fast),
            "fast, one-pass loss": ours(FastMiniGPT, cell, ONE_PASS, **fast),
        }
        if kernel(cell) and not cell.tiny:
            built["fast, one-pass kernel"] = ours(FastMiniGPT, cell, IN_KERNEL, **fast)
        return {name: (build, useful) for name, build in built.items()}
    less = useful - class_token_saving(cell.config, cell.batch)
    fast = dict(key=own, kernel=kernel(cell))
    return {
        "the sources' way": (partial(source_timer, cell, batch), useful),
        "this book": (ours(ViT, cell), useful),
        "class token alone": (ours(FastViT, cell), less),
        "and its own generator": (ours(FastViT, cell, key=own), less),
        "fast": (ours(FastViT, cell, **fast), less),
        f"fast, {CALLS} steps a call": (
            ours(FastViT, cell, batch=many, steps=CALLS, **fast), less),
    }


def prepare(cell):
    """Build and compile all contestants, several at a time: {name: (Timer, facts) or Exception}."""
    jax.clear_caches()
    ready = {}
    with ThreadPoolExecutor(max(2, min(6, len(os.sched_getaffinity(0))))) as pool:
        for name, (build, useful) in contestants(cell).items():
            try:
                timer, lower = build()
                lowered = lower()
            except Exception as error:
                ready[name] = error
                continue
            waiting = pool.submit(facts, lowered, useful, timer.steps)
            ready[name] = timer, waiting
        return {name: each if isinstance(each, Exception) else settled(*each)
                for name, each in ready.items()}


def settled(timer, waiting):
    """(Timer, facts), or what went wrong when it was compiled."""
    return waiting.exception() or (timer, waiting.result())


def facts(lowered, useful, steps):
    """What a program says of itself: seconds to compile; bytes at its peak; FLOPs, bytes a step."""
    begin = time.perf_counter()
    compiled = lowered.compile()
    passed = time.perf_counter() - begin
    compiled = getattr(compiled, "compiled", compiled)  # nnx.jit wraps the program
    memory = compiled.memory_analysis()
    return {
        "compile seconds": passed, "useful flops": useful, "steps a call": steps,
        "peak bytes": memory.argument_size_in_bytes + memory.temp_size_in_bytes
        + memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "temporary bytes": memory.temp_size_in_bytes,
        "flops": counted(work, compiled, steps),
        "moved bytes": counted(memory_traffic, compiled, steps),
    }


def counted(count, compiled, steps):
    """A count of a program by its text, a step; None where a kernel or a loop hides it."""
    try:
        return count(compiled) / steps
    except (ValueError, KeyError, IndexError) as hidden:
        print(f"{count.__name__}: {hidden}", file=sys.stderr)
        return None


def machine():
    """What this process runs on."""
    device = jax.devices()[0]
    limits = device.memory_stats() or {}
    return {"platform": device.platform, "device": device.device_kind,
            "devices": jax.device_count(), "memory limit": limits.get("bytes_limit")}


def main(descriptor):
    """Answer the requests of benchmarks.accelerator."""
    with tempfile.TemporaryDirectory() as cache:
        keep_programs(cache)
        handlers = contest(lambda cell: prepare(Cell(**cell)))
        answer(descriptor, handlers | {"describe": machine})


if __name__ == "__main__":
    main(sys.argv[1])
