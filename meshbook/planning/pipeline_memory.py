"""How many bytes of temporaries a pipeline in one program has on each device, by formula.

The programs are those of `meshbook.parallel.pipeline` and `meshbook.parallel.slots`, of p devices
with m microbatches. What a schedule stores is counted: activations, residuals, sums of gradients.
What one stage takes besides, while it runs, is that of the stage compiled alone. The rest are the
activations at work in a turn of the loop: what came in, what goes out, and a copy of each.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Shaped

from meshbook.parallel.backward import in_three
from meshbook.parallel.slots import Slots

AT_WORK = 4  # activations in a turn of the loop: one in, one out, a copy of each


class StageBytes(NamedTuple):
    """What a stage needs for one microbatch, in bytes.

    activation: its input, or its output; weights: of its layers, and their gradients as many.
    residuals: what `jax.vjp` keeps besides the weights; alone: temporaries of a program of nothing
    but the stage and its backward pass. after_forward, after_backward: what F and B of
    `meshbook.parallel.backward.in_three` keep in all of its layers.
    """

    activation: int
    weights: int
    residuals: int
    alone: int
    after_forward: int
    after_backward: int


def stage_bytes(layer: Callable, weights: Any, x: Shaped[Array, "..."]):
    """The StageBytes of layers, one after the other: layer(weights, x) -> y, an array like x.

    weights: arrays with the layers as first dimension. The stage is compiled for the default
    device, and not run.
    """
    first, count = jax.tree.map(lambda w: w[0], weights), len(jax.tree.leaves(weights)[0])

    def stage(weights, x):
        return jax.lax.scan(lambda x, w: (layer(w, x), None), x, weights)[0]

    def there_and_back(weights, x, dy):
        return jax.vjp(stage, weights, x)[1](dy)

    backward = jax.eval_shape(lambda weights, x: jax.vjp(stage, weights, x)[1], weights, x)
    program = jax.jit(there_and_back).lower(weights, x, x).compile()
    three = in_three(layer, first, x)
    _, kept = jax.eval_shape(three.forward, first, (), x)
    _, more = jax.eval_shape(three.of_input, first, (), kept, x)
    return StageBytes(
        x.nbytes, bytes_of(weights), bytes_of(backward) - bytes_of(weights),
        program.memory_analysis().temp_size_in_bytes, count * bytes_of(kept),
        count * bytes_of(more))


def bytes_of(tree: Any):
    """The bytes of all arrays, or shapes of arrays, of a tree."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def gpipe_temporaries(stages: int, microbatches: int, each: StageBytes, recompute: bool = False,
                      chunks: int = 1, embedded: bool = True):
    """Of `gpipe`, or with recompute and chunks of `circular`, in v·m + p - 1 ticks.

    each: of one chunk. For every tick the residuals, or to recompute them the input, are stored,
    and the output, in whose place the backward loop has its gradient. Besides, the forward loop has
    the inputs of all microbatches and what it keeps of the tick at hand; the backward loop has the
    stage at work and, if parameters before the first stage are trained (embedded), the gradients
    of all inputs. The larger of the two.
    """
    u, m = each.activation, microbatches
    kept = u if recompute else each.residuals
    stored = (chunks * m + stages - 1) * (kept + u)
    forward = m * u + kept + AT_WORK * u
    backward = embedded * m * u + each.alone + 2 * u  # dy came in, dx goes out
    return stored + max(forward, backward) + chunks * each.weights


def lockstep_temporaries(stages: int, each: StageBytes):
    """Of `one_f_one_b`, for any number of microbatches: a ring of 2p - 1 inputs, and one stage."""
    ring = (2 * stages - 1) * each.activation
    return ring + each.alone + each.weights + AT_WORK * each.activation


def table_temporaries(table: Slots, each: StageBytes, copies: int = 2):
    """Of `by_table`: a ring for each microbatch that is held or waits, of what F and B keep.

    copies: how often each of these rings is there; twice where a branch returns it in another place
    than it was given, as with JAX 0.10 on a CPU. Rings of what arrives, x and dy, are there once.
    Besides, the branch at hand makes what it keeps or gradients of weights, before they are put to
    the others. Too high where a stage's weights outweigh all activations: of weights as large
    as 512 of them, the program has 0.79 of it.
    """
    rings = copies * (table.held * each.after_forward + table.waiting * each.after_backward)
    arrived = 2 * table.held * each.activation
    made = max(each.after_forward + each.after_backward, each.weights)
    return rings + arrived + made + each.weights + AT_WORK * each.activation
