"""Proof 2 on an accelerator, and what its time goes into.

The book's step on the accelerator is held against the same step on the CPU, and the fast models
against the plain ones: float32, products at the highest precision, dropout off. An attention
kernel knows no float32: its error is held against that of XLA's attention in the same type.
"""

import os
import sys
import tempfile
from dataclasses import replace
from functools import partial

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from benchmarks.accelerator_cells import cells
from benchmarks.accelerator_jax import ONE_PASS, fresh, kernel, state_timer
from benchmarks.accelerator_worker import answer
from benchmarks.odds_kernel import kernel_odds
from meshbook import training
from meshbook.models import MiniGPT, ViT
from meshbook.models.fast import FastMiniGPT, FastViT, attend
from meshbook.models.fused_loss import plain_odds
from meshbook.profiling.traces import read_trace, trace
from meshbook.proofs import ProofFailed, assert_same_training
from meshbook.sharding import Sharding
from meshbook.training import as_it_is, create_state, loss_and_metrics

STEPS, RTOL = 3, 1e-5


def problem(model, tiny):
    """A cell in float32, of few rows, which a CPU can do as well."""
    cell = next(each for each in cells(tiny) if each.model == model)
    return replace(cell, batch=8 if model == "vit" else 2, dtype="float32")


def run(kind, cell, device, loss=loss_and_metrics):
    """This model's training on this device, without dropout, as one side of a proof."""
    config = replace(cell.config, dropout=0.0)
    make = lambda: kind(config, Sharding.none(), rngs=nnx.Rngs(0))
    mesh_of = lambda device: Mesh([[device]], ("batch", "model"), axis_types=(AxisType.Explicit,) * 2)
    cpu, mesh = mesh_of(jax.devices("cpu")[0]), mesh_of(device)
    with jax.default_device(cpu.devices[0, 0]):  # the same numbers for both sides
        state = create_state(make, optax.sgd(0.05, momentum=0.0), cpu, as_it_is, loss)
    state = replace(state, program=replace(state.program, mesh=mesh))
    return training.run(jax.device_put(state, NamedSharding(mesh, P())), jax.random.key(0))


def same(a, b, cell):
    """The verdict on two runs."""
    many = cell.batches(STEPS)
    batches = [{name: x[at] for name, x in many.items()} for at in range(STEPS)]
    verdict = assert_same_training(a, b, batches, rtol=RTOL)
    return {"line": str(verdict)}


def on_both(model, tiny):
    """The book's model, here and on the CPU."""
    cell, kind = problem(model, tiny), {"vit": ViT, "gpt": MiniGPT}[model]
    here, cpu = jax.devices()[0], jax.devices("cpu")[0]
    return same(run(kind, cell, here), run(kind, cell, cpu), cell)


def fast_and_plain(model, tiny):
    """The fast model and the book's, both here; and the error of the attention kernel."""
    cell, here = problem(model, tiny), jax.devices()[0]
    plain, fast = {"vit": (ViT, FastViT), "gpt": (MiniGPT, FastMiniGPT)}[model]
    loss = ONE_PASS if model == "gpt" else loss_and_metrics
    found = same(run(fast, cell, here, loss), run(plain, cell, here), cell)
    errors = attention_errors(replace(cell, dtype="bfloat16"), causal=model == "gpt")
    line = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    if not errors["kernel"] <= 2 * errors["XLA"]:
        raise ProofFailed(f"attention in bfloat16: expected the kernel's error to be at most twice "
                          f"XLA's, found {line}", leaf="attention", expected=2 * errors["XLA"],
                          found=errors["kernel"])
    line = f"{found['line']}; attention in bfloat16 against float32: {line}"
    if model == "gpt":
        line += f"; odds by the kernel within {odds_error():.1e}"
    return found | {"line": line}


def odds_error():
    """How far the kernel's odds are from XLA's, of the larger; ProofFailed beyond two roundings."""
    random = np.random.default_rng(0)
    h_nD, w_Dv, b_v, label_n = (
        jnp.asarray(random.normal(size=size) / 8, dtype) for size, dtype in (
            ((256, 256), jnp.bfloat16), ((256, 512), jnp.bfloat16),
            (512, jnp.float32), (256, jnp.float32)))
    here = jax.default_backend() == "gpu"
    found = kernel_odds(h_nD, w_Dv, b_v, label_n, interpret=not here)
    right = plain_odds(h_nD, w_Dv, b_v, label_n)
    both = [[x.astype(jnp.float32) for x in each] for each in (found, right)]
    apart = max(float(jnp.max(jnp.abs(a - b) / b)) for a, b in zip(*both, strict=True))
    if not apart <= 2**-7:
        raise ProofFailed(f"odds by the kernel: expected them within {2**-7:.1e}, found "
                          f"{apart:.1e}", leaf="odds", expected=2**-7, found=apart)
    return apart


def attention_errors(cell, causal):
    """How far attention and its gradients are from float32's, of their norm: {"XLA", "kernel"}."""
    c, random = cell.config, np.random.default_rng(0)
    shape = 4, c.tokens, c.heads, c.head_size
    exact = [jnp.asarray(random.normal(size=shape), jnp.bfloat16) for _ in range(4)]

    @partial(jax.jit, static_argnums=(0, 1))
    def outcome(name, dtype):
        q, k, v, cotangent = (x.astype(dtype) for x in exact)
        y, back = jax.vjp(lambda *x: attend(name, *x, is_causal=causal), q, k, v)
        return jnp.stack([x.astype(jnp.float32) for x in (y, *back(cotangent))])

    with jax.default_matmul_precision("highest"):
        right = outcome(None, jnp.float32)
    apart = lambda name: float(jnp.linalg.norm((outcome(name, jnp.bfloat16) - right).ravel())
                               / jnp.linalg.norm(right.ravel()))
    return {"XLA": apart("xla"), "kernel": apart(kernel(cell) or "xla")}


def operations(model, tiny):
    """The table of operations of the fast step at full size, from a trace."""
    cell = next(each for each in cells(tiny) if each.model == model)
    kind, loss = (FastViT, loss_and_metrics) if model == "vit" else (FastMiniGPT, ONE_PASS)
    state = fresh(kind, cell, loss, kernel=kernel(cell))
    batch = jax.device_put({name: x[0] for name, x in cell.batches().items()})
    timer = state_timer(state, jax.random.key(0, impl="rbg"), batch)[0]
    with tempfile.TemporaryDirectory() as folder:
        found = read_trace(trace(lambda _: timer.call(), "fast", 3, 5, folder))
    rows = [each._asdict() for each in found.operations(20)]
    kinds = ", ".join(f"{name} {found.share(name):.0%}" for name in found.by_kind())
    return {"cell": cell.name, "operations": rows, "kinds": found.by_kind(),
            "step ms": list(found.step_times().values()), "line": f"{len(rows)} rows; {kinds}"}


if __name__ == "__main__":
    answer(sys.argv[1], {
        "vit": lambda tiny: on_both("vit", tiny), "gpt": lambda tiny: on_both("gpt", tiny),
        "fast vit": lambda tiny: fast_and_plain("vit", tiny),
        "fast gpt": lambda tiny: fast_and_plain("gpt", tiny),
        "vit trace": lambda tiny: operations("vit", tiny),
        "gpt trace": lambda tiny: operations("gpt", tiny),
    })
