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
from jax.sharding import AxisType, NamedSharding

from helpers import start
from meshbook.models.losses import MASKED, chunked_cross_entropy, obvious_cross_entropy
from meshbook.proofs import collectives, work
from meshbook.sharding import Sharding, inside, make_mesh

T, D, V, VOCABULARY, ROUNDS = 256, 256, 50_304, 50_257, 3
TABLE = Sharding.tensor_parallel()


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


def chunked(sharding):
    """This book's, by a table."""
    def loss(hidden_BTD, w_DV, b_V, labels_BT):
        return chunked_cross_entropy(hidden_BTD, w_DV, b_V, labels_BT,
                                     vocabulary=VOCABULARY, sharding=sharding)[0]

    return loss


def compiled(loss, rows, mesh=None):
    """Value and gradients as a program; its arguments have shapes and no numbers."""
    shapes = {"BTD": (rows, T, D), "DV": (D, V), "V": (V,), "BT": (rows, T)}
    where = lambda letters: mesh and NamedSharding(mesh, TABLE.spec(letters))
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.int32 if letters == "BT" else jnp.float32,
                             sharding=where(letters)) for letters, shape in shapes.items()]

    def run(*arguments):
        with inside(mesh):
            return jax.value_and_grad(loss, (0, 1, 2))(*arguments)

    return jax.jit(run).lower(*arguments).compile()


def sizes():
    """Rows: temporaries, work and bytes of each, at the source's size."""
    auto = make_mesh((4, 2), axis_types=AxisType.Auto)
    programs = {
        "plain on one device": (plain, None), "obvious on one device": (obvious, None),
        "chunked on one device": (chunked(Sharding.none()), None),
        "plain on (4, 2)": (plain, auto), "obvious on (4, 2)": (obvious, auto),
        "chunked on (4, 2)": (chunked(TABLE), make_mesh((4, 2))),
    }
    rows, useful = [], 6 * 256 * T * D * V
    for name, (loss, mesh) in programs.items():
        program = compiled(loss, 256, mesh)
        devices = 1 if mesh is None else mesh.size
        note = f"{work(program) * devices / useful:.2f} times the useful work"
        for axis, each in (collectives(program, mesh) if mesh else {}).items():
            note += f"; {each.bytes / 1e6:.1f} MB by {axis[0]} along {', '.join(axis[1])}"
        rows.append({"name": f"{name}: temporaries", "unit": "GB a device", "note": note,
                     "value": program.memory_analysis().temp_size_in_bytes / 1e9})
    return rows


def speeds():
    """Rows: seconds of value and gradients of 8 rows on one device."""
    draw = np.random.default_rng(0)
    head = [draw.normal(size=shape).astype(np.float32) for shape in ((8, T, D), (D, V), (V,))]
    arguments = jax.device_put([*head, draw.integers(0, VOCABULARY, (8, T)).astype(np.int32)])
    losses = {"plain": plain, "obvious": obvious, "chunked": chunked(Sharding.none())}
    programs = {name: compiled(loss, 8) for name, loss in losses.items()}
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
