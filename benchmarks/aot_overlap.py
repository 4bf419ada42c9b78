"""Compile an MLP whose tokens are split for a TPU v5e, its collectives plain and in rings.

    .venv-aot/bin/python -m benchmarks.aot_overlap

Writes results/tpu-v5e-8-2-4-mlp-….txt.xz: the schedules that chapter 12 reads. Each is the
forward and backward pass of one MLP in bfloat16, its weights split over four devices and its
examples over two.
"""
import lzma
import os
from functools import partial

os.environ["JAX_PLATFORMS"] = "cpu"  # libtpu compiles, and is no device

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec as P  # noqa: E402

from benchmarks.__main__ import ROOT  # noqa: E402
from meshbook.parallel.overlap import all_gather_matmul, matmul_reduce_scatter  # noqa: E402
from meshbook.planning import programs, topologies  # noqa: E402
from meshbook.sharding import reduced, shard_map_over_the_rest  # noqa: E402

TPU, SHAPE = "v5e-8", (2, 4)
B, T, D, F = 2, 2048, 8192, 32_768
WAYS = {"plain": {"ring": False}, "ring": {}, "both ways": {"bidirectional": True}}
TOKENS, HIDDEN = P("batch", "model"), P("batch", None, "model")


def mlp(options, x_BTD, w_DF, w_FD):
    """The MLP of one layer, (B, T, D) to (B, T, D), tokens split over "model" at both ends."""
    def run(product, x, w, out):
        specs = jax.typeof(x).sharding.spec, jax.typeof(w).sharding.spec
        return shard_map_over_the_rest(partial(product, axis="model", **options), specs, out)(x, w)

    w_DF, w_FD = (reduced(w, "batch") for w in (w_DF, w_FD))
    h_BTF = jax.nn.relu(run(all_gather_matmul, x_BTD, w_DF, HIDDEN))
    return run(matmul_reduce_scatter, h_BTF, w_FD, TOKENS)


def loss_and_gradients(options, x_BTD, w_DF, w_FD, target_BTD):
    """Half the squared distance from a target, and its gradients to input and weights."""
    def loss(*given):
        return jnp.square(mlp(options, *given) - target_BTD).sum() / 2

    return jax.value_and_grad(loss, (0, 1, 2))(x_BTD, w_DF, w_FD)


def arguments():
    """Shapes and layouts of what the program is given."""
    mesh = topologies.tpu_mesh(TPU, SHAPE)
    shape = lambda dims, spec: jax.ShapeDtypeStruct(dims, jnp.bfloat16,
                                                    sharding=NamedSharding(mesh, spec))
    return (shape((B, T, D), TOKENS), shape((D, F), P(None, "model")), shape((F, D), P("model")),
            shape((B, T, D), TOKENS))


def main():
    jax.config.update("jax_traceback_in_locations_limit", 0)  # these name files of this machine
    for name, options in WAYS.items():
        step = jax.jit(partial(loss_and_gradients, options))
        text = topologies.text_for(TPU, step, *arguments())
        path = programs.path_of(f"{TPU} {SHAPE} mlp {name}")
        path.write_bytes(lzma.compress(text.encode()))
        print(f"{path.relative_to(ROOT)}: {len(text):,} characters", flush=True)


if __name__ == "__main__":
    main()
