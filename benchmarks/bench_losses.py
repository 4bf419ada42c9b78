"""The cross-entropy of a large vocabulary by method: memory, work and seconds.

Memory, work and traffic are those of programs compiled for the source's batch of 256 rows
of 256 tokens; a step of 8 rows is timed, value and gradients, in turns.
"""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from helpers import start
from meshbook.models.losses import MASKED, chunked_cross_entropy, obvious_cross_entropy
from meshbook.proofs import collectives, work
from meshbook.sharding import Sharding, make_mesh

T, D, V, VOCABULARY, ROUNDS = 256, 256, 50_304, 50_257, 3


def masked(b_V):
    """The bias, with MASKED where no token is."""
    return jnp.where(jnp.arange(V) < VOCABULARY, b_V, MASKED)


def plain(hidden_BTD, w_DV, b_V, labels_BT):
    """All logits at once."""
    logits_BTV = hidden_BTD @ w_DV + masked(b_V)
    return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, labels_BT).mean()


def obvious(hidden_BTD, w_DV, b_V, labels_BT):
    """Chunks as one writes them first."""
    return obvious_cross_entropy(hidden_BTD, w_DV, masked(b_V), labels_BT)


def chunked(hidden_BTD, w_DV, b_V, labels_BT):
    """This book's."""
    return chunked_cross_entropy(hidden_BTD, w_DV, b_V, labels_BT, vocabulary=VOCABULARY,
                                 sharding=Sharding.tensor_parallel())[0]


LOSSES = {"plain": (plain, AxisType.Auto), "obvious": (obvious, AxisType.Auto),
          "chunked": (chunked, AxisType.Explicit)}
SPECS = {"BTD": P("batch"), "DV": P(None, "model"), "V": P("model"), "BT": P("batch")}


def compiled(name, rows, shape):
    """(value and gradients as a program, its mesh); its arguments have shapes and no numbers.

    This book's loss is on an Explicit mesh; the others leave their layout to the compiler.
    """
    loss, kind = LOSSES[name]
    mesh = make_mesh(shape, axis_types=kind)
    shapes = {"BTD": (rows, T, D), "DV": (D, V), "V": (V,), "BT": (rows, T)}
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.int32 if letters == "BT" else jnp.float32,
                             sharding=NamedSharding(mesh, SPECS[letters]))
        for letters, shape in shapes.items()]
    with jax.set_mesh(mesh):
        step = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(*arguments)
    return step.compile(), mesh


def sizes():
    """Rows: temporaries, work and bytes of each, at the source's size."""
    programs = {f"{name} on {place}": (name, shape) for place, shape in (
        ("one device", (1, 1)), ("(4, 2)", (4, 2))) for name in LOSSES}
    rows, useful = [], 6 * 256 * T * D * V
    for name, (loss, shape) in programs.items():
        program, mesh = compiled(loss, 256, shape)
        note = f"{work(program) * mesh.size / useful:.2f} times the useful work"
        for axis, each in collectives(program, mesh).items():
            note += f"; {each.bytes / 1e6:.1f} MB by {axis[0]} along {', '.join(axis[1])}"
        rows.append({"name": f"{name}: temporaries", "unit": "GB a device", "note": note,
                     "value": program.memory_analysis().temp_size_in_bytes / 1e9})
    return rows


def speeds():
    """Rows: seconds of value and gradients of 8 rows on one device."""
    draw = np.random.default_rng(0)
    head = [draw.normal(size=shape).astype(np.float32) for shape in ((8, T, D), (D, V), (V,))]
    mesh = make_mesh((1, 1))
    labels = draw.integers(0, VOCABULARY, (8, T)).astype(np.int32)
    arguments = jax.device_put([*head, labels], NamedSharding(mesh, P()))
    programs = {name: compiled(name, 8, (1, 1))[0] for name in LOSSES}
    rounds = [{name: seconds(program, arguments) for name, program in programs.items()}
              for _ in range(ROUNDS + 1)][1:]
    return [{
        "name": f"{name}: 2,048 tokens on one device", "unit": "s",
        "value": statistics.median(each[name] for each in rounds),
        "note": f"{statistics.median(each[name] / each['plain'] for each in rounds):.2f} "
                "times the plain loss's",
    } for name in programs]


def seconds(program, arguments):
    """How long one call takes."""
    begin = time.perf_counter()
    jax.block_until_ready(program(*arguments))
    return time.perf_counter() - begin


def run():
    """Sizes by the compiler, speeds by the clock."""
    start(8)
    return sizes() + speeds()


if __name__ == "__main__":
    for row in run():
        print(row)
