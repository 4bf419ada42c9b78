"""Compile an MLP whose tokens are split for a TPU v5e: its collectives plain, in rings, and left to
the compiler.

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
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P  # noqa: E402

from benchmarks.__main__ import ROOT  # noqa: E402
from meshbook.parallel.overlap import all_gather_matmul, matmul_reduce_scatter  # noqa: E402
from meshbook.planning import programs, topologies  # noqa: E402
from meshbook.sharding import reduced, shard_map_over_the_rest  # noqa: E402

TPU, SHAPE = "v5e-8", (2, 4)
B, T, D, F = 2, 2048, 8192, 32_768
TOKENS, HIDDEN = P("batch", "model"), P("batch", None, "model")


def mlp(gather, scatter, x_BTD, w_DF, w_FD):
    """The MLP of one layer, (B, T, D) to (B, T, D), tokens split over "model" at both ends."""
    def run(product, x, w, out):
        specs = jax.typeof(x).sharding.spec, jax.typeof(w).sharding.spec
        return shard_map_over_the_rest(partial(product, axis="model"), specs, out)(x, w)

    w_DF, w_FD = (reduced(w, "batch") for w in (w_DF, w_FD))
    h_BTF = jax.nn.relu(run(gather, x_BTD, w_DF, HIDDEN))
    return run(scatter, h_BTF, w_FD, TOKENS)


def by_hand(**options):
    """The MLP of the package's two products."""
    return partial(mlp, partial(all_gather_matmul, **options),
                   partial(matmul_reduce_scatter, **options))


def of_one_example(collective, at, **options):
    """A collective over the first dimension, which this compiler does not make an all-reduce."""
    return lambda x_1TD: collective(x_1TD[0], "model", tiled=True, **{at: 0}, **options)[None]


def gather_first(x_1tD, w_Df, axis):
    """The tokens of one example gathered along its first dimension, times w."""
    return of_one_example(jax.lax.all_gather, "axis")(x_1tD) @ w_Df


def scatter_first(h_1Tf, w_fD, axis):
    """h times w, the sum of one example scattered along its first dimension."""
    return of_one_example(jax.lax.psum_scatter, "scatter_dimension")(h_1Tf @ w_fD)


def constrained(x_BTD, w_DF, w_FD):
    """The MLP on an Auto mesh: the compiler is told where tokens and hidden units lie."""
    pin = jax.lax.with_sharding_constraint
    h_BTF = pin(jax.nn.relu(pin(x_BTD, TOKENS) @ w_DF), HIDDEN)
    return pin(h_BTF @ w_FD, TOKENS)


WAYS = {"plain": by_hand(ring=False), "ring": by_hand(), "both ways": by_hand(bidirectional=True),
        "scattered": partial(mlp, gather_first, scatter_first), "compiler": constrained,
        "compiler no windows": constrained}
OPTIONS = {"compiler no windows": {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}}


def loss_and_gradients(way, x_BTD, w_DF, w_FD, target_BTD):
    """Half the squared distance from a target, and its gradients to input and weights."""
    def loss(*given):
        return jnp.square(WAYS[way](*given) - target_BTD).sum() / 2

    return jax.value_and_grad(loss, (0, 1, 2))(x_BTD, w_DF, w_FD)


def arguments(way):
    """Shapes and layouts of what the program is given."""
    types = AxisType.Auto if WAYS[way] is constrained else AxisType.Explicit
    mesh = topologies.tpu_mesh(TPU, SHAPE, axis_types=types)
    shape = lambda dims, spec: jax.ShapeDtypeStruct(dims, jnp.bfloat16,
                                                    sharding=NamedSharding(mesh, spec))
    return (shape((B, T, D), TOKENS), shape((D, F), P(None, "model")), shape((F, D), P("model")),
            shape((B, T, D), TOKENS))


def main():
    jax.config.update("jax_traceback_in_locations_limit", 0)  # these name files of this machine
    for name in WAYS:
        step = jax.jit(partial(loss_and_gradients, name), compiler_options=OPTIONS.get(name))
        text = topologies.text_for(TPU, step, *arguments(name))
        path = programs.path_of(f"{TPU} {SHAPE} mlp {name}")
        path.write_bytes(lzma.compress(text.encode()))
        print(f"{path.relative_to(ROOT)}: {len(text):,} characters", flush=True)


if __name__ == "__main__":
    main()
